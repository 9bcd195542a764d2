"""The tiktoken path: the library's very ids, a reason where it is off, and a way out where it fails."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from tokenalign import Encoder, TokenTable, cache, fast_bpe
from tokenalign.testing import TOY_TOKENIZERS, byte_bpe_tokenizer, texts

tiktoken = pytest.importorskip("tiktoken")

QUICK = settings(max_examples=40, deadline=None)
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split(pattern: str, behaviour: str = "isolated", *, invert: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behaviour, invert)


def with_parts(
    *before: pre_tokenizers.PreTokenizer, use_regex: bool = False, normaliser: normalizers.Normalizer | None = None
) -> Tokenizer:
    tokenizer = byte_bpe_tokenizer()
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, last])
    if normaliser is not None:
        tokenizer.normalizer = normaliser
    return tokenizer


def edited(edit: Callable[[dict[str, Any]], None], *, bare: bool = False) -> Tokenizer:
    """The toy byte-level tokenizer with its model section edited. bare: without a merge."""
    tree = json.loads((byte_bpe_tokenizer(()) if bare else byte_bpe_tokenizer()).to_str())
    edit(tree["model"])
    return Tokenizer.from_str(json.dumps(tree))


def with_words(*words: str, merges: list[tuple[str, str]], look_up: bool = False) -> Tokenizer:
    """With words of ASCII letters and merges for them behind all others. look_up: whole words are looked up."""

    def edit(model: dict[str, Any]) -> None:
        model["vocab"] |= {word: 1000 + n for n, word in enumerate(words)}
        model["merges"] += merges
        model["ignore_merges"] = look_up

    return edited(edit, bare=look_up)


def without_byte(model: dict[str, Any]) -> None:
    del model["vocab"]["\xf1"]


FAST: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": byte_bpe_tokenizer,
    "expression": lambda: with_parts(split(QWEN)),
    "digits": lambda: with_parts(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
    "nfc": lambda: with_parts(split(QWEN), normaliser=normalizers.NFC()),
    "nfkc": lambda: with_parts(use_regex=True, normaliser=normalizers.NFKC()),
    "whole words": lambda: with_words("th", "the", "xyz", merges=[("t", "h"), ("th", "e")], look_up=True),
    "out of reach": lambda: with_words("xyz", "yz", "xy", merges=[("x", "y"), ("y", "z"), ("x", "yz")]),
    "missing byte": lambda: edited(without_byte),
    "gaps": lambda: with_parts(split(r"\p{L}+")),
}
ENCODERS = {name: (Encoder(build()), Encoder(build(), fast=False)) for name, build in FAST.items()}
NASTY = [
    "xyz xyzw wxyz",
    "the tha ath",
    "\U00040000",
    "a\U00040000b",
    "the 12  34   x",
    "e\u0301\u0323 \ufb01",
    "I'\u017f",
    " ",
    "",
]


@pytest.mark.parametrize("kind", sorted(FAST))
@QUICK
@given(text=texts())
def test_ids_are_the_librarys(kind: str, text: str) -> None:
    fast, slow = ENCODERS[kind]
    assert fast.slow_reason is None
    assert slow.slow_reason == "switched off by fast=False"
    for nasty in (text, *NASTY):
        assert fast.encode(nasty.encode()).tolist() == slow.encode(nasty.encode()).tolist()


INTERLEAVED = [("x", "y"), ("x", "z"), ("y", "z"), ("x", "yz"), ("z", "z"), ("xy", "z")]
SLOW: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "spm_bpe": (TOY_TOKENIZERS["spm_bpe"], "the pre-tokenizer is not one expression over bytes, got none"),
    "char": (TOY_TOKENIZERS["char"], "the pre-tokenizer is not one expression over bytes, got Split"),
    "splits": (lambda: with_parts(split(r"\p{N}"), split(QWEN)), "got Split \\+ Split \\+ ByteLevel"),
    "removed": (lambda: with_parts(split(QWEN, "removed")), "not one expression"),
    "inverted": (lambda: with_parts(split(QWEN, invert=True)), "not one expression"),
    "lines": (lambda: with_parts(split(r"\s+$|\S+|\s")), "may read differently"),
    "repeated": (lambda: with_parts(split(r"\p{N}{1,3}+|\P{N}+")), "may read differently"),
    "lowercase": (lambda: with_parts(split(QWEN), normaliser=normalizers.Lowercase()), "not a Unicode normal form"),
    "words": (lambda: with_words("xy", "xyz", merges=[("x", "y")], look_up=True), "as a whole word, got 'xyz'"),
    "interleaved": (lambda: with_words("xy", "xz", "yz", "xyz", "zz", merges=INTERLEAVED), "no single rank"),
}


@pytest.mark.parametrize("kind", sorted(SLOW))
def test_the_reason_why_it_is_off(kind: str) -> None:
    build, reason = SLOW[kind]
    encoder = Encoder(build())
    assert re.search(reason, str(encoder.slow_reason))
    assert encoder.encode(b"12 the xyz").tolist() == Encoder(build(), fast=False).encode(b"12 the xyz").tolist()


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert Encoder(byte_bpe_tokenizer()).slow_reason == "tiktoken is not installed; pip install 'mutualrl[fast]'"


def test_the_check_at_start_up_finds_another_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_bpe, "GPT2_PATTERN", fast_bpe.GPT2_PATTERN.replace(r"|\s+(?!\S)", ""))
    assert "tiktoken gives other ids for " in str(Encoder(byte_bpe_tokenizer()).slow_reason)


class PanicException(BaseException):
    """What pyo3 raises for a panic: no Exception, of a type that cannot be imported."""


@pytest.mark.parametrize("failure", [ValueError, PanicException])
def test_a_text_that_it_fails_on_takes_the_slow_path(monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]) -> None:
    encoder, slow = ENCODERS["gpt2"]

    def fail(self: object, text: str) -> list[int]:
        raise failure("no")

    monkeypatch.setattr(tiktoken.Encoding, "encode_ordinary", fail)
    assert encoder.encode(b"hello there").tolist() == slow.encode(b"hello there").tolist()


@pytest.fixture
def kept_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the ranks of any vocabulary are kept."""
    monkeypatch.setenv("MUTUALRL_CACHE", str(tmp_path))
    monkeypatch.setattr(fast_bpe, "_CACHED_FROM_BYTES", 0)
    return tmp_path / "tokenalign"


@pytest.mark.parametrize("kind", sorted(FAST))
def test_a_kept_proof_gives_the_same_ids(kind: str, kept_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Encoder(FAST[kind]())
    (file,) = kept_in.iterdir()
    assert file.name.endswith(".ranks.npz")
    monkeypatch.setattr(fast_bpe, "_ranks", None)
    again = Encoder(FAST[kind]())
    assert again.slow_reason is None
    for nasty in NASTY:
        assert again.encode(nasty.encode()).tolist() == ENCODERS[kind][1].encode(nasty.encode()).tolist()


@pytest.mark.slow
def test_kept_ids_that_do_not_fit_the_table_are_proved_anew(kept_in: Path) -> None:
    Encoder(byte_bpe_tokenizer())
    (file,) = kept_in.iterdir()
    arrays = cache.load_arrays(file.name)
    assert arrays is not None
    ids = arrays["ids"]
    swapped, twice, control, far, negative = (ids.copy() for _ in range(5))
    swapped[[3, 4]] = swapped[[4, 3]]
    twice[-1], control[-1], far[-1], negative[-1] = twice[-2], 0, 10**6, -1
    for wrong in (swapped, twice, control, far, negative, ids[:99], ids.astype(np.int64), ids.reshape(1, -1), ids[:0]):
        cache.store_arrays(file.name, {"ids": wrong})
        assert Encoder(byte_bpe_tokenizer()).slow_reason is None
        again = cache.load_arrays(file.name)
        assert again is not None
        assert (again["ids"].dtype, again["ids"].tolist()) == (np.dtype(np.int32), ids.tolist())
    cache.store_arrays(file.name, {"other": ids})
    assert Encoder(byte_bpe_tokenizer()).slow_reason is None


def test_a_table_that_lacks_tokens_keeps_no_proof(kept_in: Path) -> None:
    narrow = TokenTable.from_tokenizer(byte_bpe_tokenizer(), vocab_size=300 - 30)
    encoder = Encoder(byte_bpe_tokenizer(), table=narrow)
    assert encoder.slow_reason is None
    assert encoder.encode(b"hello there").tolist() == ENCODERS["gpt2"][1].encode(b"hello there").tolist()
    assert not kept_in.exists()


def test_an_interrupt_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: object, text: str) -> list[int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiktoken.Encoding, "encode_ordinary", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ENCODERS["gpt2"][0].encode(b"hello")


@pytest.mark.soak
@pytest.mark.parametrize("unit", [" ", "a", "\n", "\U0001f600"])
def test_a_million_of_one_character(unit: str) -> None:
    fast, slow = ENCODERS["gpt2"]
    text = (unit * 10**6).encode()
    assert fast.encode(text).tolist() == slow.encode(text).tolist()


@pytest.mark.soak
def test_both_engines_class_every_character_alike() -> None:
    """Their Unicode tables may be of different age."""
    classes = [r"\p{Lu}+", r"\p{Ll}+", r"\p{Lt}+", r"\p{Lm}+", r"\p{Lo}+", r"\p{M}+", r"\p{N}+", r"\p{P}+", r"\p{S}+", r"\s+"]
    build = with_parts(split("|".join([*classes, r"[^\s\p{L}\p{M}\p{N}\p{P}\p{S}]+"])))
    fast, slow = Encoder(build), Encoder(build, fast=False)
    assert fast.slow_reason is None
    # A word's last merge shows where it ends.
    text = "".join(f"{chr(code)}th" for code in range(0x110000) if not 0xD800 <= code < 0xE000).encode()
    assert fast.encode(text).tolist() == slow.encode(text).tolist()
