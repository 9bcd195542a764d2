"""The rescue trial of a run as a table: prompts whose peer success was delivered against those whose was not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mutualrl.report.records import TrialPrompt
from mutualrl.report.verdict import percent, points
from mutualrl.statistics import Gain, difference_of_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTable:
    """header, and one row per agent and task, with one over all tasks where an agent has several."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    """How many prompts each arm has and how many of them the final policy answers; effect None where an arm is empty."""

    delivered: int
    delivered_correct: int
    withheld: int
    withheld_correct: int

    @property
    def effect(self) -> Gain | None:
        if not self.delivered or not self.withheld:
            return None
        return difference_of_shares(self.delivered_correct, self.delivered, self.withheld_correct, self.withheld)


def arms(rows: Sequence[TrialPrompt]) -> Arms:
    """Counts both arms."""
    delivered, withheld = [row for row in rows if row.delivered], [row for row in rows if not row.delivered]
    return Arms(
        delivered=len(delivered),
        delivered_correct=sum(row.correct for row in delivered),
        withheld=len(withheld),
        withheld_correct=sum(row.correct for row in withheld),
    )


def trial_table(rows: Sequence[TrialPrompt]) -> TrialTable | None:
    """None where no coin was thrown."""
    if not rows:
        return None
    lines = []
    for agent in dict.fromkeys(row.agent for row in rows):
        own = [row for row in rows if row.agent == agent]
        tasks = sorted({row.task for row in own})
        groups = [(task, [row for row in own if row.task == task]) for task in tasks]
        for task, group in groups if len(groups) == 1 else [*groups, ("all", own)]:
            lines.append((f"{agent} on {task}", *_cells(arms(group))))
    return TrialTable(
        header=("agent", "delivered", "right", "undelivered", "right", "effect", "95 % interval"), rows=tuple(lines)
    )


def _cells(both: Arms) -> tuple[str, ...]:
    effect = both.effect
    return (
        str(both.delivered),
        _share(both.delivered_correct, both.delivered),
        str(both.withheld),
        _share(both.withheld_correct, both.withheld),
        "–" if effect is None else points(effect.mean),
        "–" if effect is None else f"{points(effect.low)} to {points(effect.high)}",
    )


def _share(correct: int, count: int) -> str:
    return percent(correct / count) if count else "–"
