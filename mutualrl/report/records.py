"""Reads what a run left behind: metrics, evaluations, rescues, the resolved config, the hub's last statistics.

A run may be unfinished, killed, or still writing: missing files are empty; a torn or foreign line, one with numbers that
nothing can be drawn of, and a file that cannot be read are left out and counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from exchange.stats import HubStats
from mutualrl.config import Run
from mutualrl.manifest import Manifest

Record = TypeVar("Record")

MAX_STEP = 2**53
"""Beyond it floats, and so charts, no longer tell steps apart."""


class Eval(msgspec.Struct, frozen=True, kw_only=True):
    """One line of evals.jsonl: greedy accuracy of one agent on one task's held-out prompts; step 0 is before training.

    correct [N]: 1 or 0 per prompt, in the order of prompt_ids [N]. mean_length in tokens; eos_rate in 0..1.
    pass_at_k: by k, of sampled completions; empty where none were.
    """

    agent: str
    step: int
    task: str
    accuracy: float
    wall_s: float = 0.0
    own_skill: bool = False
    correct: tuple[int, ...] = ()
    prompt_ids: tuple[str, ...] = ()
    mean_length: float | None = None
    eos_rate: float | None = None
    pass_at_k: dict[str, float] = {}

    def __post_init__(self) -> None:
        numbers = [self.accuracy, self.wall_s, self.mean_length or 0.0, self.eos_rate or 0.0, *self.pass_at_k.values()]
        if not (0 <= self.step <= MAX_STEP and all(map(math.isfinite, numbers)) and set(self.correct) <= {0, 1}):
            raise ValueError(f"no evaluation has these numbers, got {self}")

    @property
    def by_prompt(self) -> dict[str, int]:
        """Prompt id -> 1 or 0."""
        return dict(zip(self.prompt_ids, self.correct, strict=False))


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of text between two boundaries that both tokenizations share; exact: one equal token on each side."""

    text: str
    source: tuple[str, ...]
    receiver: tuple[str, ...]
    exact: bool


class Rescue(msgspec.Struct, frozen=True, kw_only=True):
    """One line of rescues.jsonl: a peer's success that an agent imitated on a prompt where all its own rollouts failed."""

    agent: str
    step: int
    peer: str
    task: str
    prompt: str
    text: str
    prompt_id: str = ""
    spans: tuple[Span, ...] = ()
    residual: float | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.step <= MAX_STEP and math.isfinite(self.residual or 0.0)):
            raise ValueError(f"no rescue has these numbers, got step={self.step}, residual={self.residual}")


class TrialPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One line of coin.jsonl: a prompt of a rescue trial, whether its peer success was delivered, and whether the final
    policy answers it."""

    agent: str
    task: str
    prompt_id: str
    delivered: bool
    correct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of metrics.jsonl; a step may have several. values: the agent's name off every key, finite numbers only."""

    agent: str
    step: int
    wall_s: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Everything known about one run; None: missing, or not readable by this version.

    evals: the last line per agent, task and step. evals, steps: in step order. agents: in the config's order.
    """

    path: Path
    config: Run | None
    evals: tuple[Eval, ...]
    steps: tuple[Step, ...]
    rescues: tuple[Rescue, ...]
    trial: tuple[TrialPrompt, ...]
    exchange: HubStats | None
    manifest: Manifest | None
    unreadable_lines: int
    agents: tuple[str, ...]

    @property
    def name(self) -> str:
        """The run's name where the config has one, else its directory's."""
        return self.config.name if self.config is not None and self.config.name != "run" else self.path.name

    def curve(self, agent: str, task: str) -> list[Eval]:
        """The evaluations of one agent on one task, first to last."""
        return [row for row in self.evals if row.agent == agent and row.task == task]

    def tasks(self, agent: str) -> list[str]:
        """The agent's tasks, its own skills first."""
        own: dict[str, bool] = {}
        for row in self.evals:
            if row.agent == agent:
                own[row.task] = row.own_skill
        return sorted(own, key=lambda task: (not own[task], task))

    def cells(self, *, own_skill: bool) -> list[tuple[str, str]]:
        """(agent, task) pairs of own skills, or of all other tasks."""
        return [
            (agent, task)
            for agent in self.agents
            for task in self.tasks(agent)
            if self.curve(agent, task)[0].own_skill == own_skill
        ]

    def series(self, agent: str, metric: str) -> list[tuple[int, float]]:
        """(step, value) of one metric, for the steps that have it."""
        return [(row.step, row.values[metric]) for row in self.steps if row.agent == agent and metric in row.values]


def load_record(run_dir: Path) -> RunRecord:
    """Read a run directory. Raises FileNotFoundError where there is no such directory; anything inside may be missing."""
    if not run_dir.is_dir():
        raise FileNotFoundError(f"no run directory at {run_dir}: give the directory that `mutualrl up` wrote")
    evals, torn_evals = read_lines(run_dir / "evals.jsonl", Eval)
    rescues, torn_rescues = read_lines(run_dir / "rescues.jsonl", Rescue)
    trial, torn_trial = read_lines(run_dir / "coin.jsonl", TrialPrompt)
    steps, torn_steps = _read_steps(run_dir / "metrics.jsonl")
    config = _read_whole(run_dir / "config.json", Run)
    last = {(row.agent, row.task, row.step): row for row in evals}
    seen = dict.fromkeys([*(config.agents if config else ()), *(row.agent for row in evals), *(row.agent for row in steps)])
    return RunRecord(
        path=run_dir,
        config=config,
        evals=tuple(sorted(last.values(), key=lambda row: row.step)),
        steps=tuple(steps),
        rescues=tuple(rescues),
        trial=tuple(trial),
        exchange=_read_whole(run_dir / "exchange.json", HubStats),
        manifest=_read_whole(run_dir / "manifest.json", Manifest),
        unreadable_lines=torn_evals + torn_rescues + torn_trial + torn_steps,
        agents=tuple(seen),
    )


def read_lines(path: Path, kind: type[Record]) -> tuple[list[Record], int]:
    """The lines of a JSONL file as `kind`, and how many could not be read (torn by a crash, or not of this kind)."""
    rows: list[Record] = []
    unreadable = 0
    for value in _objects(path):
        try:
            rows.append(msgspec.convert(value, kind, strict=False))
        except msgspec.ValidationError:
            unreadable += 1
    return rows, unreadable


def _read_steps(path: Path) -> tuple[list[Step], int]:
    rows: list[Step] = []
    unreadable = 0
    for value in _objects(path):
        row = _step(value)
        if row is None:
            unreadable += 1
        else:
            rows.append(row)
    return sorted(rows, key=lambda row: row.step), unreadable


def _step(value: object) -> Step | None:
    """A line of metrics.jsonl; None when it is no such line. What is no number, NaN and infinity included, is no value."""
    if not isinstance(value, dict) or not isinstance(agent := value.get("agent"), str):
        return None
    step = value.get("step")
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        return None
    numbers: dict[str, float] = {}
    for key, number in value.items():
        if isinstance(number, int | float) and (key == "wall_s" or key.startswith(f"{agent}/")):
            try:
                numbers[key.removeprefix(f"{agent}/")] = float(number)
            except OverflowError:
                return None
    finite = {key: number for key, number in numbers.items() if math.isfinite(number)}
    return Step(agent=agent, step=step, wall_s=finite.pop("wall_s", 0.0), values=finite)


def _objects(path: Path) -> Iterator[object]:
    """The JSON value of every line; None for a line that is no JSON, and for a file that cannot be read.

    `json` and not msgspec: it reads NaN.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError:
        yield None
        return
    for line in content.split(b"\n"):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            yield None


def _read_whole(path: Path, kind: type[Record]) -> Record | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError, RecursionError):
        return None
