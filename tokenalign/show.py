"""Two tokenizations of one text side by side, for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tokenalign.align import align
from tokenalign.encoder import Encoder

if TYPE_CHECKING:
    from rich.text import Text

_STYLES = {True: "green", False: "yellow"}
_VISIBLE = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of text and the tokens that cover it on each side; exact: one on each.

    Bytes that are no whole character within a piece are written as backslash escapes, as in "\\\\xf0\\\\x9f".
    """

    text: str
    pieces_a: tuple[str, ...]
    pieces_b: tuple[str, ...]
    exact: bool


def spans(text: bytes, ends_a: npt.ArrayLike, ends_b: npt.ArrayLike) -> list[Span]:
    """Cut a text into spans, given the content tokens' byte ends [A] and [B] (end-of-sequence tokens left out).

    Raises AlignmentError where the two do not cover the same bytes.
    """
    alignment = align(ends_a, ends_b)
    pieces_a = _pieces(text, alignment.ends_a, alignment.group_a, len(alignment))
    pieces_b = _pieces(text, alignment.ends_b, alignment.group_b, len(alignment))
    starts = [0, *alignment.group_ends.tolist()]
    return [
        Span(text=_readable(text[start:end]), pieces_a=a, pieces_b=b, exact=len(a) == len(b) == 1)
        for start, end, a, b in zip(starts, starts[1:], pieces_a, pieces_b, strict=False)
    ]


def show(text: str, tokenizer_a: Tokenizer, tokenizer_b: Tokenizer) -> Text:
    """Render a text in the tokens of two tokenizers, one line each: exact spans green, all others yellow.

    "│" parts spans, "╎" the tokens of one span; spaces, tabs and line ends are written as signs.
    """
    from rich.text import Text

    content = text.encode()
    ends = [Encoder(tokenizer).spell([content]).ends for tokenizer in (tokenizer_a, tokenizer_b)]
    lines = (Text("a  "), Text("b  "))
    for span in spans(content, *ends):
        for line, pieces in zip(lines, (span.pieces_a, span.pieces_b), strict=True):
            line.append("╎".join(piece.translate(_VISIBLE) for piece in pieces), style=_STYLES[span.exact])
            line.append("│", style="dim")
    return Text("\n").join(lines)


def _pieces(text: bytes, ends: npt.NDArray[np.int64], groups: npt.NDArray[np.int32], n_groups: int) -> list[tuple[str, ...]]:
    """The readable pieces of each group."""
    pieces: list[list[str]] = [[] for _ in range(n_groups)]
    start = 0
    for end, group in zip(ends.tolist(), groups.tolist(), strict=True):
        if group >= 0:
            pieces[group].append(_readable(text[start:end]))
        start = end
    return [tuple(group) for group in pieces]


def _readable(piece: bytes) -> str:
    return piece.decode(errors="backslashreplace")
