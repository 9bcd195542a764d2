"""Real tokenizers: the fast path's ids, what normalisers rewrite, look-alikes of every family's added tokens."""

from __future__ import annotations

import functools
import unicodedata
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer

from tokenalign import Encoder, TokenKind, TokenTable
from tokenalign.registry import FAMILIES, family
from tokenalign.testing import texts

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]
LINES = (Path(__file__).parent.parent / "data" / "mixed200.txt").read_bytes().splitlines(keepends=True)
FAST = {"gpt2", "llama3", "qwen3", "tekken", "claude", "smollm2"}
FORMS: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = ("NFC", "NFD", "NFKC", "NFKD")
REWRITTEN = {"qwen3", "claude"}
LOSSLESS = {"gpt2", "llama3", "tekken", "deepseek"}
QUICK = settings(max_examples=60, deadline=None)


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    return family(name)


@functools.cache
def encoder(name: str, fast: bool = True) -> Encoder:
    table = TokenTable.from_tokenizer(tokenizer(name)) if fast else encoder(name).table
    return Encoder(tokenizer(name), table=table, fast=fast)


def normalised(name: str, text: bytes) -> bytes:
    """By the library's Unicode tables, which differ in age from Python's."""
    normaliser = tokenizer(name).normalizer
    assert normaliser is not None
    return str(normaliser.normalize_str(text.decode())).encode()


def check(name: str, text: bytes) -> None:
    """Full coverage, unchanged tokens spell their bytes, and something is counted exactly where bytes differ."""
    table, spelled = encoder(name).table, encoder(name).spell([text])
    starts, through = (np.concatenate([[0], ends]).astype(np.int64) for ends in (spelled.ends, table.ends(spelled.ids)))
    assert (np.diff(starts) >= 0).all()
    assert spelled.ends[-1:].tolist() == [len(text)][: len(spelled.ids)]
    joined, counted = table.bytes_of(spelled.ids), int(spelled.changed_bytes[0] + spelled.lost_bytes[0])
    assert (counted > 0) == (joined != text)
    assert counted <= len(text)
    for token in np.flatnonzero(~spelled.changed_mask):
        assert joined[through[token] : through[token + 1]] == text[starts[token] : starts[token + 1]]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_who_takes_the_fast_path(name: str) -> None:
    assert (encoder(name).slow_reason is None) == (name in FAST), encoder(name).slow_reason


@pytest.mark.parametrize("name", sorted(FAST))
def test_fast_ids_are_the_librarys_on_mixed_text(name: str) -> None:
    for text in [*LINES, b"".join(LINES)]:
        assert encoder(name).encode(text).tolist() == encoder(name, fast=False).encode(text).tolist()


@pytest.mark.parametrize("name", sorted(FAST))
@QUICK
@given(text=texts())
def test_fast_ids_are_the_librarys_on_any_text(name: str, text: str) -> None:
    for form in FORMS:
        content = unicodedata.normalize(form, text).encode()
        assert encoder(name).encode(content).tolist() == encoder(name, fast=False).encode(content).tolist()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_mixed_text_is_covered_and_counted(name: str) -> None:
    """T01, T02."""
    for line in LINES:
        check(name, line)
    spelled = encoder(name).spell(LINES, threads=4)
    assert spelled.ids.tolist() == [token for line in LINES for token in encoder(name).encode(line)]
    if name in LOSSLESS:
        assert not spelled.changed_mask.any()
        assert encoder(name).table.lossless
    if name in REWRITTEN:
        wanted = normalised(name, b"".join(LINES))
        assert encoder(name).table.bytes_of(spelled.ids) == wanted
        assert not spelled.lost_bytes.any() and spelled.changed_bytes.any()


@pytest.mark.parametrize("name", sorted(REWRITTEN))
@QUICK
@given(text=texts())
def test_normal_forms_are_covered_and_counted(name: str, text: str) -> None:
    """T13."""
    for form in FORMS:
        content = unicodedata.normalize(form, text + "각e\u0301 \ufb01").encode()
        check(name, content)
        spelled = encoder(name).spell([content])
        wanted = normalised(name, content)
        assert encoder(name).table.bytes_of(spelled.ids) == wanted
        assert not spelled.lost_bytes.any()
        assert (spelled.changed_bytes[0] > 0) == (wanted != content)


@pytest.mark.parametrize("name", sorted(FAMILIES))
@QUICK
@given(text=texts())
def test_any_text_is_covered_and_counted(name: str, text: str) -> None:
    check(name, text.encode())


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_no_look_alike_becomes_an_added_token(name: str) -> None:
    """T14: what any family matches as one token, in any of them, with blanks around that some would swallow."""
    added = {token.content for other in FAMILIES for token in tokenizer(other).get_added_tokens_decoder().values()}
    spellings = sorted(content for content in added if content.strip(" \n\t▁"))
    spelled = encoder(name).spell([f"{before}{text} x".encode() for text in spellings for before in ("", "a ", "\n")])
    assert len(spellings) > 1000
    if name != "bert":
        # Gemma's runs of blanks are added tokens and pieces that merges make.
        table, used = encoder(name).table, np.unique(spelled.ids)
        assert TokenKind.SPECIAL not in table.kinds[used]
        assert table.bytes_of(used[table.kinds[used] == TokenKind.ADDED]).strip() == b""
        assert not spelled.lost_bytes.any()


@pytest.mark.parametrize("name", ["llama2", "mistral", "gemma3"])
@pytest.mark.parametrize("lead", ["", " ", "  ", "   ", "\t", "\n", "▁"])
def test_no_dummy_prefix_and_leading_blanks_kept(name: str, lead: str) -> None:
    """T16, T32."""
    text = f"{lead}hello".encode()
    spelled = encoder(name).spell([text])
    assert encoder(name).table.bytes_of(spelled.ids) == text.replace("▁".encode(), b" ")
    assert spelled.changed_bytes.tolist() == [3 if lead == "▁" else 0]


def test_bytes_that_smollm2_has_no_token_for_are_counted() -> None:
    """T31."""
    spelled = encoder("smollm2").spell(["a\U00040000b".encode(), b"plain"])
    assert spelled.lost_bytes.tolist() == [1, 0]
    assert spelled.ends[: spelled.cu[1]].tolist()[-1] == 6
