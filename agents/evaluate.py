"""Greedy accuracy on held-out prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from agents.rewards.rewards import Rewards
from agents.tasks.load import TaskData
from agents.types import Completion, Prompt
from exchange.types import PromptId


class GreedySampler(Protocol):
    """Decodes one likeliest completion per prompt, in order."""

    def greedy(self, prompts: Sequence[Prompt], batch_size: int) -> list[Completion]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """One task's held-out result, prompts in the task's order.

    accuracy: share of prompts whose greedy completion is correct; one without any reward is not. correct: bool
    [prompts]. mean_length: in tokens, the end token included. eos_rate: share that ended by itself.
    """

    task: str
    accuracy: float
    correct: npt.NDArray[np.bool_]
    prompt_ids: tuple[PromptId, ...]
    mean_length: float
    eos_rate: float


async def evaluate(
    sampler: GreedySampler,
    tasks: Sequence[TaskData],
    rewards: Rewards,
    *,
    batch_size: int = 256,
    threshold: float = 1.0,
    executor: Executor | None = None,
) -> list[TaskScore]:
    """Score the held-out prompts of every task that has any; correct means a reward of at least `threshold`.

    Waits for the decoding, which runs in `executor` (None: the loop's own), then for the reward functions. The policy
    must not learn meanwhile. A cancelled call leaves a decoding that has begun to run to its end.
    """
    tasks = [task for task in tasks if task.heldout]
    prompts = [prompt for task in tasks for prompt in task.heldout]
    completions = await asyncio.get_running_loop().run_in_executor(executor, sampler.greedy, prompts, batch_size)
    scores = await rewards.score(
        prompts, [completion.text for completion in completions], ids=[completion.ids for completion in completions]
    )
    correct = scores.total >= threshold
    results = []
    start = 0
    for task in tasks:
        rows = slice(start, start + len(task.heldout))
        start = rows.stop
        results.append(
            TaskScore(
                task=task.name,
                accuracy=float(correct[rows].mean()),
                correct=correct[rows],
                prompt_ids=tuple(prompt.id for prompt in task.heldout),
                mean_length=float(np.mean([len(completion.ids) for completion in completions[rows]])),
                eos_rate=float(np.mean([completion.has_eos for completion in completions[rows]])),
            )
        )
    return results
