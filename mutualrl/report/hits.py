"""Hit rates: for which share of an agent's prompts a peer's row was at hand, every prompt counted alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from mutualrl.report.records import RunRecord


def hit_rate(run: RunRecord, learner: str, teachers: Iterable[str]) -> float | None:
    """Over the whole run and these teachers; None where nothing was asked of them."""
    steps = _counts(run, learner, teachers).values()
    prompts = sum(prompts for _, prompts in steps)
    return sum(hits for hits, _ in steps) / prompts if prompts else None


def hit_series(run: RunRecord, learner: str, teachers: Iterable[str]) -> list[tuple[int, float]]:
    """(step, hit rate) over these teachers."""
    counts = sorted(_counts(run, learner, teachers).items())
    return [(step, hits / prompts) for step, (hits, prompts) in counts if prompts]


def _counts(run: RunRecord, learner: str, teachers: Iterable[str]) -> dict[int, tuple[float, float]]:
    """Step -> hits and prompts. A step may have several lines: what became of early prompts is known late."""
    counts: defaultdict[int, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    names = [(f"peer/{teacher}/hit_rate", f"peer/{teacher}/prompts") for teacher in teachers]
    for row in run.steps:
        for rate, prompts in names:
            if row.agent == learner and rate in row.values:
                weight = row.values.get(prompts, 1.0)
                hits, total = counts[row.step]
                counts[row.step] = (hits + weight * row.values[rate], total + weight)
    return counts
