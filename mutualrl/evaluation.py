"""`mutualrl eval`: checkpoints side by side on held-out prompts, with paired intervals against the first."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from agents.config import AgentConfig, Sampling
from agents.errors import AgentError
from agents.evaluate import Draws, TaskScore, evaluate
from agents.policies.lora import load_merged
from agents.policies.policy import build_policy
from agents.rewards.rewards import Reference, Rewards
from agents.samplers.hf import HFSampler
from agents.tasks.config import Data
from agents.tasks.data import read_data
from agents.tasks.load import TaskData, given_task, load_task
from exchange.types import Version
from mutualrl.checkpoint_paths import CheckpointSource, find_checkpoints, is_run
from mutualrl.config import Run
from mutualrl.errors import InputError
from mutualrl.eval_settings import EvalSettings
from mutualrl.load import load_run
from mutualrl.report.verdict import percent, points
from mutualrl.rundir import RunDir
from mutualrl.schema import nearest
from mutualrl.statistics import Gain, paired_bootstrap, paired_differences

DEFAULT_MAX_COMPLETION_LENGTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One checkpoint on one task. gain: over the first checkpoint; None for that one itself."""

    checkpoint: str
    score: TaskScore
    gain: Gain | None


def run_eval(checkpoints: Sequence[str], settings: EvalSettings, *, as_json: bool, console: Console | None = None) -> None:
    """Evaluate and print; raises InputError or ConfigError for what cannot be used, before the first model where it can."""
    if not checkpoints:
        raise InputError("no checkpoint was given: name a Hugging Face directory, a hub name or a run's directory")
    sources = [source for given in checkpoints for source in find_checkpoints(given)]
    run, tasks = read_held_out(settings)
    first: dict[str, TaskScore] = {}
    results = []
    for source in sources:
        try:
            scores = asyncio.run(_evaluate(source, tasks, run, settings))
        except AgentError as error:
            raise InputError(f"{source.label}: {error}") from error
        for score in scores:
            before = first.setdefault(score.task, score)
            result = Result(checkpoint=source.label, score=score, gain=None if before is score else _gain(score, before))
            results.append(result)
            if as_json:
                print(msgspec.json.encode(_line(result)).decode(), flush=True)
    if not as_json:
        (console or Console()).print(_table(results, settings))


def read_held_out(settings: EvalSettings) -> tuple[Run | None, list[TaskData]]:
    """The tasks of `data`, each with the prompts to evaluate on, and the run whose held-out sets they are, if they are."""
    path = Path(settings.data)
    run: Run | None = None
    if path.suffix == ".toml":
        run = load_run(path)
    elif is_run(path):
        run = RunDir(path).read_config()
    try:
        if run is not None:
            tasks = [load_task(task, seed=run.seed) for task in run.tasks]
        else:
            name = settings.task or path.stem or "data"
            rows = read_data(Data(name=name, path=settings.data, prompt_column=settings.prompt_column))
            tasks = [given_task(name, [], rows)]
    except (AgentError, ValueError) as error:
        raise InputError(f"--data: {error}") from error
    names = [task.name for task in tasks if task.heldout]
    if run is not None and settings.task is not None and settings.task not in names:
        raise InputError(f"--task: {settings.data} has no such task, got {settings.task!r}; {nearest(settings.task, names)}")
    chosen = [task for task in tasks if task.heldout and settings.task in (None, task.name)]
    if not chosen:
        raise InputError(f"--data: no task of {settings.data} holds any prompts out")
    return run, [replace(task, heldout=task.heldout[: settings.limit]) for task in chosen]


async def _evaluate(
    source: CheckpointSource, tasks: Sequence[TaskData], run: Run | None, settings: EvalSettings
) -> list[TaskScore]:
    agent = source.agent or _common(run)
    rewards = Rewards(_rewards(agent, settings), agent.reward_weights if agent and not settings.rewards else None)
    try:
        prompts = [prompt for task in tasks for prompt in task.heldout]
        rewards.check_columns(prompts)
        policy = build_policy(
            source.policy(settings.prompt_format),
            seed=settings.seed,
            device=settings.device,
            dtype=settings.dtype,
            threads=settings.threads,
            loaded=load_merged(Path(source.path)) if source.is_adapter else None,
        )
        sampler = HFSampler(policy, _sampling(agent, settings))
        sampler.preflight(prompts)
        threshold = settings.threshold
        if threshold is None:
            threshold = 1.0 if run is None else run.evaluation.threshold
        draws = Draws(
            num_samples=settings.num_samples,
            pass_k=settings.pass_k,
            version=Version(0, 0),
            seed=zlib.crc32(f"{settings.seed}/eval".encode()),
        )
        return await evaluate(
            sampler,
            tasks,
            rewards,
            batch_size=settings.batch_size,
            threshold=threshold,
            draws=draws if settings.num_samples else None,
        )
    finally:
        rewards.close()


def _common(run: Run | None) -> AgentConfig | None:
    """The first agent of the run that the data are of: what it says of rewards and sampling holds for other checkpoints."""
    return next(iter(run.agents.values())) if run is not None else None


def _rewards(agent: AgentConfig | None, settings: EvalSettings) -> Sequence[Reference]:
    return settings.rewards or (agent.rewards if agent is not None else ("exact_match",))


def _sampling(agent: AgentConfig | None, settings: EvalSettings) -> Sampling:
    base = agent.sampling if agent is not None else Sampling(max_completion_length=DEFAULT_MAX_COMPLETION_LENGTH)
    return msgspec.structs.replace(
        base,
        max_completion_length=settings.max_completion_length or base.max_completion_length,
        temperature=settings.temperature or base.temperature,
    )


def _gain(score: TaskScore, before: TaskScore) -> Gain | None:
    answers, control = (dict(zip(map(str, each.prompt_ids), map(int, each.correct), strict=True)) for each in (score, before))
    return paired_bootstrap([[paired_differences([(answers, control)])]], rng=np.random.default_rng(0))


def _line(result: Result) -> dict[str, object]:
    score, gain = result.score, result.gain
    return {
        "checkpoint": result.checkpoint,
        "task": score.task,
        "prompts": len(score.prompt_ids),
        "accuracy": score.accuracy,
        "gain": None if gain is None else {"mean": gain.mean, "low": gain.low, "high": gain.high},
        "num_samples": score.num_samples,
        "pass_at_k": {str(k): rate for k, rate in score.pass_at_k.items()},
        "mean_length": score.mean_length,
        "eos_rate": score.eos_rate,
        "correct": [int(each) for each in score.correct],
        "prompt_ids": list(score.prompt_ids),
    }


def _table(results: Sequence[Result], settings: EvalSettings) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=f"Held-out prompts of {settings.data}", title_justify="left")
    for column in ("checkpoint", "task"):
        table.add_column(column, overflow="fold")
    ks = settings.pass_k if settings.num_samples else ()
    compared = any(result.gain is not None for result in results)
    gains = ("over the first", "95 % interval") if compared else ()
    for column in ("prompts", "greedy", *gains, *(f"pass@{k}" for k in ks), "tokens", "ended"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(result.checkpoint, result.score.task, *_cells(result, ks, compared=compared))
    return table


def _cells(result: Result, ks: Sequence[int], *, compared: bool) -> Iterator[str]:
    score, gain = result.score, result.gain
    yield str(len(score.prompt_ids))
    yield percent(score.accuracy)
    if compared:
        yield "–" if gain is None else points(gain.mean)
        yield "–" if gain is None else f"{points(gain.low)} to {points(gain.high)}"
    for k in ks:
        yield percent(score.pass_at_k[k])
    yield f"{score.mean_length:.1f}"
    yield percent(score.eos_rate)
