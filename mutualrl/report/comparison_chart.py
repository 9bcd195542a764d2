"""The comparison as one picture: each rule's gain over training alone, on peers' skills and on own skills."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from mutualrl.report import svg
from mutualrl.report.comparison import CONTROL, Comparison
from mutualrl.report.outcomes import differences

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def gain_chart(comparison: Comparison) -> Markup:
    """The picture for a page; empty where no rule has a control."""
    with svg.style(salt="gains"):
        figure = _draw(comparison)
        return svg.inline(figure, "Gain of each rule over training alone") if figure is not None else Markup("")


def save_gain_chart(comparison: Comparison, path: Path) -> None:
    """The same picture as PNG; nothing is written where no rule has a control."""
    with svg.style(salt="gains"):
        figure = _draw(comparison)
        if figure is not None:
            svg.save_png(figure, path)


def _draw(comparison: Comparison) -> Figure | None:
    rules = [rule for rule in comparison.rules if rule != CONTROL]
    rules = [rule for rule in rules if any(comparison.gain(rule, own_skill=own) for own in (False, True))]
    if not rules:
        return None
    figure, axes = svg.new_axes(width=6.4, height=1.15 + 0.62 * len(rules), left=svg.label_width(rules))
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    axes.axvline(0, color=svg.MUTED, linewidth=1)
    names = {False: "peers’ skills", True: "own skills"} if comparison.has_skills else {False: "all tasks"}
    for position, rule in enumerate(reversed(rules)):
        for own_skill in names:
            gain = comparison.gain(rule, own_skill=own_skill)
            if gain is None:
                continue
            height = position + (-0.19 if own_skill else 0.19) * (len(names) - 1)
            color = svg.series_color(1 if own_skill else 0)
            for single in _single_gains(comparison, rule, own_skill):
                axes.plot(100 * single, height, "|", color=color, markersize=9, alpha=0.4, markeredgewidth=1.2)
            axes.plot([100 * gain.low, 100 * gain.high], [height, height], color=color, linewidth=2.2)
            axes.plot(100 * gain.mean, height, "o", color=color, markersize=7)
            if position == len(rules) - 1:
                axes.annotate(
                    names[own_skill],
                    (100 * gain.mean, height),
                    xytext=(0, -17 if own_skill else 8),
                    textcoords="offset points",
                    color=color,
                    fontweight="bold",
                    horizontalalignment="center",
                )
    axes.set_yticks(range(len(rules)), list(reversed(rules)), color=svg.INK)
    axes.set_ylim(-0.5, len(rules) - 0.2)
    axes.margins(x=0.08)
    axes.set_xlabel("points above training alone", loc="left")
    return figure


def _single_gains(comparison: Comparison, rule: str, own_skill: bool) -> Iterator[float]:
    for pair in comparison.pairs(rule):
        for agent, task in pair.run.cells(own_skill=own_skill):
            (difference_N,) = differences(pair, [agent], task)
            if len(difference_N):
                yield float(difference_N.mean())
