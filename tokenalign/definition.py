"""What a tokenizer's JSON definition says about bytes, and the two edited forms of it that this package needs.

The definition is the only source: `decode` is never asked, since it replaces bytes, strips spaces and joins tokens. A
section is parsed when it is asked for; vocabulary and merges, nearly all of the text, are copied and hashed unparsed.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import msgspec
from tokenizers import Tokenizer

from tokenalign.errors import TableError
from tokenalign.foreign import foreign

SPACE_MARK = "\u2581"
# Ids index arrays, and the library makes some as long as the highest: one bad id would take all memory.
MOST_IDS = 1 << 24
# Another name for the unknown token, so that its own spelling is text. A text with this one gives the unknown token.
_UNKNOWN = "\ufdd0unknown\ufdd1"
_Parsed = TypeVar("_Parsed")
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NOTHING = msgspec.Raw(b"null")
_NO_IDENTITY = ("truncation", "padding")
_LARGE = ("vocab", "merges")


class AddedToken(msgspec.Struct, frozen=True):
    """One entry of `added_tokens`; special ones are control tokens, the others text."""

    id: int
    content: str
    special: bool = False


@dataclass(frozen=True)
class Definition:
    """The `tokenizer.json` of one tokenizer: its sections and the keys of its `model` section, each as JSON."""

    sections: dict[str, msgspec.Raw]
    model_sections: dict[str, msgspec.Raw]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Definition:
        """Read a tokenizer's definition.

        Raises TableError for kinds whose tokens do not carry their own bytes, for ids from MOST_IDS on and for parts
        written in Python. Files of strangers belong through `open_tokenizer`: with an id near 2**32 the library ends the
        process before anything can be checked here.
        """
        with foreign(TableError, "the tokenizer has no definition"):
            content = tokenizer.to_str()
        definition = cls.read(content)
        definition.check_ids()
        model = definition.model
        marks = [name for name in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(name)]
        if marks and model["type"] != "WordPiece":
            raise TableError(
                f"tokens that mark word pieces ({', '.join(marks)}) leave out the spaces between "
                f"words and have no bytes of their own, got model.type={model['type']!r}; use a byte-level, "
                f"SentencePiece, WordPiece, character or unigram tokenizer"
            )
        return definition

    @classmethod
    def read(cls, content: str | bytes) -> Definition:
        """Read a definition's JSON. Raises TableError for other content."""
        with foreign(TableError, f"this is no tokenizer.json, got {len(content)} characters"):
            sections = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
            return cls(sections, msgspec.json.decode(sections["model"], type=dict[str, msgspec.Raw]))

    def check_ids(self) -> None:
        """Raise TableError where an id is negative or not below MOST_IDS."""
        ids = [*self.vocab.values(), *(token.id for token in self.added_tokens)]
        for bad in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= bad < MOST_IDS:
                raise TableError(f"token ids must be from 0 to {MOST_IDS - 1}, got id={bad} in the definition of a tokenizer")

    @cached_property
    def tree(self) -> dict[str, Any]:
        """All of the definition, parsed: slow for large vocabularies."""
        return {name: _parsed(name, raw, Any) for name, raw in self.sections.items()}

    @cached_property
    def model(self) -> dict[str, Any]:
        """The `model` section without vocabulary and merges."""
        return {name: _parsed(name, raw, Any) for name, raw in self.model_sections.items() if name not in _LARGE}

    @cached_property
    def vocab(self) -> dict[str, int]:
        """The model's own pieces, added tokens left out."""
        raw = self.model_sections.get("vocab", _NOTHING)
        if bytes(memoryview(raw)[:1]) == b"[":
            return {piece: index for index, (piece, _) in enumerate(self._scored)}
        return _parsed("vocab", raw, dict[str, int])

    @cached_property
    def merges(self) -> list[tuple[str, str]]:
        """The merges of a BPE model by falling priority; none for other models."""
        raw = self.model_sections.get("merges")
        return [] if raw is None else _parsed("merges", raw, list[tuple[str, str]])

    @cached_property
    def added_tokens(self) -> list[AddedToken]:
        raw = self.sections.get("added_tokens")
        return [] if raw is None else _parsed("added_tokens", raw, list[AddedToken])

    @cached_property
    def fingerprint(self) -> str:
        """First 32 hex digits of a sha256 over the definition, truncation and padding left out."""
        digest = hashlib.sha256()
        named = [*self.sections.items(), *((f"model.{name}", raw) for name, raw in self.model_sections.items())]
        for name, raw in sorted(named):
            if name in _NO_IDENTITY or name == "model":
                continue
            large = name.removeprefix("model.") in _LARGE
            content = bytes(raw) if large else msgspec.json.encode(msgspec.json.decode(raw), order="sorted")
            digest.update(f"{name} {len(content)} ".encode())
            digest.update(content)
        return digest.hexdigest()[:32]

    @property
    def unk_id(self) -> int | None:
        """The id that stands for whatever the vocabulary lacks."""
        by_id: int | None = self.model.get("unk_id")
        return by_id if by_id is not None else self.vocab.get(self.model.get("unk_token") or "")

    @property
    def byte_level(self) -> bool:
        """Pieces are spelled in the 256 stand-in characters of GPT-2."""
        return any(part["type"] == "ByteLevel" for part in self._text_parts)

    @property
    def metaspace(self) -> bool:
        """Pieces spell a space as U+2581."""
        return any(
            part["type"] == "Metaspace"
            or (part["type"] == "Replace" and SPACE_MARK in (part["content"], part["pattern"].get("String")))
            for part in self._text_parts
        )

    @property
    def byte_fallback(self) -> bool:
        """Pieces named `<0xHH>` are single bytes."""
        by_decoder = any(part["type"] == "ByteFallback" for part in self.parts("decoder"))
        return by_decoder or bool(self.model.get("byte_fallback"))

    def parts(self, section: str) -> list[dict[str, Any]]:
        """The components of a section in order, nested sequences laid flat."""
        return _flatten(msgspec.json.decode(self.sections[section]))

    def for_continuation(self) -> str:
        """The definition as JSON for text in the middle of a sequence: no dummy prefix, no truncation, no control
        tokens.

        Added tokens are taken out of the matcher, so that a text that spells one stays text. Where the model itself
        could produce a control token from its spelling, the piece is taken out of its vocabulary. The unknown token,
        which the model needs, is renamed.
        """
        edited: dict[str, Any] = {
            "added_tokens": [],
            "normalizer": _without_prefix(msgspec.json.decode(self.sections["normalizer"])),
            "pre_tokenizer": _without_prefix(msgspec.json.decode(self.sections["pre_tokenizer"])),
            "truncation": None,
            "padding": None,
            "model": self._model_without_specials(),
        }
        return msgspec.json.encode({**self.sections, **edited}).decode()

    @cached_property
    def _text_parts(self) -> list[dict[str, Any]]:
        return [part for section in ("normalizer", "pre_tokenizer", "decoder") for part in self.parts(section)]

    @cached_property
    def _scored(self) -> list[tuple[str, float]]:
        return _parsed("vocab", self.model_sections["vocab"], list[tuple[str, float]])

    def _model_without_specials(self) -> dict[str, Any]:
        edited: dict[str, Any] = dict(self.model_sections)
        if "dropout" in edited:
            edited["dropout"] = None
        specials = self._reachable_specials()
        if not specials:
            return edited
        if self.model["type"] == "Unigram":
            # Ids are places. An empty piece keeps its place, and no part of a text is empty.
            edited["vocab"] = [("" if piece in specials else piece, score) for piece, score in self._scored]
            return edited
        unk = self.model.get("unk_token")
        vocab = {piece: index for piece, index in self.vocab.items() if piece not in specials}
        if unk in specials:
            vocab[_UNKNOWN], edited["unk_token"] = self.vocab[unk], _UNKNOWN
        edited["vocab"] = vocab
        if self.model["type"] == "BPE":
            edited["merges"] = [
                (left, right)
                for left, right in self.merges
                if left + right not in specials and left not in specials and right not in specials
            ]
        return edited

    def _reachable_specials(self) -> set[str]:
        """The control tokens that the model itself can make of a text."""
        ids = {token.id for token in self.added_tokens if token.special}
        specials = {piece for piece, index in self.vocab.items() if index in ids}
        if not specials or self.model["type"] != "BPE" or self.model.get("ignore_merges"):
            return specials
        made = {joined for left, right in self.merges if (joined := left + right) in specials}
        return {piece for piece in specials if piece in made or len(piece) == 1 or BYTE_PIECE.fullmatch(piece)}


def _parsed(name: str, raw: msgspec.Raw, kind: type[_Parsed]) -> _Parsed:
    with foreign(TableError, f"`{name}` of the tokenizer.json cannot be read"):
        return msgspec.json.decode(raw, type=kind)


def _flatten(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [leaf for children in part.values() if isinstance(children, list) for child in children for leaf in _flatten(child)]


def _without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normaliser or pre-tokenizer that puts no space before the text."""
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] == "Sequence":
        return {
            key: [kept for child in value if (kept := _without_prefix(child))] if isinstance(value, list) else value
            for key, value in part.items()
        }
    edits: dict[str, dict[str, Any]] = {
        "Metaspace": {"prepend_scheme": "never"},
        "ByteLevel": {"add_prefix_space": False},
    }
    return part | edits.get(part["type"], {})
