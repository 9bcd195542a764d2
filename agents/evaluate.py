"""Held-out prompts: greedy accuracy, and pass@k from sampled completions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from agents.rewards.rewards import Rewards
from agents.tasks.load import TaskData
from agents.types import Completion, Group, Prompt
from exchange.types import PromptId, Version


class EvaluationSampler(Protocol):
    """The part of a `Sampler` that evaluation needs."""

    def greedy(self, prompts: Sequence[Prompt], batch_size: int) -> list[Completion]: ...

    def sample(
        self, prompts: Sequence[Prompt], *, num_generations: int, step: int, version: Version, seed: int
    ) -> list[Group]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Completions to be sampled beside the greedy one, as training samples them. num_samples: n, per prompt. pass_k: the k.

    version: of the weights. seed: fixes the draws together with the prompts' order and the weights; training's own must differ.
    """

    num_samples: int
    pass_k: Sequence[int]
    version: Version
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """One task's held-out result, prompts in the task's order.

    accuracy: share of prompts whose greedy completion is correct; one without any reward is not. correct: bool
    [prompts]. mean_length: in tokens, the end token included. eos_rate: share that ended by itself. num_correct: int
    [prompts], of `num_samples` sampled completions; pass_at_k: by k. The last three are 0 and empty where nothing was drawn.
    """

    task: str
    accuracy: float
    correct: npt.NDArray[np.bool_]
    prompt_ids: tuple[PromptId, ...]
    mean_length: float
    eos_rate: float
    num_samples: int = 0
    num_correct: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    pass_at_k: Mapping[int, float] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """`eval/<task>/…`."""
        rates = {f"pass@{k}": rate for k, rate in self.pass_at_k.items()}
        return {f"eval/{self.task}/{name}": value for name, value in {"accuracy": self.accuracy, **rates}.items()}


def pass_at_k(num_correct: npt.NDArray[np.int64], num_samples: int, k: int) -> float:
    """Mean over prompts of 1 - C(n-c, k)/C(n, k): the chance that one of k completions, drawn without replacement, is correct.

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1, in the product form that their listing has; unbiased for the
    chance that one of k fresh samples is correct. Deviations: none.
    Args: num_correct [prompts]: c of `num_samples` = n completions, 0 <= c <= n; 1 <= k <= n. Returns 0..1.
    Degenerate: fewer than k wrong completions give 1; no prompts give NaN.
    """
    rates = [
        1.0 if num_samples - c < k else 1.0 - float(np.prod(1.0 - k / np.arange(num_samples - c + 1, num_samples + 1)))
        for c in num_correct.tolist()
    ]
    return float(np.mean(rates)) if rates else float("nan")


async def evaluate(
    sampler: EvaluationSampler,
    tasks: Sequence[TaskData],
    rewards: Rewards,
    *,
    batch_size: int = 256,
    threshold: float = 1.0,
    executor: Executor | None = None,
    draws: Draws | None = None,
) -> list[TaskScore]:
    """Score the held-out prompts of every task that has any; correct means a reward of at least `threshold`.

    batch_size: completions decoded at a time. draws: what to sample for pass@k; None: the greedy completions alone.
    Waits for the decoding, which runs in `executor` (None: the loop's own), then for the reward functions. The policy
    must not learn meanwhile. A cancelled call leaves a decoding that has begun to run to its end.
    """
    tasks = [task for task in tasks if task.heldout]
    prompts = [prompt for task in tasks for prompt in task.heldout]
    completions = await asyncio.get_running_loop().run_in_executor(executor, sampler.greedy, prompts, batch_size)
    correct = await _judge(rewards, prompts, completions, threshold)
    counts = None if draws is None else await _count(sampler, prompts, rewards, draws, batch_size, threshold, executor)
    results = []
    start = 0
    for task in tasks:
        rows = slice(start, start + len(task.heldout))
        start = rows.stop
        sampled = {}
        if draws is not None and counts is not None:
            sampled = {k: pass_at_k(counts[rows], draws.num_samples, k) for k in draws.pass_k}
        results.append(
            TaskScore(
                task=task.name,
                accuracy=float(correct[rows].mean()),
                correct=correct[rows],
                prompt_ids=tuple(prompt.id for prompt in task.heldout),
                mean_length=float(np.mean([len(completion.ids) for completion in completions[rows]])),
                eos_rate=float(np.mean([completion.has_eos for completion in completions[rows]])),
                num_samples=0 if draws is None else draws.num_samples,
                num_correct=np.zeros(0, dtype=np.int64) if counts is None else counts[rows],
                pass_at_k=sampled,
            )
        )
    return results


async def _judge(
    rewards: Rewards, prompts: Sequence[Prompt], completions: Sequence[Completion], threshold: float
) -> npt.NDArray[np.bool_]:
    texts, ids = [each.text for each in completions], [each.ids for each in completions]
    correct: npt.NDArray[np.bool_] = (await rewards.score(prompts, texts, ids=ids)).total >= threshold
    return correct


async def _count(
    sampler: EvaluationSampler,
    prompts: Sequence[Prompt],
    rewards: Rewards,
    draws: Draws,
    batch_size: int,
    threshold: float,
    executor: Executor | None,
) -> npt.NDArray[np.int64]:
    """How many of each prompt's sampled completions are correct, a batch of prompts at a time."""
    size = max(1, batch_size // draws.num_samples)
    counts = [np.zeros(0, dtype=np.int64)]
    for number, start in enumerate(range(0, len(prompts), size)):
        chunk = prompts[start : start + size]

        def sample(chunk: Sequence[Prompt] = chunk, number: int = number) -> list[Group]:
            return sampler.sample(chunk, num_generations=draws.num_samples, step=number, version=draws.version, seed=draws.seed)

        groups = await asyncio.get_running_loop().run_in_executor(executor, sample)
        asked = [group.prompt for group in groups for _ in group.completions]
        correct = await _judge(rewards, asked, [each for group in groups for each in group.completions], threshold)
        counts.append(correct.reshape(len(groups), draws.num_samples).sum(axis=1))
    return np.concatenate(counts)
