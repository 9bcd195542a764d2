"""The bytes of every token of a vocabulary, looked up and never decoded.

Shape legend: V vocabulary (the model's logits, padding included) · T tokens · S bytes of all tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tokenalign.definition import SPACE_MARK, Definition
from tokenalign.errors import TableError

_Speller = Callable[[str], "tuple[TokenKind, bytes]"]
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Byte values that no valid UTF-8 text holds.
_NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})


class TokenKind(IntEnum):
    """What an id is. HOLE: in the logits but not in the vocabulary. BYTE: a byte piece of a SentencePiece
    vocabulary."""

    HOLE = 0
    TEXT = 1
    BYTE = 2
    SPECIAL = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTable:
    """What each id of one tokenizer spells; read-only.

    blob: uint8 [S], the bytes of all tokens one after the other; offsets: int64 [V+1] into it. Special tokens spell
    nothing: they have width 0. kinds: uint8 [V], a TokenKind each. lossless: any valid UTF-8 text can be encoded to
    tokens that spell it. fingerprint: equal only for equal definitions (vocabulary, merges, normaliser, added tokens,
    decoder).
    """

    blob: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.uint8]
    lossless: bool
    fingerprint: str

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, *, vocab_size: int | None = None) -> TokenTable:
        """Read the table of a tokenizer.

        vocab_size: width of the model's logits; ids behind the vocabulary are holes, and entries of the vocabulary for
        which the model has no logit are left out. None takes the vocabulary's own size.
        Raises TableError for a kind of tokenizer whose tokens do not carry their own bytes.
        """
        definition = Definition.of(tokenizer)
        entries = _entries(definition)
        size = max(entries, default=-1) + 1 if vocab_size is None else vocab_size
        kinds = np.zeros(size, dtype=np.uint8)
        widths = np.zeros(size, dtype=np.int64)
        spelled: list[bytes] = []
        for token_id in sorted(entries):
            if token_id < size:
                kinds[token_id], token = entries[token_id]
                widths[token_id] = len(token)
                spelled.append(token)
        blob = np.frombuffer(b"".join(spelled), dtype=np.uint8)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)])
        for array in (kinds, offsets):
            array.setflags(write=False)
        single_bytes = {token[0] for token in spelled if len(token) == 1}
        lossless = definition.keeps_all_bytes and single_bytes | _NEVER_IN_UTF8 == set(range(256))
        return cls(blob=blob, offsets=offsets, kinds=kinds, lossless=lossless, fingerprint=definition.fingerprint)

    def __len__(self) -> int:
        """V, holes included."""
        return len(self.kinds)

    def ends(self, ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Byte offset behind each token, int64 [T], for ids [T]. Raises TableError for an id that spells nothing
        known."""
        known = self._checked(ids)
        return np.cumsum(self.offsets[known + 1] - self.offsets[known])

    def bytes_of(self, ids: npt.ArrayLike) -> bytes:
        """What the ids [T] spell together. Raises TableError as `ends` does."""
        known = self._checked(ids)
        starts = self.offsets[known]
        widths = self.offsets[known + 1] - starts
        ends = np.cumsum(widths)
        total = int(ends[-1]) if len(ends) else 0
        return self.blob[np.repeat(starts - (ends - widths), widths) + np.arange(total)].tobytes()

    def kind(self, token_id: int) -> TokenKind:
        """What one id is. Raises TableError as `ends` does, holes excepted."""
        if not 0 <= token_id < len(self):
            raise self._unknown(0, token_id, "outside the table")
        return TokenKind(self.kinds[token_id])

    def _checked(self, ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        given = np.asarray(ids)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise TableError(f"`ids` must be one row of integers, got shape={given.shape}, dtype={given.dtype}")
        known = given.astype(np.int64)
        foreign = (known < 0) | (known >= len(self))
        if foreign.any():
            at = int(np.argmax(foreign))
            raise self._unknown(at, int(known[at]), "outside the table")
        holes = self.kinds[known] == TokenKind.HOLE
        if holes.any():
            at = int(np.argmax(holes))
            raise self._unknown(at, int(known[at]), "a hole: the logits have it, the vocabulary has not")
        return known

    def _unknown(self, position: int, token_id: int, why: str) -> TableError:
        return TableError(
            f"token id is {why}, got ids[{position}]={token_id} for a table of {len(self)} ids "
            f"({int((self.kinds != TokenKind.HOLE).sum())} tokens, tokenizer {self.fingerprint}); "
            f"were the ids made by another tokenizer?"
        )


def _entries(definition: Definition) -> dict[int, tuple[TokenKind, bytes]]:
    """Kind and bytes of every id of the vocabulary and of the added tokens."""
    spell = _byte_level_speller() if definition.byte_level else _plain_speller(definition)
    entries = {token_id: spell(piece) for piece, token_id in definition.vocab.items()}
    for token in definition.added_tokens:
        text = token.content.replace(SPACE_MARK, " ") if definition.metaspace else token.content
        entries[token.id] = (TokenKind.SPECIAL, b"") if token.special else (TokenKind.TEXT, text.encode())
    if definition.unk_id is not None:
        entries[definition.unk_id] = (TokenKind.SPECIAL, b"")
    return entries


def byte_stand_ins() -> dict[str, int]:
    """GPT-2's printable stand-in character for each byte value: Latin-1 where it prints, U+0100 and on elsewhere."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + n): value for n, value in enumerate(others)}


def _byte_level_speller() -> _Speller:
    """Pieces in stand-in characters; a piece with any other character spells itself, as in the library's decoder."""
    stand_ins = byte_stand_ins()

    def spell(piece: str) -> tuple[TokenKind, bytes]:
        try:
            return TokenKind.TEXT, bytes([stand_ins[character] for character in piece])
        except KeyError:
            return TokenKind.TEXT, piece.encode()

    return spell


def _plain_speller(definition: Definition) -> _Speller:
    """SentencePiece pieces (U+2581 for a space, `<0xHH>` for a byte) and pieces that spell themselves."""
    byte_fallback, metaspace = definition.byte_fallback, definition.metaspace

    def spell(piece: str) -> tuple[TokenKind, bytes]:
        if byte_fallback and (byte := _BYTE_PIECE.fullmatch(piece)):
            return TokenKind.BYTE, bytes([int(byte[1], 16)])
        return TokenKind.TEXT, (piece.replace(SPACE_MARK, " ") if metaspace else piece).encode()

    return spell
