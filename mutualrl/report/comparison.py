"""The runs of a comparison, and the numbers that are drawn from them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mutualrl.report.hits import hit_rate
from mutualrl.report.outcomes import Pair, first_eval, harmed_in, judge, last_eval, mean_gain
from mutualrl.report.records import RunRecord, load_record
from mutualrl.statistics import Gain

COMPARISON_FILE = "compare.json"
CONTROL = "isolated"
BUDGET_CONTROL = "isolated_budget"
DEFAULT_RULE = "sgt"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One agent on one task in one run. before, after: greedy accuracy on `heldout` prompts, None where not evaluated.

    rollouts: completions that the agent sampled in training. seconds: from the run's start to its last step. rescues:
    peer successes that it imitated. hit_rate: share of its prompts for which a peer's row was at hand, None where nothing
    was asked of peers. harmed: None where the isolated run of the same seed is missing.
    """

    rule: str
    seed: int
    agent: str
    task: str
    own_skill: bool
    before: float | None
    after: float | None
    heldout: int
    rollouts: int
    seconds: float
    rescues: int
    hit_rate: float | None
    harmed: bool | None


class GainRow(msgspec.Struct, frozen=True, kw_only=True):
    """Mean gain of a rule over a control, over agents, tasks and seeds; low, high: 95 % paired bootstrap interval."""

    rule: str
    against: str
    own_skill: bool
    gain: float
    low: float
    high: float


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """compare.json."""

    rows: tuple[Row, ...]
    gains: tuple[GainRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Runs by (rule, seed), in the order in which rules and seeds were asked for."""

    runs: Mapping[tuple[str, int], RunRecord]

    @property
    def rules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rule for rule, _ in self.runs))

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(seed for _, seed in self.runs))

    @property
    def sharing_rules(self) -> tuple[str, ...]:
        """The rules under which agents learn from each other."""
        return tuple(rule for rule in self.rules if rule not in (CONTROL, BUDGET_CONTROL))

    @property
    def headline_rule(self) -> str:
        """The rule that a report speaks of first: the default rule where it was run, else the first sharing rule."""
        return DEFAULT_RULE if DEFAULT_RULE in self.rules else (*self.sharing_rules, *self.rules)[0]

    @property
    def has_skills(self) -> bool:
        """Whether own skills and peers' are told apart in these runs."""
        return any(row.own_skill for run in self.runs.values() for row in run.evals)

    def of_rule(self, rule: str) -> list[RunRecord]:
        """The rule's runs, by seed."""
        return [run for (name, _), run in self.runs.items() if name == rule]

    def pairs(self, rule: str, against: str = CONTROL) -> list[Pair]:
        """Each of the rule's runs beside the control of the same seed; a control is not compared with itself."""
        return [
            Pair(run=run, control=self.runs.get((against, seed)) if rule != against else None)
            for (name, seed), run in self.runs.items()
            if name == rule
        ]

    def gain(self, rule: str, *, own_skill: bool, against: str = CONTROL) -> Gain | None:
        """The rule's mean gain over a control; None where there is no such control or no such task."""
        return mean_gain(self.pairs(rule, against), own_skill=own_skill)

    def document(self) -> Document:
        """What compare.json holds."""
        rows = [row for (rule, seed), run in self.runs.items() for row in self._rows(rule, seed, run)]
        gains = [
            GainRow(rule=rule, against=against, own_skill=own_skill, gain=gain.mean, low=gain.low, high=gain.high)
            for rule in self.rules
            for against in (CONTROL, BUDGET_CONTROL)
            for own_skill in (False, True)
            if (gain := self.gain(rule, own_skill=own_skill, against=against)) is not None
        ]
        return Document(rows=tuple(rows), gains=tuple(gains))

    def _rows(self, rule: str, seed: int, run: RunRecord) -> list[Row]:
        control = self.runs.get((CONTROL, seed))
        rows = []
        for outcome in judge([Pair(run=run, control=None)]):
            agent, task = outcome.agent, outcome.task
            before, after = first_eval(run, agent, task), last_eval(run, agent, task)
            rows.append(
                Row(
                    rule=rule,
                    seed=seed,
                    agent=agent,
                    task=task,
                    own_skill=outcome.own_skill,
                    before=before.accuracy if before is not None else None,
                    after=after.accuracy if after is not None else None,
                    heldout=outcome.heldout,
                    rollouts=rollouts(run, agent),
                    seconds=round(seconds(run, agent), 3),
                    rescues=rescues(run, agent),
                    hit_rate=hit_rate(run, agent, run.agents),
                    harmed=harmed_in(Pair(run=run, control=control), agent, task),
                )
            )
        return rows


def load_comparison(output_dir: Path) -> Comparison:
    """The runs that OUT/compare.json names; if it cannot be read, every `<rule>-seed<k>` directory in OUT."""
    try:
        document = msgspec.json.decode((output_dir / COMPARISON_FILE).read_bytes(), type=Document)
        keys = list(dict.fromkeys((row.rule, row.seed) for row in document.rows))
    except (OSError, ValueError, RecursionError):
        matches = [re.fullmatch(r"([a-z_]+)-seed(\d+)", path.name) for path in sorted(output_dir.iterdir())]
        keys = [(match[1], int(match[2])) for match in matches if match is not None]
    return read_pairs(output_dir, keys)


def read_pairs(output_dir: Path, keys: Sequence[tuple[str, int]]) -> Comparison:
    """The runs of these (rule, seed) pairs."""
    return Comparison(runs={(rule, seed): load_record(pair_dir(output_dir, rule, seed)) for rule, seed in keys})


def pair_dir(output_dir: Path, rule: str, seed: int) -> Path:
    """Where the run of one rule and seed lies."""
    return output_dir / f"{rule}-seed{seed}"


def rollouts(run: RunRecord, agent: str) -> int:
    """Completions that the agent sampled in training: steps × prompts × completions per prompt."""
    if run.config is None or agent not in run.config.agents:
        return 0
    config = run.config.agents[agent]
    steps = {step for step, _ in run.series(agent, "num_tokens")}
    return len(steps) * config.prompts_per_step * config.num_generations


def seconds(run: RunRecord, agent: str) -> float:
    """From the start of the run to the end of the agent's last step, warm start included."""
    return max((row.wall_s for row in run.steps if row.agent == agent), default=0.0)


def rescues(run: RunRecord, agent: str) -> int:
    """Peer successes that the agent imitated on prompts that it failed."""
    return round(sum(value for _, value in run.series(agent, "rescues")))
