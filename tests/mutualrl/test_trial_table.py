"""The table of a rescue trial, and the interval of a difference of two shares."""

import pytest

from mutualrl.report.records import TrialPrompt
from mutualrl.report.trial import trial_table
from mutualrl.statistics import difference_of_shares


def prompts(task: str, *, delivered: bool, correct: int, count: int) -> list[TrialPrompt]:
    return [
        TrialPrompt(
            agent="alpha", task=task, prompt_id=f"{task}{delivered}{index}", delivered=delivered, correct=index < correct
        )
        for index in range(count)
    ]


def test_the_interval_is_newcombes() -> None:
    # Newcombe 1998, table II, row (a), method 10: 56/70 - 48/80 = 0.2, 0.0524 to 0.3339.
    gain = difference_of_shares(56, 70, 48, 80)
    assert gain.mean == pytest.approx(0.2)
    assert (gain.low, gain.high) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_an_interval_at_the_edge_stays_within_one() -> None:
    gain = difference_of_shares(10, 10, 0, 20)
    assert (gain.low, gain.high) == pytest.approx((0.6791, 1.0), abs=5e-5)  # table II, row (h)


def test_each_task_has_a_row_and_all_together() -> None:
    rows = prompts("add", delivered=True, correct=3, count=4) + prompts("add", delivered=False, correct=1, count=4)
    table = trial_table([*rows, *prompts("swap", delivered=True, correct=1, count=1)])
    assert table is not None
    assert [row[0] for row in table.rows] == ["alpha on add", "alpha on swap", "alpha on all"]
    assert table.rows[0][1:6] == ("4", "75\u00a0%", "4", "25\u00a0%", "+50")
    assert table.rows[1][3:] == ("0", "–", "–", "–")


def test_no_coin_no_table() -> None:
    assert trial_table([]) is None
