"""What reward functions are given, by TRL's, verl's and verifiers' conventions, and how their verdicts are taken."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from agents.errors import RewardError
from agents.rewards.rewards import Rewards
from agents.types import Prompt
from exchange.types import Message, PromptId


def prompt(text: str = "q", *, conversational: bool = False, **columns: object) -> Prompt:
    messages = (Message(role="user", content=text),)
    return Prompt(id=PromptId(text), task="t", messages=messages, columns=columns, conversational=conversational)


async def test_a_function_that_names_them_gets_ids_state_and_loggers_and_one_with_kwargs_does_not() -> None:
    seen: dict[str, Any] = {}

    def asks(completions: list[str], completion_ids: Any, trainer_state: Any, log_extra: Any, log_metric: Any) -> list[float]:
        seen.update(ids=completion_ids, step=trainer_state.global_step, steps=trainer_state.max_steps)
        log_extra("length", (len(text) for text in completions))
        log_metric("tries", 2)
        return [0.0] * len(completions)

    def takes_any(**given: Any) -> list[float]:
        seen["any"] = set(given)
        return [0.0] * len(given["completions"])

    rewards = Rewards([asks, takes_any])
    rewards.begin_step(4, steps=9)
    assert rewards.takes_ids
    ids = [np.array([5, 6], dtype=np.int32), None]
    scores = await rewards.score([prompt(answer="x")] * 2, [b"xy", b"z"], ids=ids)
    assert seen == {"ids": [[5, 6], None], "step": 4, "steps": 9, "any": {"prompts", "completions", "answer"}}
    assert scores.extra == {"length": [2, 1]}
    await rewards.score([prompt(answer="x")], [b"xy"])
    assert rewards.take() == {"tries": 2.0}
    assert not Rewards([takes_any]).takes_ids


async def test_what_is_logged_must_fit_the_completions() -> None:
    def careless(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("length", [1])
        return [0.0] * len(completions)

    with pytest.raises(
        RewardError, match=r"'careless' raised ValueError: `log_extra` takes one value per completion \(2\), got 1"
    ):
        await Rewards([careless]).score([prompt()] * 2, [b"x", b"y"])

    def infinite(completions: list[str], log_metric: Any) -> list[float]:
        log_metric("loss", float("inf"))
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match="`log_metric` takes finite numbers, got loss=inf"):
        await Rewards([infinite]).score([prompt()], [b"x"])


async def test_verls_and_verifiers_functions_are_called_for_each_completion() -> None:
    seen: list[Any] = []

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return {"score": float(solution_str == ground_truth), "acc": True}

    async def correct_answer(prompt: Any, completion: Any, answer: str, task: str) -> float:
        await asyncio.sleep(0)
        seen.append((prompt, completion, answer, task))
        return 0.5

    rows = [
        prompt("a", conversational=True, ground_truth="7", data_source="gsm", extra_info={"index": 3}),
        prompt("b", conversational=True, solution="8"),
    ]
    rewards = Rewards([compute_score, correct_answer])
    rewards.check_columns(rows)
    scores = await rewards.score(rows, [b"7", b"9"])
    assert scores.by_function["compute_score"].tolist() == [1, 0]
    assert scores.by_function["correct_answer"].tolist() == [0.5, 0.5]
    question, reply = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "7"}]
    assert ("gsm", "7", "7", {"index": 3}) in seen
    assert ("t", "9", "8", None) in seen
    assert (question, reply, "7", "t") in seen


async def test_one_completion_that_cannot_be_judged_fails_alone() -> None:
    def strict(completion: str) -> float:
        return 1.0 / len(completion)

    def batch(completions: list[str]) -> list[Any]:
        return [1.0, "one", float("nan")]

    rewards = Rewards([strict, batch], on_error="abstain")
    scores = await rewards.score([prompt()] * 3, [b"ab", b"", b"abcd"])
    np.testing.assert_array_equal(scores.by_function["strict"], [0.5, np.nan, 0.25])
    np.testing.assert_array_equal(scores.by_function["batch"], [1, np.nan, np.nan])
    np.testing.assert_array_equal(scores.total, [1.5, np.nan, 0.25])
    assert rewards.take() == {"rewards/strict/error": 1, "rewards/batch/error": 2}
    with pytest.raises(RewardError, match="'strict' raised ZeroDivisionError"):
        await Rewards([strict]).score([prompt()] * 2, [b"ab", b""])


async def test_any_answer_column_stands_in_for_the_one_that_is_asked_for() -> None:
    def asks_for_solution(completions: list[str], solution: list[str]) -> list[float]:
        return [float(text == right) for text, right in zip(completions, solution, strict=True)]

    rows = [prompt(answer="1"), prompt(solution="2"), prompt(ground_truth="3"), prompt(solution="4", answer="no")]
    for function in (asks_for_solution, "exact_match"):
        rewards = Rewards([function])
        rewards.check_columns(rows)
        scores = await rewards.score(rows[:3], [b"1", b"2", b"3"])
        assert scores.total.tolist() == [1, 1, 1]
    assert (await Rewards([asks_for_solution]).score(rows[3:], [b"4"])).total.tolist() == [1]
    assert (await Rewards(["exact_match"]).score(rows[3:], [b"4"])).total.tolist() == [0]


async def test_async_functions_run_at_the_same_time_and_beside_a_sync_one() -> None:
    met = asyncio.Barrier(2)
    both = threading.Event()

    async def one(completions: list[str]) -> list[float]:
        await met.wait()
        both.set()
        return [1.0]

    async def other(completions: list[str]) -> list[float]:
        await met.wait()
        return [1.0]

    def in_thread(completions: list[str]) -> list[float]:
        return [float(both.wait(30))]

    async with asyncio.timeout(30):
        assert (await Rewards([in_thread, one, other]).score([prompt()], [b"x"])).total.tolist() == [3.0]


async def test_an_async_function_judges_all_completions_at_the_same_time() -> None:
    met = asyncio.Barrier(3)

    async def judge(completion: str) -> float:
        await met.wait()
        return float(len(completion))

    async with asyncio.timeout(30):
        scores = await Rewards([judge]).score([prompt()] * 3, [b"a", b"bb", b"ccc"])
    assert scores.total.tolist() == [1, 2, 3]


async def test_sync_functions_run_one_after_the_other() -> None:
    running = 0

    def make(name: str) -> Any:
        def counted(completions: list[str]) -> list[float]:
            nonlocal running
            running += 1
            threading.Event().wait(0.01)
            running -= 1
            return [float(running)]

        counted.__name__ = name
        return counted

    assert (await Rewards([make("a"), make("b"), make("c")]).score([prompt()], [b"x"])).total.tolist() == [0.0]


def test_own_views_are_not_pooled_across_agents() -> None:
    for name in ("completion_ids", "trainer_state", "policy"):
        scope: dict[str, Any] = {}
        exec(f"def judge(completions, {name}): ...", scope)
        scope["judge"].__module__ = __name__
        alpha, beta = (Rewards([scope["judge"]], policy=policy) for policy in ("alpha", "beta"))
        assert alpha.fingerprint != beta.fingerprint


async def test_nothing_to_score_asks_nobody() -> None:
    def never(completions: list[str]) -> list[float]:
        raise AssertionError

    assert (await Rewards([never]).score([], [])).total.tolist() == []
