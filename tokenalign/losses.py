"""Why a tokenizer does not keep every text: read off its definition, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tokenalign.definition import SPACE_MARK, Definition

# Byte values that no valid UTF-8 text holds.
NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})
_MARK_READ = "reads U+2581 as a space"
_SPACES_DROPPED = "drops spaces between words"
_FORMS = {
    "NFC": "composes characters (NFC)",
    "NFD": "decomposes characters (NFD)",
    "NFKC": "replaces compatibility characters (NFKC)",
    "NFKD": "replaces and decomposes compatibility characters (NFKD)",
}


def losses_of(definition: Definition, missing_bytes: Iterable[int]) -> tuple[str, ...]:
    """What the tokenizer adds to, drops from or changes in a text, in the order in which it does so; () for nothing.

    missing_bytes: byte values that no token spells alone. A dummy prefix counts as nothing: continuations carry none.
    """
    found = [loss for part in definition.parts("normalizer") for loss in _by_normalizer(part)]
    found += [loss for part in definition.parts("pre_tokenizer") for loss in _by_pre_tokenizer(part)]
    if definition.metaspace:
        found.append(_MARK_READ)
    found += _by_model(definition, sorted(set(missing_bytes) - NEVER_IN_UTF8))
    return tuple(dict.fromkeys(found))


def _by_normalizer(part: dict[str, Any]) -> list[str]:
    kind = part["type"]
    if kind in ("ByteLevel", "Prepend"):
        return []
    if kind in _FORMS:
        return [_FORMS[kind]]
    describe: dict[str, Callable[[], list[str]]] = {
        "Replace": lambda: _by_replacement(part),
        "BertNormalizer": lambda: _by_bert(part),
        "Lowercase": lambda: ["makes letters small"],
        "StripAccents": lambda: ["drops accents"],
        "Strip": lambda: ["drops spaces at the ends of a text"],
        "Precompiled": lambda: ["replaces characters by SentencePiece's map"],
        "Nmt": lambda: ["drops control characters"],
    }
    return describe[kind]() if kind in describe else [f"changes text by {kind}"]


def _by_replacement(part: dict[str, Any]) -> list[str]:
    (pattern,) = part["pattern"].values()
    content = part["content"]
    if SPACE_MARK in content and pattern in (" ", SPACE_MARK):
        return [_MARK_READ]
    return [f"replaces {pattern!a} by {content!a}"]


def _by_bert(part: dict[str, Any]) -> list[str]:
    words = {
        "clean_text": "drops control characters",
        "handle_chinese_chars": _SPACES_DROPPED,
        "lowercase": "makes letters small",
    }
    found = [loss for key, loss in words.items() if part.get(key)]
    strips = part.get("strip_accents")
    return [*found, "drops accents"] if strips or (strips is None and part.get("lowercase")) else found


def _by_pre_tokenizer(part: dict[str, Any]) -> list[str]:
    kind = part["type"]
    if kind in ("ByteLevel", "Digits", "UnicodeScripts", "FixedLength"):
        return []
    if kind == "Metaspace":
        return [_MARK_READ]
    if kind in ("Split", "Punctuation"):
        removed = part["behavior"] == "Removed"
        return [f"drops what its pre-tokenizer splits at ({kind})"] if removed else []
    return [_SPACES_DROPPED]


def _by_model(definition: Definition, missing: list[int]) -> list[str]:
    complete = definition.model["type"] == "BPE" and (definition.byte_level or bool(definition.model.get("byte_fallback")))
    if complete and missing:
        shown = " ".join(f"0x{value:02X}" for value in missing[:4]) + (" ..." if len(missing) > 4 else "")
        return [f"has no token for {len(missing)} bytes of valid UTF-8: {shown}"]
    if complete or _falls_back(definition, missing):
        return []
    if definition.unk_id is None:
        return ["drops what it has no piece for"]
    return ["has an unknown token"]


def _falls_back(definition: Definition, missing: list[int]) -> bool:
    return definition.model["type"] == "Unigram" and bool(definition.model.get("byte_fallback")) and not missing
