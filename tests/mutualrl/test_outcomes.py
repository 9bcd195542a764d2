"""Gains of several agents: which cells are averaged, and that prompts which agents share are drawn together."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from mutualrl.report.outcomes import Pair, judge, mean_gain
from mutualrl.report.records import Eval, RunRecord

Answers = Mapping[tuple[str, str], Sequence[int]]


def record(answers: Answers) -> RunRecord:
    """A run whose agents failed throughout at step 0 and at step 10 answered as given, by (agent, task)."""
    lines = [
        Eval(
            agent=agent,
            task=task,
            step=step,
            accuracy=sum(given) / len(given),
            correct=tuple(given),
            prompt_ids=tuple(f"{task}{index}" for index in range(len(given))),
        )
        for (agent, task), correct in answers.items()
        for step, given in ((0, [0] * len(correct)), (10, correct))
    ]
    return RunRecord(
        path=Path("run"),
        config=None,
        evals=tuple(lines),
        steps=(),
        rescues=(),
        trial=(),
        exchange=None,
        manifest=None,
        unreadable_lines=0,
        agents=tuple(dict.fromkeys(agent for agent, _ in answers)),
    )


def pair(after: Answers) -> Pair:
    """Against a control that answers nothing."""
    return Pair(run=record(after), control=record({cell: [0] * len(given) for cell, given in after.items()}))


HALF = [1, 0] * 50


def test_agents_that_answer_alike_are_no_more_evidence_than_one() -> None:
    one = mean_gain([pair({("a", "sort"): HALF})], own_skill=False)
    three = mean_gain([pair({(agent, "sort"): HALF for agent in "abc"})], own_skill=False)
    assert one is not None and three is not None
    assert one.mean == three.mean == 0.5
    # sqrt(0.25 / 100) = 0.05 is the standard error of either; of 300 independent prompts it were 0.029.
    for gain in (one, three):
        assert gain.high - gain.low == pytest.approx(2 * 1.96 * 0.05, abs=0.022)


def test_the_same_answers_on_tasks_of_their_own_are_more_evidence() -> None:
    three = mean_gain([pair({(agent, f"sort {agent}"): HALF for agent in "abc"})], own_skill=False)
    assert three is not None
    assert three.high - three.low == pytest.approx(2 * 1.96 * 0.05 / 3**0.5, abs=0.022)


def test_every_agent_on_every_task_counts_the_same() -> None:
    gain = mean_gain([pair({("a", "sort"): [1, 1], ("b", "sort"): [1, 0], ("a", "reverse"): [0, 0]})], own_skill=False)
    assert gain is not None
    assert gain.mean == pytest.approx((1 + 0.5 + 0) / 3)


def test_a_task_that_an_agent_was_not_evaluated_on_in_every_seed_is_left_out_for_it_alone() -> None:
    first = pair({("a", "sort"): [1, 1], ("b", "sort"): [0, 0]})
    second = pair({("a", "sort"): [1, 1]})
    gain = mean_gain([first, second], own_skill=False)
    assert gain is not None
    assert gain.mean == 1.0


def test_an_outcome_is_one_agents_own_gain() -> None:
    outcomes = judge([pair({("a", "sort"): [1, 1, 0, 0], ("b", "sort"): [1, 0, 0, 0]})])
    assert [each.gain and each.gain.mean for each in outcomes] == [0.5, 0.25]
