"""Spans drawn in two lines that stand exactly above each other, for `rich` to print."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from tokenalign.show import Comparison, Side, Span

_CHANGED, _EXACT = "changed", "exact"
_STYLES = {
    _EXACT: "green",
    "merged": "yellow",
    "split": "yellow italic",
    "tangled": "yellow underline",
    _CHANGED: "red bold",
}
_WORDS = {
    _EXACT: "the same token",
    "merged": "several become one",
    "split": "one becomes several",
    "tangled": "several become several",
    _CHANGED: "≠ rewritten or lost",
}
_SIGNS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}
_NOTHING = "∅"
_MOST_OF_NAME = 14
_LEAST_WIDTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A comparison as rich prints it: blocks of two lines as wide as the console, a legend, the residual in words.

    names: of the two tokenizers. max_blocks: how many blocks are drawn at most, None for all.
    """

    comparison: Comparison
    names: tuple[str, str] = ("a", "b")
    max_blocks: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lays the spans out anew for each console, by its width."""
        labels = [set_cell_size(name, min(cell_len(name), _MOST_OF_NAME)) for name in self.names]
        margin = max(map(cell_len, labels)) + 2
        spans = self.comparison.spans
        rows = list(islice(_rows(spans, max(options.max_width - margin, _LEAST_WIDTH)), self.max_blocks))
        for row in rows:
            for side, label in enumerate(labels):
                line = Text(no_wrap=True, overflow="ignore").append(set_cell_size(label, margin), style="dim")
                for cell in row:
                    line.append(cell.lines[side], style=cell.style)
                    line.append("│" if cell.closed else "", style="dim")
                yield line
            yield Text()
        n_shown = sum(cell.closed for row in rows for cell in row)
        n_all = max(self.comparison.residual.n_groups, len(spans))
        if n_shown < n_all:
            yield Text(f"… the first {n_shown:,} of {n_all:,} spans\n")
        if rows:
            yield _legend(spans[:n_shown])
        yield Text("\n".join(_in_words(self.comparison, self.names)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """A span, or as much of it as a block is wide. lines: of each side, padded to one width; closed: the span ends."""

    lines: tuple[str, str]
    style: str
    closed: bool


def _rows(spans: Iterable[Span], most: int) -> Iterator[list[_Cell]]:
    """Blocks of at most so many terminal cells, as full as spans allow."""
    row: list[_Cell] = []
    used = 0
    for cell in (cell for span in spans for cell in _cells(span, most - 1)):
        width = cell_len(cell.lines[0]) + 1
        if row and used + width > most:
            yield row
            row, used = [], 0
        row.append(cell)
        used += width
    if row:
        yield row


def _cells(span: Span, most: int) -> Iterator[_Cell]:
    sides = ((span.pieces_a, span.changed_a), (span.pieces_b, span.changed_b))
    parts = [chop_cells(_line(pieces, changed), most) for pieces, changed in sides]
    last = max(map(len, parts)) - 1
    for index, (a, b) in enumerate(zip_longest(*parts, fillvalue="")):
        width = max(cell_len(a), cell_len(b))
        lines = set_cell_size(a, width), set_cell_size(b, width)
        yield _Cell(lines=lines, style=_STYLES[_kind(span)], closed=index == last)


def _kind(span: Span) -> str:
    if span.exact:
        return _EXACT
    # One token on each side that is not exact is one whose bytes were changed.
    return _CHANGED if span.changed_a or span.changed_b or span.shape == "one to one" else span.shape


def _line(pieces: Sequence[str], changed: bool) -> str:
    return ("≠" if changed else "") + ("╎".join(_visible(piece) or _NOTHING for piece in pieces) or _NOTHING)


def _visible(piece: str) -> str:
    """A piece with a sign or an escape for all that cannot be seen, moves the cursor, or joins its neighbours."""
    if piece.isascii() and piece.isprintable():
        return piece.replace(" ", _SIGNS[" "])
    bare = "◌" if unicodedata.category(piece[:1] or " ").startswith("M") else ""
    return bare + "".join(_SIGNS.get(character) or _escaped(character) for character in piece)


def _escaped(character: str) -> str:
    selects_a_variant = "\ufe00" <= character <= "\ufe0f"
    if character.isprintable() and not selects_a_variant:
        return character
    return character.encode("ascii", errors="backslashreplace").decode() if ord(character) > 127 else f"\\x{ord(character):02x}"


def _legend(spans: Sequence[Span]) -> Columns:
    """What signs and colours mean, of those that occur."""
    kinds = set(map(_kind, spans))
    entries = [Text("│ both end", style="dim")]
    if any(len(pieces) > 1 for span in spans for pieces in (span.pieces_a, span.pieces_b)):
        entries.append(Text("╎ one ends", style="dim"))
    if any("" in pieces for span in spans for pieces in (span.pieces_a or ("",), span.pieces_b or ("",))):
        entries.append(Text(f"{_NOTHING} no text", style="dim"))
    entries += [Text(words, style=_STYLES[kind]) for kind, words in _WORDS.items() if kind in kinds]
    return Columns(entries, padding=(0, 3))


def _in_words(comparison: Comparison, names: tuple[str, str]) -> Iterator[str]:
    residual = comparison.residual
    for name, side in zip(names, (comparison.a, comparison.b), strict=True):
        yield f"{name}: {_count(side.n_tokens, 'token')}; {_losses(side)}"
    if residual.n_groups:
        yield (
            f"exact: {residual.n_exact:,} of {_count(residual.n_tokens, 'token')} of {names[1]} "
            f"({1 - residual.struct:.0%}), {1 - residual.struct_bytes:.0%} of the bytes"
        )
        yield (
            f"{_count(residual.n_groups, 'span')}: {residual.one_to_one:,} one to one, {residual.merged:,} merged, "
            f"{residual.split:,} split, {residual.tangled:,} tangled"
        )
    if residual.tail_bytes:
        yield f"held back: {_count(residual.tail_bytes, 'byte')} of an incomplete last character"


def _losses(side: Side) -> str:
    if not side.losses:
        return "keeps every text"
    return f"{_count(side.changed_bytes, 'byte')} changed, {side.lost_bytes:,} lost ({', '.join(side.losses)})"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
