"""Which receiver token stands for which source token where whole distributions are carried over: matched by bytes.

A source token goes to the receiver token with the very same bytes or, where there is none, to one that spells the
beginning of it. Mass is thereby moved within the set of texts that begin alike, and never to an unrelated token.
Sorted-rank matching (ULD) and edit distance (MinED) give no such promise. After the byte-prefix map of BPM
(arXiv:2607.22334).

Shape legend: A ids of the source's table · B ids of the receiver's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from tokenalign.encoder import Encoder
from tokenalign.errors import TableError, TextError
from tokenalign.table import TokenKind, TokenTable

UNMAPPED = -1
# Where several receiver tokens have the same bytes, the mass goes to the kind that texts are written with.
_PREFERRED_LAST = (TokenKind.BYTE, TokenKind.ADDED, TokenKind.TEXT)


class Match(IntEnum):
    """How a source token was matched. NONE: it has no counterpart, its mass is residual."""

    NONE = 0
    PREFIX = 1
    EQUAL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Shares of the source's tokens, 0 to 1, that add up to 1: with the same bytes (or the same role) at the receiver,
    with a beginning of them only, with nothing."""

    equal: float
    prefix: float
    none: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VocabularyMap:
    """The receiver's id of each source id; read-only, made once per ordered pair of tables.

    to_b: int32 [A], -1 (UNMAPPED) for a source token without a counterpart. match: uint8 [A], a Match each.
    hole_count: source ids that stand for nothing. prefix: the rule that was used, see `of`.
    """

    to_b: npt.NDArray[np.int32]
    match: npt.NDArray[np.uint8]
    hole_count: int
    prefix: Literal["longest", "encoder"]

    def __post_init__(self) -> None:
        for array in (self.to_b, self.match):
            array.setflags(write=False)

    def __reduce__(self) -> tuple[Callable[[], VocabularyMap], tuple[()]]:
        """Copies are made by the constructor, so that they are read-only too."""
        return partial(type(self), **{field.name: getattr(self, field.name) for field in fields(self)}), ()

    @classmethod
    def of(
        cls,
        table_a: TokenTable,
        table_b: TokenTable,
        *,
        prefix: Literal["longest", "encoder"] = "longest",
        encoder_b: Encoder | None = None,
        roles: bool = True,
        eos_id: int | None = None,
    ) -> VocabularyMap:
        """Match every token of the source to one of the receiver.

        Equal tokenizers (by fingerprint) map each id to itself, special tokens included; their widths may differ.
        Otherwise tokens that spell something are matched by bytes. Of several receiver tokens with the same bytes a
        normal piece comes before an added token, that before a byte piece, then the lowest id.
        prefix: for a token without an equal, "longest" takes the longest receiver token that it begins with, which cuts
        the space of byte strings into disjoint parts; "encoder" takes the token with which the receiver would begin to
        write it (what `encoder_b` gives, needed for this only), and the longest where that spells no beginning of it
        or the token is not valid UTF-8.
        roles: every end-of-sequence token of the source goes to the receiver's, which is `eos_id` or, where that is
        None, the lowest that its table knows. No other special token is matched.
        Raises TableError for an encoder that is missing or of another tokenizer, and for an `eos_id` outside the table.
        """
        if prefix == "encoder" and (encoder_b is None or encoder_b.fingerprint != table_b.fingerprint):
            got = encoder_b and encoder_b.fingerprint
            raise TableError(
                f'prefix="encoder" needs `encoder_b` of the tokenizer {table_b.fingerprint}, got fingerprint={got!r}; '
                f"build it from the tokenizer that the table was read from"
            )
        if eos_id is not None and table_b.kind(eos_id) == TokenKind.HOLE:
            raise TableError(f"`eos_id` must be a token of the receiver, got eos_id={eos_id}, a hole of its table")
        if table_a.fingerprint == table_b.fingerprint:
            to_b, match = _identity(table_a, table_b)
        else:
            to_b, match = _by_bytes(table_a, table_b, encoder_b if prefix == "encoder" else None)
            ends_b = table_b.roles["eos"] if eos_id is None else {eos_id}
            if roles and ends_b:
                ends_a = list(table_a.roles["eos"])
                to_b[ends_a], match[ends_a] = min(ends_b), Match.EQUAL
        return cls(to_b=to_b, match=match, hole_count=table_a.hole_count, prefix=prefix)

    def __len__(self) -> int:
        """A, holes included."""
        return len(self.to_b)

    def coverage(self) -> Coverage:
        """How much of the source's vocabulary the receiver has, counted over its tokens, holes left out."""
        counts = np.bincount(self.match, minlength=len(Match))
        equal, prefix = (float(counts[kind] / max(len(self) - self.hole_count, 1)) for kind in (Match.EQUAL, Match.PREFIX))
        return Coverage(equal=equal, prefix=prefix, none=1 - equal - prefix)


_Arrays = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]


def _identity(table_a: TokenTable, table_b: TokenTable) -> _Arrays:
    """Each id to itself up to the narrower width."""
    to_b = np.full(len(table_a), UNMAPPED, np.int32)
    both = np.flatnonzero(table_a.kinds[: len(table_b)] != TokenKind.HOLE)
    to_b[both] = both
    return to_b, np.where(to_b == UNMAPPED, Match.NONE, Match.EQUAL).astype(np.uint8)


def _by_bytes(table_a: TokenTable, table_b: TokenTable, encoder: Encoder | None) -> _Arrays:
    """Equal bytes, else a beginning of them."""
    spelled_a, spelled_b = _spellings(table_a), _spellings(table_b)
    ids_b = _ids_by_bytes(table_b, spelled_b)
    longest = max(map(len, ids_b), default=0)
    to_b = np.array([ids_b.get(token, UNMAPPED) for token in spelled_a], np.int32)
    match = np.where(to_b == UNMAPPED, Match.NONE, Match.EQUAL).astype(np.uint8)
    others = np.flatnonzero(to_b == UNMAPPED)
    begun = [_begun_by(encoder, spelled_a[token_id], spelled_b) if encoder else 0 for token_id in others.tolist()]
    to_b[others] = [
        _longest_prefix(spelled_a[token_id], ids_b, most or longest)
        for token_id, most in zip(others.tolist(), begun, strict=True)
    ]
    match[others[to_b[others] != UNMAPPED]] = Match.PREFIX
    return to_b, match


def _longest_prefix(token: bytes, ids_b: dict[bytes, int], most: int) -> int:
    """The id of the longest token of at most so many bytes that this one begins with."""
    for length in range(min(len(token), most), 0, -1):
        found = ids_b.get(token[:length])
        if found is not None:
            return found
    return UNMAPPED


def _spellings(table: TokenTable) -> list[bytes]:
    """What each id spells; nothing for holes and special tokens."""
    blob = table.blob.tobytes()
    return [blob[start:end] for start, end in pairwise(table.offsets.tolist())]


def _ids_by_bytes(table: TokenTable, spelled: list[bytes]) -> dict[bytes, int]:
    """One id for each byte string that the table has tokens of."""
    ids: dict[bytes, int] = {}
    for kind in _PREFERRED_LAST:
        of_kind = np.flatnonzero(table.kinds == kind)[::-1].tolist()
        ids.update((spelled[token_id], token_id) for token_id in of_kind)
    ids.pop(b"", None)
    return ids


def _begun_by(encoder: Encoder, token: bytes, spelled_b: list[bytes]) -> int:
    """How many bytes the receiver's first token spells when it writes the source's, 0 where that is not its beginning."""
    try:
        ids = encoder.encode(token)
    except TextError:
        return 0
    # A table as narrow as the logits may lack an id of the vocabulary.
    begun = spelled_b[ids[0]] if len(ids) and ids[0] < len(spelled_b) else b""
    return len(begun) if token.startswith(begun) else 0
