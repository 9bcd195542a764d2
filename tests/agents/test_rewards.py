"""Reward functions by TRL's convention."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.errors import RewardError
from agents.rewards.functions import find_reward
from agents.rewards.rewards import Rewards
from agents.types import Prompt
from exchange.types import Message, PromptId


def prompt(text: str = "q", *, task: str = "t", conversational: bool = False, **columns: object) -> Prompt:
    messages = (Message(role="user", content=text),)
    return Prompt(id=PromptId(text), task=task, messages=messages, columns=columns, conversational=conversational)


def length(completions: list[str], **_: object) -> list[float]:
    return [float(len(completion)) for completion in completions]


def only_b(prompts: list[str], completions: list[str], **_: object) -> list[float | None]:
    return [1.0 if text == "b" else None for text in prompts]


async def awaited(completions: list[str]) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(completion)) for completion in completions]


async def test_built_in_rewards() -> None:
    rewards = Rewards(["exact_match", "contains_answer"], [1.0, 0.5])
    rows = [prompt(answer="ab"), prompt(answer="ab"), prompt(answer="ab"), prompt(answer=7)]
    scores = await rewards.score(rows, [b" ab\n", b"xaby", b"ba", b"7"])
    assert scores.total.tolist() == [1.5, 0.5, 0.0, 1.5]
    assert scores.by_function["exact_match"].tolist() == [1, 0, 0, 1]
    assert scores.total.dtype == np.float32


async def test_a_completion_that_ends_in_a_newline_counts_and_one_that_goes_on_counts_by_its_first_line() -> None:
    texts = [b"12\n", b"\n 12 \nQ: 3+4=7", b"12 Q", b"13\n12", b"12"]
    scores = await Rewards(["exact_match", "first_line_match"]).score(
        [prompt(answer=each) for each in ["12"] * 4 + [None]], texts
    )
    np.testing.assert_array_equal(scores.by_function["exact_match"], [1, 0, 0, 0, np.nan])
    np.testing.assert_array_equal(scores.by_function["first_line_match"], [1, 1, 0, 0, np.nan])


async def test_abstaining_is_not_zero() -> None:
    rows = [prompt("a"), prompt("b")]
    scores = await Rewards([only_b]).score(rows, [b"xx", b"xx"])
    np.testing.assert_array_equal(scores.total, [np.nan, 1])
    both = await Rewards([only_b, length], [10, 1]).score(rows, [b"xx", b"xx"])
    np.testing.assert_array_equal(both.total, [2, 12])


async def test_only_accepted_arguments_are_passed() -> None:
    seen: list[dict[str, Any]] = []

    def bare(completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    def columns_too(completions: list[str], level: list[int], extra: list[int] | None = None) -> list[float]:
        seen.append({"level": level, "extra": extra})
        return [0.0] * len(completions)

    def anything(**given: Any) -> list[float]:
        seen.append(given)
        return [0.0] * len(given["completions"])

    def with_policy(completions: list[str], policy: str, **given: Any) -> list[float]:
        seen.append({"policy": policy})
        return [0.0] * len(completions)

    rows = [prompt("a", level=1), prompt("b", level=2, answer="x")]
    await Rewards([bare, columns_too, anything, with_policy], policy="alpha").score(rows, [b"1", b"2"])
    assert seen[0] == {"level": [1, 2], "extra": None}
    assert seen[1] == {"prompts": ["a", "b"], "completions": ["1", "2"], "level": [1, 2], "answer": [None, "x"]}
    assert seen[2] == {"policy": "alpha"}


async def test_conversational_data_gets_messages() -> None:
    seen: list[Any] = []

    def look(prompts: list[Any], completions: list[Any]) -> list[float]:
        seen.extend([prompts, completions])
        return [1.0]

    row = prompt("a", conversational=True, answer="x")
    scores = await Rewards([look, "exact_match"]).score([row], [b"x"])
    assert seen == [[[{"role": "user", "content": "a"}]], [[{"role": "assistant", "content": "x"}]]]
    assert scores.total.tolist() == [2.0]


async def test_a_text_cut_within_a_character_is_scored() -> None:
    assert (await Rewards([length]).score([prompt()], ["ü".encode()[:1]])).total.tolist() == [1.0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0], r"'bad' must return one number per completion \(2\), got 1"),
        (1.0, "'bad' must return a list of 2 numbers, got float"),
        (["x", 1.0], "'bad' must return numbers or None"),
        ([1.0, float("inf")], "'bad' must return finite numbers or None, got inf in row 1"),
    ],
)
async def test_a_misshapen_answer_names_the_function(answer: Any, message: str) -> None:
    def bad(completions: list[str]) -> Any:
        return answer

    with pytest.raises(RewardError, match=message):
        await Rewards([length, bad]).score([prompt(), prompt()], [b"x", b"y"])


async def test_an_exception_names_the_function_and_is_no_reward() -> None:
    def judge(completions: list[str]) -> list[float]:
        raise ConnectionError("no judge")

    with pytest.raises(RewardError, match="'judge' raised ConnectionError: no judge") as caught:
        await Rewards([judge]).score([prompt()], [b"x"])
    assert isinstance(caught.value.__cause__, ConnectionError)


@pytest.mark.parametrize("kind", [StopIteration, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
async def test_what_a_thread_or_a_loop_cannot_carry_names_the_function_too(kind: type[BaseException]) -> None:
    def called(completions: list[str]) -> list[float]:
        raise kind("why")

    def iterated(completions: list[str]) -> Iterator[float]:
        yield 1.0
        raise KeyError("why") if kind is StopIteration else kind("why")

    async with asyncio.timeout(10):
        functions: list[Any] = [called, iterated]
        for function in functions:
            with pytest.raises(RewardError, match=f"'{function.__name__}' raised [A-Za-z]+: .*why"):
                await Rewards([function]).score([prompt()], [b"x"])


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration])
async def test_an_async_function_ends_no_loop(kind: type[BaseException]) -> None:
    async def judge(completions: list[str]) -> list[float]:
        raise kind("why")

    with pytest.raises(RewardError, match="'judge' raised"):
        await Rewards([judge]).score([prompt()], [b"x"])


async def test_a_generator_is_a_list_and_what_no_float_holds_is_refused() -> None:
    def one_by_one(completions: list[str]) -> Iterator[float]:
        yield from (2.0 for _ in completions)

    def huge(completions: list[str]) -> list[int]:
        return [10**400]

    assert (await Rewards([one_by_one]).score([prompt()], [b"x"])).total.tolist() == [2.0]
    with pytest.raises(RewardError, match="'huge' must return numbers or None"):
        await Rewards([huge]).score([prompt()], [b"x"])


async def test_space_around_an_answer_and_no_answer() -> None:
    rows = [prompt(answer=" ab\n"), prompt(answer=None), prompt(answer=None)]
    scores = await Rewards(["exact_match", "contains_answer"]).score(rows, [b"ab", b"None", b""])
    np.testing.assert_array_equal(scores.by_function["exact_match"], [1, np.nan, np.nan])
    np.testing.assert_array_equal(scores.by_function["contains_answer"], [1, np.nan, np.nan])


async def test_a_function_that_changes_its_arguments_changes_nothing_else() -> None:
    seen: list[list[list[int]]] = []

    def greedy(completions: list[str], prompts: list[str], tests: list[list[int]]) -> list[float]:
        seen.append([test[:] for test in tests])
        for test in tests:
            test.pop()
            seen.append([test[:] for test in tests])
        for given in (completions, prompts, tests):
            given.clear()
        return [1.0, 1.0]

    row = prompt("a", tests=[1, 2], answer="x")
    for _ in range(2):
        scores = await Rewards([greedy, "exact_match"]).score([row, row], [b"x", b"y"])
        assert scores.total.tolist() == [2.0, 1.0]
    assert row.columns["tests"] == [1, 2]
    assert seen == 2 * [[[1, 2], [1, 2]], [[1], [1, 2]], [[1], [1]]]


def test_a_missing_column_fails_before_generation() -> None:
    rewards = Rewards(["exact_match"])
    rewards.check_columns([prompt(answer="x")])
    with pytest.raises(
        RewardError, match=r"'exact_match' needs column 'answer', which prompt b of task 't'.*has level.*begins 'b'"
    ):
        rewards.check_columns([prompt("a", answer="x"), prompt("b", level=1)])


async def test_sync_functions_leave_the_event_loop_free() -> None:
    release = threading.Event()

    def blocking(completions: list[str]) -> list[float]:
        assert release.wait(30), "the event loop never ran"
        return [1.0]

    async def heartbeat() -> None:
        release.set()

    scoring = asyncio.create_task(Rewards([blocking]).score([prompt()], [b"x"]))
    await asyncio.sleep(0)
    await heartbeat()
    assert (await scoring).total.tolist() == [1.0]


async def test_async_functions_and_objects() -> None:
    class Scorer:
        def __call__(self, completions: Sequence[str]) -> list[float]:
            return [3.0 for _ in completions]

    rewards = Rewards([awaited, Scorer()])
    assert rewards.names == ("awaited", "Scorer")
    assert (await rewards.score([prompt()], [b"four"])).total.tolist() == [7.0]


def test_finding_functions() -> None:
    assert find_reward("textwrap:dedent").signature.name == "dedent"
    for reference, message in [
        ("exact_matsch", "unknown reward 'exact_matsch'; built in are exact_match, first_line_match, contains_answer, "),
        ("no.such.module:f", "cannot be imported: ModuleNotFoundError"),
        ("math:absent", "cannot be imported: AttributeError"),
        ("math:pi", "is not callable"),
    ]:
        with pytest.raises(RewardError, match=message):
            find_reward(reference)
    with pytest.raises(RewardError, match="`completions` is positional-only"):
        find_reward(lambda completions, /: [0.0])
    untyped: Any = dict
    with pytest.raises(RewardError, match="signature of reward 'dict' cannot be read"):
        find_reward(untyped)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def f(:", "SyntaxError: "),
        ("raise RuntimeError('no key')", "RuntimeError: no key"),
        ("import sys; sys.exit('bye')", "SystemExit: bye"),
    ],
)
def test_a_module_that_fails_on_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str) -> None:
    (tmp_path / "judge_of_test.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardError, match=f"'judge_of_test:f' cannot be imported: {reason}"):
        find_reward("judge_of_test:f")


def test_a_relative_module_is_refused() -> None:
    with pytest.raises(RewardError, match=r"'\.judge:f' cannot be imported: TypeError: "):
        find_reward(".judge:f")


def test_construction_errors() -> None:
    with pytest.raises(RewardError, match="at least one reward function"):
        Rewards([])
    with pytest.raises(RewardError, match="different names"):
        Rewards([length, length])
    with pytest.raises(RewardError, match=r"one weight per function \(1\), got 2"):
        Rewards([length], [1.0, 2.0])


def test_fingerprint_is_of_names_weights_and_code() -> None:
    def closure(value: float) -> Any:
        def scored(completions: list[str]) -> list[float]:
            return [value for _ in completions]

        return scored

    same = Rewards(["exact_match"], [1.0]).fingerprint
    assert same == Rewards(["exact_match"]).fingerprint
    different = {
        same,
        Rewards(["exact_match"], [2.0]).fingerprint,
        Rewards(["contains_answer"]).fingerprint,
        Rewards([length]).fingerprint,
        Rewards([closure(0.0)]).fingerprint,
        Rewards([closure(1.0)]).fingerprint,
    }
    assert len(different) == 6
