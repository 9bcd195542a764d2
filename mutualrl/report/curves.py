"""Line charts over steps: accuracy against the control, length, end-of-sequence rate, what the sharing rule counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from markupsafe import Markup

from mutualrl.report import svg
from mutualrl.report.records import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]
Dashes = Literal["-", "--", ":"]
SMOOTHING_STEPS = 9
# Inches. Many lines need room for their names.
PANEL, TALL_PANEL, LABEL_GAP = 2.5, 3.4, 0.3
FEW_LINES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line, its name written at its end. faint: drawn thin behind it: single seeds, or the noise that was smoothed."""

    label: str
    color: str
    points: Points
    dashes: Dashes = "-"
    faint: Sequence[Points] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Runs that differ in nothing but the seed, as one line. color: None takes the agent's."""

    label: str
    runs: Sequence[RunRecord]
    color: str | None = None
    dashes: Dashes = "-"


def accuracy_chart(arms: Sequence[Arm], agent: str, task: str, *, color: str, title: str) -> Markup:
    """Held-out accuracy of one agent on one task, a line per arm; the mean over its seeds, single seeds thin behind."""
    lines = [
        Line(
            label=arm.label,
            color=arm.color or color,
            dashes=arm.dashes,
            points=mean_points(curves := _accuracies(arm, agent, task)),
            faint=curves if len(curves) > 1 else (),
        )
        for arm in arms
    ]
    return line_chart(title, lines, unit_interval=True)


def task_chart(run: RunRecord, agent: str, field: str, *, title: str, unit_interval: bool, unit: str = "") -> Markup:
    """One field of an agent's evaluations (`mean_length`, `eos_rate`), a line per task."""
    lines = [
        Line(
            label=task,
            color=svg.series_color(2 + index),
            points=[(row.step, value) for row in run.curve(agent, task) if (value := getattr(row, field)) is not None],
        )
        for index, task in enumerate(run.tasks(agent))
    ]
    return line_chart(title, lines, unit_interval=unit_interval, unit=unit)


def agent_chart(series: Mapping[str, Points], *, title: str, unit_interval: bool) -> Markup:
    """Something counted every step, a smoothed line per agent over its single steps. series: by agent, in run order."""
    lines = [
        Line(label=agent, color=svg.series_color(index), points=smooth(points), faint=[points] if points else ())
        for index, (agent, points) in enumerate(series.items())
    ]
    return line_chart(title, lines, unit_interval=unit_interval)


def line_chart(title: str, lines: Sequence[Line], *, unit_interval: bool, unit: str = "") -> Markup:
    """One panel; lines without points are left out, and nothing is drawn when none is left.

    unit_interval: the axis shows all of 0..1, as percent. unit: of the heights, named under the axis.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return Markup("")
    with svg.style(salt=title):
        height = TALL_PANEL if len(lines) > FEW_LINES else PANEL
        figure, axes = svg.new_axes(height=height, right=svg.label_width(line.label for line in lines))
        draw_lines(axes, title, lines, unit_interval=unit_interval, unit=unit)
        return svg.inline(figure, f"{title}: {', '.join(line.label for line in lines)}")


def draw_lines(axes: Axes, title: str, lines: Sequence[Line], *, unit_interval: bool, unit: str = "") -> None:
    """Draw lines on a panel, the name of each at its end; names are kept apart from one another."""
    axes.set_title(title)
    for line in lines:
        for points in line.faint:
            axes.plot(*zip(*points, strict=True), color=line.color, linewidth=0.9, alpha=0.3, zorder=1)
    for line in reversed(lines):
        axes.plot(
            *zip(*line.points, strict=True),
            color=line.color,
            linestyle=line.dashes,
            marker="o" if len(line.points) < 15 else None,
            markersize=3.5,
            clip_on=False,
        )
    if unit_interval:
        axes.set_ylim(-0.02, 1.02)
        axes.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    else:
        axes.set_ylim(0, max(1e-9, axes.get_ylim()[1]))
        axes.locator_params(axis="y", nbins=4)
    axes.margins(x=0)
    axes.locator_params(axis="x", nbins=5, integer=True)
    axes.set_xlabel(f"step; {unit} upwards" if unit else "step", loc="left")
    _name_ends(axes, lines)


def smooth(points: Points, window: int = SMOOTHING_STEPS) -> Points:
    """The centred running mean of the heights; the window shrinks at both ends, so that every step keeps its place."""
    if len(points) < window:
        return points
    heights = np.array([height for _, height in points])
    reach = window // 2
    sums = np.concatenate([[0.0], np.cumsum(heights)])
    index = np.arange(len(heights))
    low, high = np.maximum(index - reach, 0), np.minimum(index + reach + 1, len(heights))
    means = (sums[high] - sums[low]) / (high - low)
    return [(step, float(mean)) for (step, _), mean in zip(points, means, strict=True)]


def mean_points(curves: Sequence[Points]) -> Points:
    """The mean height over curves, at the steps that all of them have."""
    if not curves:
        return []
    heights = [dict(curve) for curve in curves]
    shared = sorted(set(heights[0]).intersection(*heights[1:]))
    return [(step, float(np.mean([height[step] for height in heights]))) for step in shared]


def _accuracies(arm: Arm, agent: str, task: str) -> list[Points]:
    curves = [[(row.step, row.accuracy) for row in run.curve(agent, task)] for run in arm.runs]
    return [curve for curve in curves if curve]


def _name_ends(axes: Axes, lines: Sequence[Line]) -> None:
    low, high = axes.get_ylim()
    gap = LABEL_GAP / (TALL_PANEL if len(lines) > FEW_LINES else PANEL) * (high - low)
    ends = [float(line.points[-1][1]) for line in lines]
    for line, height in zip(lines, svg.spread(ends, gap, high=high), strict=True):
        axes.text(
            1.02,
            height,
            line.label,
            transform=axes.get_yaxis_transform(),
            color=line.color,
            fontweight="bold",
            verticalalignment="center",
        )
