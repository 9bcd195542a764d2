"""What a tokenizer's JSON definition says about bytes, and the two edited forms of it that this package needs.

The definition is the only source: `decode` is never asked, since it replaces bytes, strips spaces and joins tokens. A
section is parsed when it is asked for; vocabulary and merges, nearly all of the text, are copied and hashed unparsed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from tokenizers import Tokenizer

from tokenalign.errors import TableError

SPACE_MARK = "\u2581"
# Noncharacters: a special piece renamed with them is never met in a text.
_NEVER_IN_TEXT = "\ufdd0{id}\ufdd1"
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
        """Read a tokenizer's definition. Raises TableError for kinds whose tokens do not carry their own bytes."""
        definition = cls.read(tokenizer.to_str())
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
        try:
            sections = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
            return cls(sections, msgspec.json.decode(sections["model"], type=dict[str, msgspec.Raw]))
        except (msgspec.MsgspecError, KeyError) as error:
            raise TableError(f"this is no tokenizer.json, got {len(content)} characters: {error!r}") from error

    @cached_property
    def tree(self) -> dict[str, Any]:
        """All of the definition, parsed: slow for large vocabularies."""
        return {name: msgspec.json.decode(raw) for name, raw in self.sections.items()}

    @cached_property
    def model(self) -> dict[str, Any]:
        """The `model` section without vocabulary and merges."""
        return {name: msgspec.json.decode(raw) for name, raw in self.model_sections.items() if name not in _LARGE}

    @cached_property
    def vocab(self) -> dict[str, int]:
        """The model's own pieces, added tokens left out."""
        if self.model["type"] == "Unigram":
            return {piece: index for index, (piece, _) in enumerate(self._scored)}
        return msgspec.json.decode(self.model_sections["vocab"], type=dict[str, int])

    @cached_property
    def merges(self) -> list[tuple[str, str]]:
        """The merges of a BPE model by falling priority; none for other models."""
        raw = self.model_sections.get("merges")
        return [] if raw is None else msgspec.json.decode(raw, type=list[tuple[str, str]])

    @cached_property
    def added_tokens(self) -> list[AddedToken]:
        return msgspec.json.decode(self.sections["added_tokens"], type=list[AddedToken])

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
        could produce a control token from its spelling, the piece is renamed.
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
        return msgspec.json.decode(self.model_sections["vocab"], type=list[tuple[str, float]])

    def _model_without_specials(self) -> dict[str, Any]:
        edited: dict[str, Any] = dict(self.model_sections)
        if "dropout" in edited:
            edited["dropout"] = None
        names = self._reachable_specials()
        if not names:
            return edited
        if self.model["type"] == "Unigram":
            edited["vocab"] = [(names.get(piece, piece), score) for piece, score in self._scored]
            return edited
        edited["vocab"] = {names.get(piece, piece): index for piece, index in self.vocab.items()}
        if self.model.get("unk_token") is not None:
            edited["unk_token"] = names.get(self.model["unk_token"], self.model["unk_token"])
        if self.model["type"] == "BPE":
            edited["merges"] = [
                (left, right)
                for left, right in self.merges
                if left + right not in names and left not in names and right not in names
            ]
        return edited

    def _reachable_specials(self) -> dict[str, str]:
        """A new name for each control token that the model itself can make of its spelling."""
        specials = {token.id for token in self.added_tokens if token.special}
        names = {piece: _NEVER_IN_TEXT.format(id=index) for piece, index in self.vocab.items() if index in specials}
        if not names or self.model["type"] != "BPE" or self.model.get("ignore_merges"):
            return names
        made = {left + right for left, right in self.merges if left + right in names}
        return {piece: name for piece, name in names.items() if piece in made or len(piece) == 1}


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
