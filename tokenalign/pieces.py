"""What the pieces of a vocabulary spell, all of them at once.

Shape legend: V vocabulary · C characters of all pieces.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenalign.definition import BYTE_PIECE, SPACE_MARK, Definition


def byte_stand_ins() -> dict[str, int]:
    """GPT-2's printable stand-in character for each byte value: Latin-1 where it prints, U+0100 and on elsewhere."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + n): value for n, value in enumerate(others)}


def spelled(definition: Definition) -> list[bytes]:
    """The bytes of each of the model's own pieces, in the order of `definition.vocab`; added tokens left out.

    byte-level: GPT-2's stand-ins read back; a piece with any other character spells itself, as in the library's
    decoder. SentencePiece: U+2581 is a space, `<0xHH>` a byte. WordPiece: `##ing` spells "ing". Others: themselves.
    """
    pieces = list(definition.vocab)
    if definition.byte_level:
        return _from_stand_ins(pieces)
    mark: str | None = definition.model.get("continuing_subword_prefix")
    if mark:
        return [(piece if piece == mark else piece.removeprefix(mark)).encode() for piece in pieces]
    spellings = (
        [piece.replace(SPACE_MARK, " ").encode() for piece in pieces]
        if definition.metaspace
        else [piece.encode() for piece in pieces]
    )
    for index, byte in byte_pieces(definition).items():
        spellings[index] = bytes([byte])
    return spellings


def byte_pieces(definition: Definition) -> dict[int, int]:
    """Byte value by place in `definition.vocab` for every `<0xHH>` piece; none where pieces are not read so."""
    if definition.byte_level or not definition.byte_fallback:
        return {}
    candidates = [(index, piece) for index, piece in enumerate(definition.vocab) if piece.startswith("<0x")]
    return {index: int(match[1], 16) for index, piece in candidates if (match := BYTE_PIECE.fullmatch(piece))}


def _from_stand_ins(pieces: list[str]) -> list[bytes]:
    values = np.full(0x110000, -1, dtype=np.int16)
    for character, value in byte_stand_ins().items():
        values[ord(character)] = value
    codes_C = np.frombuffer("".join(pieces).encode("utf-32-le"), dtype="<u4")
    values_C = values[codes_C]
    ends_V = np.cumsum(np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces)))
    read = values_C.astype(np.uint8).tobytes()
    spellings = _cut(read, ends_V)
    for index in np.unique(np.searchsorted(ends_V, np.flatnonzero(values_C < 0), side="right")).tolist():
        spellings[index] = pieces[index].encode()
    return spellings


def _cut(joined: bytes, ends_V: npt.NDArray[np.int64]) -> list[bytes]:
    ends = ends_V.tolist()
    return [joined[start:end] for start, end in zip([0, *ends], ends, strict=False)]
