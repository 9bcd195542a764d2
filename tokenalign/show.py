"""Two tokenizations of one text side by side: as spans for programs, as a picture for people.

Shape legend: A tokens of the source · B tokens of the receiver · G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tokenalign.align import NO_GROUP, Alignment, align, first_of_groups
from tokenalign.encoder import Encoder
from tokenalign.raw_bytes import spell_bytes, whole_characters
from tokenalign.residual import Residual, structure
from tokenalign.spelling import Spelled

if TYPE_CHECKING:
    from tokenalign.show_picture import Picture

Shape = Literal["one to one", "merged", "split", "tangled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of text and the tokens that cover it on each side.

    start, end: its bytes in the text. pieces_a, pieces_b: what each token spells, "" for one that spells nothing (an
    unknown token); bytes that are no whole character within a piece are written as backslash escapes, as in "\\\\xf0\\\\x9f".
    exact: one token on each side, and both spell the very bytes. changed_a, changed_b: the tokens of that side do not
    spell the bytes: a normaliser rewrote some, or some are lost.
    """

    start: int
    end: int
    text: str
    pieces_a: tuple[str, ...]
    pieces_b: tuple[str, ...]
    exact: bool
    changed_a: bool = False
    changed_b: bool = False

    @property
    def shape(self) -> Shape:
        """How many tokens of the source became how many of the receiver, in the words of Residual."""
        if len(self.pieces_a) > 1:
            return "tangled" if len(self.pieces_b) > 1 else "merged"
        return "split" if len(self.pieces_b) > 1 else "one to one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One tokenizer's part in a comparison. losses: why it does not keep every text, as in TokenTable; changed_bytes,
    lost_bytes: what became of this one, as in Residual."""

    fingerprint: str
    losses: tuple[str, ...]
    n_tokens: int
    changed_bytes: int
    lost_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One text in the tokens of two tokenizers. spans: the first ones, or all. residual: of carrying a's tokens over to b,
    over the whole text."""

    spans: Sequence[Span]
    a: Side
    b: Side
    residual: Residual


def spans(
    text: bytes,
    alignment: Alignment,
    *,
    tokens_a: Sequence[bytes] | None = None,
    tokens_b: Sequence[bytes] | None = None,
    max_spans: int | None = None,
) -> list[Span]:
    """Cut one text into the spans of its alignment; tokens without a group and end-of-sequence tokens are left out.

    tokens_a [A], tokens_b [B]: what each token spells; those behind the last span may be missing. Where it is None,
    tokens are taken to spell the bytes that they stand for; only `exact`, which the alignment knows, then tells that
    some do not. max_spans: stop after so many.
    """
    exact_G = np.zeros(len(alignment), np.bool_)
    exact_G[alignment.group_b[alignment.exact_b]] = True
    ends = alignment.group_ends[:max_spans].tolist()
    bounds_a, bounds_b = (_bounds(group, len(ends)) for group in (alignment.group_a, alignment.group_b))
    own_a = _cut(text, alignment.ends_a[: bounds_a[-1]]) if tokens_a is None else tokens_a
    own_b = _cut(text, alignment.ends_b[: bounds_b[-1]]) if tokens_b is None else tokens_b
    places = zip(pairwise([0, *ends]), pairwise(bounds_a), pairwise(bounds_b), exact_G.tolist(), strict=False)
    return [
        _span(text, place, own_a[slice(*a)], own_b[slice(*b)], exact=exact)
        for place, a, b, exact in places
        if place[0] < place[1]  # ends of sequence have no text
    ]


def compare(text: bytes, encoder_a: Encoder, encoder_b: Encoder, *, max_spans: int | None = None) -> Comparison:
    """Encode a text on both sides and cut it into spans. Works for tokenizers that lose text, on either side.

    max_spans: how many spans are made at most, None for all; the residual is of the whole text in any case.
    An incomplete last character is held back. Raises TextError for other bytes that are no UTF-8 where a side has no
    tokens for them.
    """
    content = whole_characters(text)
    a, b = (spell_bytes(encoder, [content]) for encoder in (encoder_a, encoder_b))
    if content and not (len(a.ids) and len(b.ids)):  # nothing of it is left on a side: there is nothing to align
        tokens_a, tokens_b = _tokens(encoder_a, a.ids), _tokens(encoder_b, b.ids)
        cut = [_span(content, (0, len(content)), tokens_a, tokens_b, exact=False)]
        counts = Residual()
    else:
        alignment = _aligned(a, b)
        most = len(alignment) if max_spans is None else max_spans
        tokens_a = _tokens(encoder_a, a.ids[: np.searchsorted(alignment.group_a, most)])
        tokens_b = _tokens(encoder_b, b.ids[: np.searchsorted(alignment.group_b, most)])
        cut = spans(content, alignment, tokens_a=tokens_a, tokens_b=tokens_b, max_spans=max_spans)
        counts = Residual(**{name: value for name, (value,) in structure(alignment, None).items()})
    residual = replace(
        counts, changed_bytes=int(b.changed_bytes[0]), lost_bytes=int(b.lost_bytes[0]), tail_bytes=len(text) - len(content)
    )
    return Comparison(spans=cut, a=_side(encoder_a, a), b=_side(encoder_b, b), residual=residual)


def show(text: str, tokenizer_a: Tokenizer, tokenizer_b: Tokenizer) -> Picture:
    """A text in the tokens of two tokenizers, for rich to print: each span of the one above that of the other.

    "│" parts spans, "╎" the tokens of one span, "≠" stands before tokens that do not spell the text's bytes; colours say
    the same. Spaces, tabs, line ends and what cannot be seen are written as signs or escapes. Below stands what is lost.
    """
    from tokenalign.show_picture import Picture

    return Picture(comparison=compare(text.encode(), Encoder(tokenizer_a), Encoder(tokenizer_b)))


def _aligned(a: Spelled, b: Spelled) -> Alignment:
    """Source to receiver; exact only where neither side rewrote or lost anything."""
    alignment = align(a.ends, b.ends)
    if not (a.changed_mask.any() or b.changed_mask.any()):
        return alignment
    spoiled_G = np.zeros(len(alignment), np.bool_)
    spoiled_G[alignment.group_a[a.changed_mask]] = True
    spoiled_G[alignment.group_b[b.changed_mask]] = True
    return replace(alignment, exact_b=alignment.exact_b & ~spoiled_G[alignment.group_b])


def _span(text: bytes, bounds: tuple[int, int], a: Sequence[bytes], b: Sequence[bytes], *, exact: bool) -> Span:
    own = text[slice(*bounds)]
    return Span(
        start=bounds[0],
        end=bounds[1],
        text=_readable(own),
        pieces_a=tuple(map(_readable, a)),
        pieces_b=tuple(map(_readable, b)),
        exact=exact,
        changed_a=b"".join(a) != own,
        changed_b=b"".join(b) != own,
    )


def _side(encoder: Encoder, spelled: Spelled) -> Side:
    return Side(
        fingerprint=encoder.fingerprint,
        losses=encoder.table.losses,
        n_tokens=len(spelled.ids),
        changed_bytes=int(spelled.changed_bytes[0]),
        lost_bytes=int(spelled.lost_bytes[0]),
    )


def _tokens(encoder: Encoder, ids: npt.NDArray[np.int32]) -> list[bytes]:
    """What each token spells by itself [T]."""
    return _cut(encoder.table.bytes_of(ids), encoder.table.ends(ids))


def _cut(text: bytes, ends: npt.NDArray[np.int64]) -> list[bytes]:
    """The bytes before each end, from the end before it [T]."""
    return [text[start:end] for start, end in pairwise([0, *ends.tolist()])]


def _bounds(group: npt.NDArray[np.int32], n_groups: int) -> list[int]:
    """Where the tokens of each of the first groups begin in one text, and where those of the last of them end."""
    bounds: list[int] = np.append(first_of_groups(group), np.count_nonzero(group != NO_GROUP))[: n_groups + 1].tolist()
    return bounds


def _readable(piece: bytes) -> str:
    return piece.decode(errors="backslashreplace")
