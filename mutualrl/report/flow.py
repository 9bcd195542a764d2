"""The topology as a drawing: who learns from whom, and what flowed on each edge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from mutualrl.errors import ConfigError
from mutualrl.report import svg
from mutualrl.report.hits import hit_rate
from mutualrl.report.records import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What one edge carried. kinds: that the topology and the learner's rule let across; empty: nothing.

    rows: what the hub handed over on it, by kind; None without the hub's statistics. rescues: of the learner by this
    teacher, None where it is not known. hit_rate: share of the learner's prompts for which a row of this teacher was at
    hand; None where it was not measured.
    """

    learner: str
    teacher: str
    kinds: tuple[str, ...]
    rows: Mapping[str, int] | None
    rescues: int | None
    hit_rate: float | None

    @property
    def label(self) -> str:
        """The edge's caption, one fact per line."""
        parts = [kind if self.rows is None else f"{self.rows.get(kind, 0):,} {kind}" for kind in self.kinds]
        if "successes" in self.kinds and self.rescues is not None:
            parts.append(f"{self.rescues:,} rescue{'' if self.rescues == 1 else 's'}")
        if self.hit_rate is not None:
            parts.append(f"hit rate {100 * self.hit_rate:.0f} %")
        return "\n".join(parts) or "nothing crosses"


def flows(run: RunRecord) -> list[Flow]:
    """Every edge of the run's topology with what it carried; empty without a readable config."""
    if run.config is None:
        return []
    from mutualrl.topology import routes

    try:
        edges = routes(run.config)
    except ConfigError:
        return []
    return [
        Flow(
            learner=edge.learner,
            teacher=edge.teacher,
            kinds=tuple(sorted(edge.kinds)),
            rows=_delivered(run, edge.learner, edge.teacher),
            rescues=_rescues(run, edge.learner, edge.teacher, [e.teacher for e in edges if e.learner == edge.learner]),
            hit_rate=hit_rate(run, edge.learner, [edge.teacher]),
        )
        for edge in edges
    ]


def _rescues(run: RunRecord, learner: str, teacher: str, teachers: Sequence[str]) -> int | None:
    """The rescued prompts are kept with their teacher up to a limit, and counted without; both give the number or none."""
    counted = round(sum(value for _, value in run.series(learner, "rescues")))
    if len(teachers) == 1:
        return counted
    kept = [row.peer for row in run.rescues if row.agent == learner]
    return kept.count(teacher) if len(kept) == counted else None


def _delivered(run: RunRecord, learner: str, teacher: str) -> Mapping[str, int] | None:
    if run.exchange is None:
        return None
    workers = {str(name): worker for name, worker in run.exchange.workers.items()}
    if learner not in workers:
        return None
    by_producer = {str(name): counts for name, counts in workers[learner].delivered.items()}
    return {str(kind): count for kind, count in by_producer.get(teacher, {}).items()}


def topology_chart(run: RunRecord, edges: Sequence[Flow]) -> Markup:
    """Agents on a circle, an arrow from each teacher to its learner, as wide as what flowed on it."""
    if not edges:
        return Markup("")
    agents = list(run.agents)
    places = _places(agents)
    most = max(1, *(_volume(edge) for edge in edges))
    with svg.style(salt="topology"):
        figure, axes = svg.new_axes(
            width=5.2, height=2.3 if len(agents) <= 2 else 4.6, left=0.05, right=0.05, bottom=0.05, top=0.05
        )
        axes.set_axis_off()
        axes.grid(False)
        for edge in edges:
            _draw_edge(axes, edge, places, agents, most)
        for index, agent in enumerate(agents):
            axes.text(
                *places[agent],
                f"{agent}\n{_rule(run, agent)}",
                horizontalalignment="center",
                verticalalignment="center",
                color=svg.PAPER,
                fontweight="bold",
                linespacing=1.5,
                bbox={"boxstyle": "round,pad=0.9", "facecolor": svg.series_color(index), "edgecolor": "none"},
            )
        spread = 1.35 if len(agents) > 2 else 0.62
        axes.set_xlim(-1.45, 1.45)
        axes.set_ylim(-spread, spread)
        return svg.inline(figure, "; ".join(f"{e.teacher} to {e.learner}: {e.label}" for e in edges))


def _draw_edge(axes: Axes, edge: Flow, places: dict[str, tuple[float, float]], agents: list[str], most: int) -> None:
    from matplotlib.patches import FancyArrowPatch

    start, end = np.array(places[edge.teacher]), np.array(places[edge.learner])
    color = svg.series_color(agents.index(edge.teacher)) if edge.kinds else svg.MUTED
    axes.add_patch(
        FancyArrowPatch(
            tuple(start),
            tuple(end),
            connectionstyle="arc3,rad=0.28",
            arrowstyle="-|>",
            mutation_scale=14,
            shrinkA=34,
            shrinkB=38,
            linewidth=1.2 + 3 * _volume(edge) / most,
            linestyle="-" if edge.kinds else ":",
            color=color,
        )
    )
    # The control point of the arc lies rad × length to the right of the way; the curve's middle lies half as far out.
    along = end - start
    middle = (start + end) / 2 + 0.28 * np.array([along[1], -along[0]]) * (0.5 + 0.27)
    axes.text(
        float(middle[0]),
        float(middle[1]),
        edge.label,
        horizontalalignment="center",
        verticalalignment="center",
        color=svg.INK if edge.kinds else svg.MUTED,
    )


def _volume(edge: Flow) -> int:
    return sum((edge.rows or {}).get(kind, 0) for kind in edge.kinds)


def _places(agents: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Points on a circle; two agents lie side by side, more begin at the top."""
    start = math.pi if len(agents) <= 2 else math.pi / 2
    turn = 2 * math.pi / len(agents)
    return {agent: (math.cos(start - turn * i), math.sin(start - turn * i)) for i, agent in enumerate(agents)}


def _rule(run: RunRecord, agent: str) -> str:
    if run.config is None or agent not in run.config.agents:
        return ""
    return str(run.config.agents[agent].sharing.__struct_config__.tag)
