"""What a tokenizer's JSON definition says about bytes, and the two edited forms of it that this package needs.

The definition is the only source: `decode` is never asked, since it replaces bytes, strips spaces and joins tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers import Tokenizer

from tokenalign.errors import TableError

SPACE_MARK = "\u2581"
# Noncharacters: a special piece renamed with them is never met in a text.
_NEVER_IN_TEXT = "\ufdd0{id}\ufdd1"
_KEEPS_ALL_BYTES = frozenset({"ByteLevel", "Split", "Digits", "Punctuation"})


class AddedToken(msgspec.Struct, frozen=True):
    """One entry of `added_tokens`; special ones are control tokens, the others text."""

    id: int
    content: str
    special: bool = False


@dataclass(frozen=True, slots=True)
class Definition:
    """The parsed `tokenizer.json` of one tokenizer."""

    tree: dict[str, Any]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Definition:
        """Read a tokenizer's definition. Raises TableError for kinds whose tokens do not carry their own bytes."""
        definition = cls(msgspec.json.decode(tokenizer.to_str()))
        model = definition.tree["model"]
        marks = [name for name in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(name)]
        if marks:
            raise TableError(
                f"tokens that mark word pieces ({', '.join(marks)}) leave out the spaces between "
                f"words and have no bytes of their own, got model.type={model['type']!r}; use a byte-level, "
                f"SentencePiece, character or unigram tokenizer"
            )
        return definition

    @property
    def fingerprint(self) -> str:
        """First 32 hex digits of the sha256 of the definition, truncation and padding left out."""
        identity = {key: value for key, value in self.tree.items() if key not in ("truncation", "padding")}
        return hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()[:32]

    @property
    def added_tokens(self) -> list[AddedToken]:
        return msgspec.convert(self.tree["added_tokens"], list[AddedToken])

    @property
    def vocab(self) -> dict[str, int]:
        """The model's own pieces, added tokens left out."""
        vocab = self.tree["model"]["vocab"]
        return vocab if isinstance(vocab, dict) else {piece: index for index, (piece, _) in enumerate(vocab)}

    @property
    def unk_id(self) -> int | None:
        """The id that stands for whatever the vocabulary lacks."""
        model = self.tree["model"]
        by_id: int | None = model.get("unk_id")
        return by_id if by_id is not None else self.vocab.get(model.get("unk_token") or "")

    @property
    def byte_level(self) -> bool:
        """Pieces are spelled in the 256 stand-in characters of GPT-2."""
        return any(
            part["type"] == "ByteLevel"
            for section in ("normalizer", "pre_tokenizer", "decoder")
            for part in self.parts(section)
        )

    @property
    def metaspace(self) -> bool:
        """Pieces spell a space as U+2581."""
        parts = [part for section in ("normalizer", "pre_tokenizer", "decoder") for part in self.parts(section)]
        return any(
            part["type"] == "Metaspace"
            or (part["type"] == "Replace" and SPACE_MARK in (part["content"], part["pattern"].get("String")))
            for part in parts
        )

    @property
    def byte_fallback(self) -> bool:
        """Pieces named `<0xHH>` are single bytes."""
        by_decoder = any(part["type"] == "ByteFallback" for part in self.parts("decoder"))
        return by_decoder or bool(self.tree["model"].get("byte_fallback"))

    @property
    def keeps_all_bytes(self) -> bool:
        """Nothing between the text and a byte-level model adds, drops or changes a byte."""
        return (
            self.byte_level
            and self.tree["model"]["type"] == "BPE"
            and all(part["type"] == "ByteLevel" for part in self.parts("normalizer"))
            and all(
                part["type"] in _KEEPS_ALL_BYTES and part.get("behavior") != "Removed" for part in self.parts("pre_tokenizer")
            )
        )

    def parts(self, section: str) -> list[dict[str, Any]]:
        """The components of a section in order, nested sequences laid flat."""
        return _flatten(self.tree[section])

    def for_continuation(self) -> str:
        """The definition as JSON for text in the middle of a sequence: no dummy prefix, no truncation, no control
        tokens.

        Added tokens are taken out of the matcher, so that a text that spells one stays text. Where the model itself
        could produce a control token from its spelling, the piece is renamed.
        """
        edited: dict[str, Any] = {
            "added_tokens": [],
            "normalizer": _without_prefix(self.tree["normalizer"]),
            "pre_tokenizer": _without_prefix(self.tree["pre_tokenizer"]),
            "truncation": None,
            "padding": None,
            "model": self._model_without_specials(),
        }
        return msgspec.json.encode(self.tree | edited).decode()

    def _model_without_specials(self) -> dict[str, Any]:
        model = self.tree["model"]
        specials = {token.id for token in self.added_tokens if token.special}
        edited: dict[str, Any] = model | ({"dropout": None} if "dropout" in model else {})
        names = {piece: _NEVER_IN_TEXT.format(id=index) for piece, index in self.vocab.items() if index in specials}
        if model["type"] == "Unigram":
            edited["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        elif model["type"] == "WordLevel":
            edited["vocab"] = {names.get(piece, piece): index for piece, index in model["vocab"].items()}
            edited["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        return edited


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
