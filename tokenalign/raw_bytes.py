"""Texts that a model sampled, which need not be UTF-8: cut-off characters are held back, stray bytes become byte tokens.

Shape legend: N texts · T tokens of all texts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenalign.encoder import Encoder
from tokenalign.errors import TextError
from tokenalign.spelling import Spelled
from tokenalign.table import TokenKind, TokenTable

# What decoding with "surrogateescape" makes of bytes that are no UTF-8.
_STRAY = re.compile("([\udc80-\udcff]+)")


def whole_characters(text: bytes) -> bytes:
    """The text without an incomplete last character, which has at most 3 bytes."""
    for held in range(1, min(3, len(text)) + 1):
        lead = text[-held]
        if lead >= 0xC0:  # a lead byte: complete where the bytes that it announces are there
            announced = 2 + (lead >= 0xE0) + (lead >= 0xF0)
            return text if held >= announced or not _begins_a_character(text[-held:]) else text[:-held]
        if lead < 0x80:
            break
    return text


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a text with its ids [T]: valid UTF-8, or bytes that are none."""

    content: bytes
    ids: npt.NDArray[np.int32]
    is_text: bool


def encode_bytes(encoder: Encoder, text: bytes) -> list[Piece]:
    """`encoder.encode` for a text in which bytes may stand that are no UTF-8: each becomes the receiver's token of that
    byte. Raises TextError as the encoder does, and where the receiver has no token for such a byte, with its offset."""
    pieces: list[Piece] = []
    offset = 0
    contents = _pieces(text)
    byte_ids = None if all(is_text for _, is_text in contents) else _byte_ids(encoder.table)
    for content, is_text in contents:
        ids = encoder.encode(content) if byte_ids is None or is_text else _as_byte_tokens(byte_ids, content, offset, len(text))
        pieces.append(Piece(content, ids, is_text))
        offset += len(content)
    return pieces


def locate_pieces(encoder: Encoder, pieces_N: Sequence[Sequence[Piece]]) -> Spelled:
    """Where the tokens of texts in pieces end in them, as `encoder.locate` says it for whole texts."""
    texts = [piece for pieces in pieces_N for piece in pieces if piece.is_text]
    spelled = encoder.locate([piece.content for piece in texts], [piece.ids for piece in texts])
    if all(len(pieces) == 1 and pieces[0].is_text for pieces in pieces_N):
        return spelled
    joined: list[Spelled] = []
    used = 0
    for pieces in pieces_N:
        parts = []
        for piece in pieces:
            parts.append(spelled.text(used) if piece.is_text else _exactly(piece))
            used += piece.is_text
        joined.append(_end_to_end(parts, [len(piece.content) for piece in pieces]))
    return Spelled.join(joined)


def spell_bytes(encoder: Encoder, texts: Sequence[bytes]) -> Spelled:
    """`encoder.spell` for texts in which bytes may stand that are no UTF-8. Raises as `encode_bytes` does."""
    return locate_pieces(encoder, [encode_bytes(encoder, text) for text in texts])


def _exactly(piece: Piece) -> Spelled:
    """One token per byte."""
    n = len(piece.ids)
    nothing = np.zeros(1, np.int64)
    return Spelled(
        ids=piece.ids,
        ends=np.arange(1, n + 1),
        cu=np.array([0, n]),
        changed_mask=np.zeros(n, np.bool_),
        changed_bytes=nothing,
        lost_bytes=nothing,
    )


def _end_to_end(parts: Sequence[Spelled], lengths: Sequence[int]) -> Spelled:
    """The pieces of one text as one. What has no token of its own (lost bytes) is covered by the token before it, at the
    beginning of the text by the first, which then does not spell its very bytes."""
    ends: list[npt.NDArray[np.int64]] = []
    changed: list[npt.NDArray[np.bool_]] = []
    offset = 0
    uncovered = False
    for part, length in zip(parts, lengths, strict=True):
        own_ends, own_changed = part.ends + offset, part.changed_mask.copy()
        offset += length
        if not len(own_ends):
            if length and any(map(len, ends)):
                last = next(index for index in range(len(ends) - 1, -1, -1) if len(ends[index]))
                ends[last][-1], changed[last][-1] = offset, True
            uncovered |= bool(length)
        elif uncovered and not any(map(len, ends)):
            own_changed[0] = True
        ends.append(own_ends)
        changed.append(own_changed)
    return Spelled(
        ids=np.concatenate([np.empty(0, np.int32), *(part.ids for part in parts)]),
        ends=np.concatenate([np.empty(0, np.int64), *ends]),
        cu=np.array([0, sum(map(len, ends))]),
        changed_mask=np.concatenate([np.empty(0, np.bool_), *changed]),
        changed_bytes=sum((part.changed_bytes for part in parts), start=np.zeros(1, np.int64)),
        lost_bytes=sum((part.lost_bytes for part in parts), start=np.zeros(1, np.int64)),
    )


def _pieces(text: bytes) -> list[tuple[bytes, bool]]:
    """The text cut into valid UTF-8 (True) and bytes that are none (False)."""
    try:
        text.decode()
    except UnicodeDecodeError:
        parts = _STRAY.split(text.decode(errors="surrogateescape"))
        pieces = [(part.encode(errors="surrogateescape"), index % 2 == 0) for index, part in enumerate(parts)]
        return [piece for piece in pieces if piece[0]]
    return [(text, True)]


def _begins_a_character(tail: bytes) -> bool:
    try:
        tail.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def _byte_ids(table: TokenTable) -> npt.NDArray[np.int32]:
    """The token of each byte value [256], a byte piece before a normal one, -1 where there is none."""
    byte_ids = np.full(256, -1, np.int32)
    for kind in (TokenKind.TEXT, TokenKind.BYTE):
        single = np.flatnonzero((table.widths == 1) & (table.kinds == kind))[::-1]
        byte_ids[table.blob[table.offsets[single]]] = single
    return byte_ids


def _as_byte_tokens(byte_ids: npt.NDArray[np.int32], content: bytes, offset: int, length: int) -> npt.NDArray[np.int32]:
    """The token of each byte."""
    values = np.frombuffer(content, np.uint8)
    ids = byte_ids[values]
    if (ids < 0).any():
        at = int(np.argmax(ids < 0))
        raise TextError(
            f"text is not valid UTF-8 and the receiver has no token for the byte, got 0x{values[at]:02x} at offset "
            f"{offset + at} of {length}; refuse the text"
        )
    return ids
