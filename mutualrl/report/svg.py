"""Figures as inline SVG that takes its colours and its font from the page, so that one drawing serves light and dark.

matplotlib draws with fixed stand-in colours; on the way out each becomes a CSS variable of the page. Text stays text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1a1b1e"
MUTED = "#6b6f76"
GRID = "#e3e4e8"
PAPER = "#fdfdfc"
# Okabe and Ito's colour-blind-safe set, darkened where it would be faint on paper; blue and vermilion come first.
SERIES = ("#0068a8", "#c8500a", "#007a58", "#a8497d", "#8a6a00", "#4a5bb5")

_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper"} | {
    color: f"--series-{index}" for index, color in enumerate(SERIES)
}
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlepad": 10.0,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.color": GRID,
    "ytick.labelcolor": MUTED,
    "ytick.left": False,
    "lines.linewidth": 2.0,
    "lines.solid_capstyle": "round",
}


def series_color(index: int) -> str:
    """The stand-in colour of the index-th agent or rule; the set repeats after six."""
    return SERIES[index % len(SERIES)]


def series_variable(index: int) -> str:
    """The CSS variable that the same colour has on the page."""
    return _VARIABLES[series_color(index)]


@contextmanager
def style(salt: str) -> Iterator[None]:
    """matplotlib settings for one figure; salt keeps the ids inside the SVGs of one page apart, and the same every time."""
    import matplotlib

    settings: Any = _STYLE | {"svg.hashsalt": salt}  # matplotlib's own type lists every key there is
    with matplotlib.rc_context(settings):
        yield


def new_axes(
    width: float = 4.3, height: float = 2.5, *, left: float = 0.5, right: float = 0.15, bottom: float = 0.5, top: float = 0.35
) -> tuple[Figure, Axes]:
    """A figure of one panel with margins, in inches; as wide as a phone's column holds without shrinking its text much.

    The margins are the caller's, who knows the labels: matplotlib's own layout draws every figure twice.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    spans = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    return figure, figure.add_axes(spans)


def inline(figure: Figure, label: str) -> Markup:
    """The figure as an <svg> element with `label` for screen readers; matplotlib has escaped the texts inside."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    width = re.search(r'viewBox="0 0 ([\d.]+)', text)
    pixels = float(width[1]) * 4 / 3 if width else 480.0
    head = Markup('<svg role="img" aria-label="{}" style="max-width: {}px"').format(label, f"{pixels:.0f}")
    text = re.sub(r'(<svg[^>]*?) width="[\d.]+pt"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[\d.]+pt"', r"\1", text, count=1)
    return head + Markup(text.removeprefix("<svg"))


def save_png(figure: Figure, path: Path) -> None:
    """The figure on paper, for places that show no HTML."""
    figure.savefig(path, format="png", dpi=160, facecolor=PAPER)


def label_width(texts: Iterable[str]) -> float:
    """Inches that the widest of these bold labels takes at most, a gap before it included."""
    return 0.12 + 0.092 * max(map(len, texts), default=0)


def spread(values: Sequence[float], gap: float, *, high: float) -> list[float]:
    """Heights for labels at these values: in the same order, at least `gap` apart, none above `high`.

    Least squares under the order (pool adjacent violators): labels too close for their heights form a block that keeps
    its mean height. What would pass `high` is then pushed down.
    """
    order = sorted(range(len(values)), key=lambda index: values[index])
    blocks: list[list[float]] = []
    for rank, index in enumerate(order):
        blocks.append([values[index] - rank * gap])
        while len(blocks) > 1 and mean(blocks[-2]) > mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    levels = [mean(block) for block in blocks for _ in block]
    heights = list(values)
    ceiling = high
    for rank, index in reversed(list(enumerate(order))):
        heights[index] = min(levels[rank] + rank * gap, ceiling)
        ceiling = heights[index] - gap
    return heights
