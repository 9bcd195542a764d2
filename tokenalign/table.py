"""The bytes of every token of a vocabulary, looked up and never decoded.

Shape legend: V vocabulary (the model's logits, padding included) · T tokens · S bytes of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tokenalign import cache
from tokenalign.definition import MOST_IDS, SPACE_MARK, Definition
from tokenalign.errors import TableError
from tokenalign.losses import losses_of
from tokenalign.pieces import byte_pieces, spelled

ROLES = ("bos", "eos", "pad", "unk")
_CACHED_FROM_BYTES = 200_000  # of the vocabulary's JSON: about 16,000 entries
_LAYOUT = 1  # of the cached arrays; to be raised with any change of what they hold
_CONTENTS = {
    "blob": np.uint8,
    "widths": np.int64,
    "kinds": np.uint8,
    "missing_bytes": np.uint8,
    "losses": np.uint8,
    "unk": np.int64,
}


class TokenKind(IntEnum):
    """What an id is. HOLE: in the logits but not in the vocabulary. BYTE: a byte piece of a SentencePiece
    vocabulary. ADDED: an added token that is no control token, hence text."""

    HOLE = 0
    TEXT = 1
    BYTE = 2
    SPECIAL = 3
    ADDED = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTable:
    """What each id of one tokenizer spells; read-only, and safe to read from several threads.

    blob: uint8 [S], the bytes of all tokens one after the other. widths: int64 [V], bytes of each; special tokens and
    holes spell nothing and have width 0. kinds: uint8 [V], a TokenKind each. missing_bytes: uint8, byte values that no
    text or byte piece spells alone, ascending. losses: why some valid UTF-8 text is not kept, in words. fingerprint:
    equal only for equal definitions (vocabulary, merges, normaliser, added tokens, decoder). roles: ids by the names in
    ROLES; a role may have several ids or none. Derived: offsets int64 [V+1] into the blob; hole_count.
    """

    blob: npt.NDArray[np.uint8]
    widths: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.uint8]
    missing_bytes: npt.NDArray[np.uint8]
    losses: tuple[str, ...]
    fingerprint: str
    roles: Mapping[str, frozenset[int]]
    offsets: npt.NDArray[np.int64] = field(init=False)
    hole_count: int = field(init=False)

    def __post_init__(self) -> None:
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.widths)])
        for array in (self.blob, self.widths, self.kinds, self.missing_bytes, offsets):
            array.setflags(write=False)
        object.__setattr__(self, "roles", MappingProxyType(dict(self.roles)))
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "hole_count", int(np.count_nonzero(self.kinds == TokenKind.HOLE)))

    def __reduce__(self) -> tuple[Callable[[], TokenTable], tuple[()]]:
        """Copies are made by the constructor, so that they are read-only too."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        return partial(type(self), **given | {"roles": dict(self.roles)}), ()

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Tokenizer,
        *,
        vocab_size: int | None = None,
        roles: Mapping[str, Iterable[int]] | None = None,
    ) -> TokenTable:
        """Read the table of a tokenizer.

        vocab_size: V, width of the model's logits; ids behind the vocabulary are holes, and entries of the vocabulary
        for which the model has no logit are left out, from the roles too. None takes the vocabulary's own size.
        roles: as `open_roles` gives them; the unknown token is read from the definition in any case.
        Raises TableError for a kind of tokenizer whose tokens do not carry their own bytes, for unknown roles, and for
        a negative `vocab_size` or one above 2**24.
        """
        if vocab_size is not None and not 0 <= vocab_size <= MOST_IDS:
            raise TableError(
                f"`vocab_size` is the width of the model's logits, 0 to {MOST_IDS}, got vocab_size={vocab_size}; "
                f"take it from the model's configuration"
            )
        definition = Definition.of(tokenizer)
        contents = _cached_contents(definition, vocab_size)
        return cls(
            blob=contents["blob"],
            widths=contents["widths"],
            kinds=contents["kinds"],
            missing_bytes=contents["missing_bytes"],
            losses=tuple(msgspec.json.decode(contents["losses"].tobytes(), type=list[str])),
            fingerprint=definition.fingerprint,
            roles=_roles(roles or {}, contents["unk"].tolist(), len(contents["kinds"])),
        )

    @property
    def lossless(self) -> bool:
        """Any valid UTF-8 text can be encoded to tokens that spell it."""
        return not self.losses

    def __len__(self) -> int:
        """V, holes included."""
        return len(self.kinds)

    def ends(self, ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Byte offset behind each token, int64 [T], for ids [T]. Raises TableError for an id that spells nothing
        known."""
        return np.cumsum(self.widths[self._checked(ids)])

    def bytes_of(self, ids: npt.ArrayLike) -> bytes:
        """What the ids [T] spell together. Raises TableError as `ends` does."""
        known = self._checked(ids)
        widths = self.widths[known]
        ends = np.cumsum(widths)
        total = int(ends[-1]) if len(ends) else 0
        return self.blob[np.repeat(self.offsets[known] - (ends - widths), widths) + np.arange(total)].tobytes()

    def kind(self, token_id: int) -> TokenKind:
        """What one id is. Raises TableError as `ends` does, holes excepted."""
        if not 0 <= token_id < len(self):
            raise self._unknown(0, token_id, "outside the table")
        return TokenKind(self.kinds[token_id])

    def _checked(self, ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        given = np.asarray(ids)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise TableError(f"`ids` must be one row of integers, got shape={given.shape}, dtype={given.dtype}")
        known = given.astype(np.int64, copy=False)
        # Read as unsigned, a negative id is a huge one: one comparison checks both ends.
        if known.size and known.view(np.uint64).max() >= len(self):
            at = int(np.argmax(known.view(np.uint64) >= len(self)))
            raise self._unknown(at, int(given[at]), "outside the table")
        if self.hole_count and not self.kinds[known].all():
            at = int(np.argmin(self.kinds[known] != TokenKind.HOLE))
            raise self._unknown(at, int(known[at]), "a hole: the logits have it, the vocabulary has not")
        return known

    def _unknown(self, position: int, token_id: int, why: str) -> TableError:
        return TableError(
            f"token id is {why}, got ids[{position}]={token_id} for a table of {len(self)} ids "
            f"({len(self) - self.hole_count} tokens, tokenizer {self.fingerprint}); "
            f"were the ids made by another tokenizer?"
        )


def _cached_contents(definition: Definition, vocab_size: int | None) -> dict[str, npt.NDArray[Any]]:
    """As `_contents`, from the cache on disk where the vocabulary is large."""
    if len(definition.model_sections["vocab"]) < _CACHED_FROM_BYTES:
        return _contents(definition, vocab_size)
    name = f"{definition.fingerprint}-{vocab_size}-{_LAYOUT}.npz"
    contents = cache.load_arrays(name)
    if contents is None or not _fit(contents, vocab_size):
        contents = _contents(definition, vocab_size)
        cache.store_arrays(name, contents)
    return contents


def _fit(contents: dict[str, npt.NDArray[Any]], vocab_size: int | None) -> bool:
    """Whether arrays read back are those of a table."""
    if {name: (array.dtype, array.ndim) for name, array in contents.items()} != {
        name: (np.dtype(dtype), 1) for name, dtype in _CONTENTS.items()
    }:
        return False
    widths, kinds, missing = contents["widths"], contents["kinds"], contents["missing_bytes"].astype(np.int64)
    try:
        msgspec.json.decode(contents["losses"].tobytes(), type=list[str])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return (
        len(widths) == len(kinds) <= MOST_IDS
        and (vocab_size is None or len(kinds) == vocab_size)
        and int(widths.min(initial=0)) >= 0
        # Each by itself first: the sum of bad ones may wrap around to the right number.
        and int(widths.max(initial=0)) <= len(contents["blob"])
        and int(widths.sum()) == len(contents["blob"])
        and int(kinds.max(initial=0)) <= max(TokenKind)
        and not widths[(kinds == TokenKind.HOLE) | (kinds == TokenKind.SPECIAL)].any()
        and bool((np.diff(missing) > 0).all())
        and len(contents["unk"]) <= 1
    )


def _contents(definition: Definition, vocab_size: int | None) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a table under the names and in the types of _CONTENTS; losses as JSON, unk the unknown token's id
    if there is one."""
    kinds, spellings = _entries(definition, vocab_size)
    widths = np.fromiter(map(len, spellings), dtype=np.int64, count=len(spellings))
    blob = np.frombuffer(b"".join(spellings), dtype=np.uint8)
    single = (widths == 1) & ((kinds == TokenKind.TEXT) | (kinds == TokenKind.BYTE))
    missing = np.setdiff1d(np.arange(256, dtype=np.uint8), blob[(np.cumsum(widths) - widths)[single]])
    losses = losses_of(definition, missing.tolist())
    return {
        "blob": blob,
        "widths": widths,
        "kinds": kinds,
        "missing_bytes": missing,
        "losses": np.frombuffer(msgspec.json.encode(losses), dtype=np.uint8),
        "unk": np.array([] if definition.unk_id is None else [definition.unk_id], dtype=np.int64),
    }


def _entries(definition: Definition, vocab_size: int | None) -> tuple[npt.NDArray[np.uint8], list[bytes]]:
    """Kind [V] and bytes of every id of the vocabulary and of the added tokens."""
    piece_ids = np.fromiter(definition.vocab.values(), dtype=np.int64, count=len(definition.vocab))
    piece_kinds = np.full(len(piece_ids), TokenKind.TEXT, dtype=np.uint8)
    piece_kinds[list(byte_pieces(definition))] = TokenKind.BYTE
    added = definition.added_tokens
    full = max([int(piece_ids.max(initial=-1)), *(token.id for token in added)]) + 1
    kinds = np.zeros(full, dtype=np.uint8)
    kinds[piece_ids] = piece_kinds
    spellings = [b""] * full
    for token_id, spelling in zip(piece_ids.tolist(), spelled(definition), strict=True):
        spellings[token_id] = spelling
    for token in added:
        text = token.content.replace(SPACE_MARK, " ") if definition.metaspace else token.content
        kinds[token.id] = TokenKind.SPECIAL if token.special else TokenKind.ADDED
        spellings[token.id] = b"" if token.special else text.encode()
    if definition.unk_id is not None:
        kinds[definition.unk_id], spellings[definition.unk_id] = TokenKind.SPECIAL, b""
    size = full if vocab_size is None else vocab_size
    sized = np.zeros(size, dtype=np.uint8)
    sized[:full] = kinds[:size]
    return sized, (spellings + [b""] * (size - full))[:size]


def _roles(given: Mapping[str, Iterable[int]], unk_ids: Iterable[int], size: int) -> dict[str, frozenset[int]]:
    unknown = sorted(set(given) - set(ROLES))
    if unknown:
        raise TableError(f"`roles` has names that are none, got {unknown}; the roles are {', '.join(ROLES)}")
    roles = {name: frozenset(int(token_id) for token_id in given.get(name, ())) for name in ROLES}
    roles["unk"] |= frozenset(unk_ids)
    return {name: frozenset(token_id for token_id in ids if 0 <= token_id < size) for name, ids in roles.items()}
