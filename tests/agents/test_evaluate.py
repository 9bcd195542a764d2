"""Evaluation: greedy accuracy by task, and pass@k against enumeration."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.evaluate import Draws, evaluate, pass_at_k
from agents.rewards.rewards import Rewards
from agents.tasks.config import Reverse, Sort
from agents.tasks.load import TaskData, load_task
from agents.types import Completion, Group, Prompt
from exchange.types import Version


class ScriptedSampler:
    """Answers every prompt with `text`, without an end token when the prompt is a sorting one."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.calls: list[tuple[int, int, int, int]] = []

    def greedy(self, prompts: Sequence[Prompt], batch_size: int) -> list[Completion]:
        return [self._answer(prompt.task == "reverse") for prompt in prompts]

    def sample(self, prompts: Sequence[Prompt], *, num_generations: int, step: int, version: Version, seed: int) -> list[Group]:
        """Of completion i of the batch's prompt p, the text is right in the first p completions."""
        self.calls.append((len(prompts), num_generations, step, seed))
        right = [str(prompt.columns["answer"]).encode() for prompt in prompts]
        return [
            Group(
                prompt=prompt,
                prompt_ids=np.zeros(1, dtype=np.int32),
                completions=tuple(self._answer(True, answer if row < index else b"?") for row in range(num_generations)),
                step=step,
                version=version,
            )
            for index, (prompt, answer) in enumerate(zip(prompts, right, strict=True))
        ]

    def _answer(self, ended: bool, text: bytes | None = None) -> Completion:
        text = self.text if text is None else text
        size = len(text) + ended
        row = np.zeros(size, dtype=np.int32)
        return Completion(ids=row, logprobs=row.astype(np.float32), ends=row, text=text, finished=ended, has_eos=ended)


async def test_scores_by_task() -> None:
    tasks = [
        load_task(Reverse(name="reverse", alphabet="ab", length=2, heldout=3), seed=1),
        load_task(Sort(name="sort", alphabet="ab", length=2, heldout=3), seed=1),
    ]
    reverse, sort = await evaluate(ScriptedSampler(b"ab"), tasks, Rewards(["exact_match"]))
    for score, task in ((reverse, tasks[0]), (sort, tasks[1])):
        expected = [prompt.columns["answer"] == "ab" for prompt in task.heldout]
        assert score.task == task.name
        assert score.correct.tolist() == expected
        assert score.accuracy == sum(expected) / 3
        assert score.prompt_ids == tuple(prompt.id for prompt in task.heldout)
    assert (reverse.mean_length, reverse.eos_rate) == (3.0, 1.0)
    assert (sort.mean_length, sort.eos_rate) == (2.0, 0.0)


async def test_no_reward_is_not_correct_and_the_threshold_counts() -> None:
    def half_or_none(prompts: list[str], completions: list[str]) -> list[float | None]:
        return [0.5, None, 0.4]

    task = load_task(Reverse(name="reverse", alphabet="ab", length=2, heldout=3), seed=1)
    (score,) = await evaluate(ScriptedSampler(b"ab"), [task], Rewards([half_or_none]), threshold=0.5)
    assert score.correct.tolist() == [True, False, False]


def test_pass_at_k_by_hand() -> None:
    # n = 4: of c = 0, 1, 4 right ones, two drawn hold none with chance 1, C(3,2)/C(4,2) = 1/2, 0.
    assert pass_at_k(np.array([0, 1, 4]), 4, 2) == pytest.approx((0 + 0.5 + 1) / 3)
    assert pass_at_k(np.array([0, 1, 4]), 4, 1) == pytest.approx(5 / 12)
    assert pass_at_k(np.array([0, 1, 4]), 4, 4) == pytest.approx(2 / 3)


@given(st.data())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_one(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 8))
    right, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    hits = [min(draw) < right for draw in combinations(range(samples), k)]
    assert pass_at_k(np.array([right]), samples, k) == pytest.approx(sum(hits) / len(hits), abs=1e-12)


async def test_samples_are_judged_by_prompt_and_drawn_in_batches_of_different_noise() -> None:
    task = load_task(Reverse(name="reverse", alphabet="ab", length=3, heldout=5), seed=1)
    sampler = ScriptedSampler(b"ab")
    draws = Draws(num_samples=4, pass_k=(1, 2), version=Version(0, 0), seed=7)
    (score,) = await evaluate(sampler, [task], Rewards(["exact_match"]), batch_size=13, draws=draws)
    assert sampler.calls == [(3, 4, 0, 7), (2, 4, 1, 7)]
    assert score.num_correct.tolist() == [0, 1, 2, 0, 1]
    assert score.metrics == {
        "eval/reverse/accuracy": 0.0,
        "eval/reverse/pass@1": pytest.approx(4 / 20),
        "eval/reverse/pass@2": pytest.approx((0 + 1 / 2 + 5 / 6 + 0 + 1 / 2) / 5),
    }


async def test_a_task_that_holds_nothing_out_is_not_evaluated() -> None:
    empty = TaskData(name="empty", train=[], heldout=[])
    assert await evaluate(ScriptedSampler(b"ab"), [empty], Rewards(["exact_match"])) == []
