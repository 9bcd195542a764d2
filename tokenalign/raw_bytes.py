"""Texts that a model sampled, which need not be UTF-8: cut-off characters are held back, stray bytes become byte tokens.

Shape legend: N texts · T tokens of all texts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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


def spell_bytes(encoder: Encoder, texts: Sequence[bytes], *, threads: int = 1) -> Spelled:
    """`encoder.spell` for texts in which bytes may stand that are no UTF-8: each becomes the receiver's token of that byte.

    Raises TextError as the encoder does, and where the receiver has no token for such a byte, with its offset.
    """
    pieces_N = [_pieces(text) for text in texts]
    if all(len(pieces) == 1 and pieces[0][1] for pieces in pieces_N):
        return encoder.spell(texts, threads=threads)
    spelled = encoder.spell([piece for pieces in pieces_N for piece, is_text in pieces if is_text], threads=threads)
    byte_ids = _byte_ids(encoder.table)
    ids, ends, changed, counts, lost = [], [], [], [], np.zeros((2, len(texts)), np.int64)
    used = 0
    for text, pieces in enumerate(pieces_N):
        offset = n_tokens = 0
        for piece, is_text in pieces:
            if is_text:
                own = slice(*spelled.cu[used : used + 2])
                ids.append(spelled.ids[own])
                ends.append(spelled.ends[own] + offset)
                changed.append(spelled.changed_mask[own])
                lost[:, text] += spelled.changed_bytes[used], spelled.lost_bytes[used]
                used += 1
            else:
                ids.append(_as_byte_tokens(piece, byte_ids, offset, len(texts[text])))
                ends.append(np.arange(1, len(piece) + 1) + offset)
                changed.append(np.zeros(len(piece), np.bool_))
            offset += len(piece)
            n_tokens += len(ids[-1])
        counts.append(n_tokens)
    return Spelled(
        ids=np.concatenate([np.empty(0, np.int32), *ids]),
        ends=np.concatenate([np.empty(0, np.int64), *ends]),
        cu=np.cumsum([0, *counts]),
        changed_mask=np.concatenate([np.empty(0, np.bool_), *changed]),
        changed_bytes=lost[0],
        lost_bytes=lost[1],
    )


def _pieces(text: bytes) -> list[tuple[bytes, bool]]:
    """The text cut into valid UTF-8 (True) and bytes that are none (False); no piece for an empty text but itself."""
    parts = _STRAY.split(text.decode(errors="surrogateescape"))
    pieces = [(part.encode(errors="surrogateescape"), index % 2 == 0) for index, part in enumerate(parts)]
    return [piece for piece in pieces if piece[0]] or [(b"", True)]


def _begins_a_character(tail: bytes) -> bool:
    try:
        tail.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def _byte_ids(table: TokenTable) -> npt.NDArray[np.int32]:
    """The token of each byte value [256], -1 where there is none; a byte piece before a normal one."""
    ids = np.full(256, -1, np.int32)
    for kind in (TokenKind.TEXT, TokenKind.BYTE):
        single = np.flatnonzero((table.widths == 1) & (table.kinds == kind))[::-1]
        ids[table.blob[table.offsets[single]]] = single
    return ids


def _as_byte_tokens(piece: bytes, byte_ids: npt.NDArray[np.int32], offset: int, length: int) -> npt.NDArray[np.int32]:
    values = np.frombuffer(piece, np.uint8)
    ids = byte_ids[values]
    if (ids < 0).any():
        at = int(np.argmax(ids < 0))
        raise TextError(
            f"text is not valid UTF-8 and the receiver has no token for the byte, got 0x{values[at]:02x} at offset "
            f"{offset + at} of {length}; refuse the text"
        )
    return ids
