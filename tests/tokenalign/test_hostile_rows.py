"""Rows that lie, that a library gives up on, and bytes without tokens: the other rows of a batch are unharmed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from unittest.mock import Mock

import numpy as np
import pytest
from tokenizers import normalizers

from tokenalign import (
    AlignmentError,
    Encoder,
    Limits,
    Residual,
    RoleError,
    TableError,
    TextError,
    Trace,
    TranslationError,
    Translator,
    raw_bytes,
)
from tokenalign.spelling import Spelled, Speller
from tokenalign.testing import EOS_ID, TOY_TOKENIZERS, byte_bpe_tokenizer

TRANSLATORS = {name: Translator(Encoder(TOY_TOKENIZERS[name]()), eos_id=EOS_ID) for name in ("byte_bpe", "char")}

GOOD = Trace(text=b"hello", ends=[2, 5, 5], finished=True, has_eos=True, logprobs=[-1.0, -2.0, -3.0], mask=[True] * 3)
LIES: dict[str, dict[str, object]] = {
    "falling": {"ends": [3, 2, 5]},
    "negative": {"ends": [-1, 5, 5]},
    "wrapping": {"ends": [1, -(2**63), 5]},
    "beyond": {"ends": [2, 2**62, 2**62]},
    "short": {"ends": [2, 4, 4]},
    "floats": {"ends": [2.0, 5.0, 5.0]},
    "two rows": {"ends": [[2, 5, 5]]},
    "a number": {"ends": 5},
    "ragged": {"ends": [[1], [2, 3]]},
    "words": {"ends": ["2", "5", "5"]},
    "wide end": {"ends": [1, 2, 5]},
    "no token": {"ends": [], "logprobs": [], "mask": []},
    "NaN": {"logprobs": [-1.0, float("nan"), -1.0]},
    "infinite": {"logprobs": [-1.0, float("-inf"), -1.0]},
    "huge": {"logprobs": [-1.0, -1e30, -1.0]},
    "positive": {"logprobs": [-1.0, 3.0, -1.0]},
    "few log-probs": {"logprobs": [-1.0]},
    "log-probs as words": {"logprobs": ["a", "b", "c"]},
    "a log-prob": {"logprobs": -1.0},
    "a mask of floats": {"mask": [1.0, 1.0, 0.0]},
    "few masks": {"mask": [True]},
    "not finished": {"finished": False},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_row_is_refused_and_the_others_are_unharmed(lie: str) -> None:
    liar = dataclasses.replace(GOOD, **LIES[lie])  # type: ignore[arg-type]
    whole = TRANSLATORS["byte_bpe"].translate_batch([GOOD, liar, GOOD], max_tokens=9)
    assert set(whole.errors) == {1}
    with pytest.raises((AlignmentError, RoleError)):
        whole[1]
    alone = TRANSLATORS["byte_bpe"].translate(GOOD, max_tokens=9)
    for text in (0, 2):
        assert whole[text].ids.tolist() == alone.ids.tolist()
        assert whole[text].residual == alone.residual
        np.testing.assert_array_equal(whole[text].span_logprobs, alone.span_logprobs)


def test_rows_of_other_types_go_together() -> None:
    rows = [
        Trace(text=b"", ends=[], finished=False, has_eos=False, logprobs=[]),
        Trace(text=b"ab", ends=np.array([1, 2], np.uint64), finished=False, has_eos=False, logprobs=np.zeros(2, np.float16)),
        Trace(text=b"ab", ends=np.array([2], np.int8), finished=False, has_eos=False, logprobs=[-1]),
    ]
    whole = TRANSLATORS["char"].translate_batch(rows, max_tokens=9)
    assert not whole.errors
    assert whole.span_logprobs is not None and whole.span_logprobs.tolist() == [0, 0, -1]


def test_all_rows_refused_leaves_nothing() -> None:
    whole = TRANSLATORS["char"].translate_batch([dataclasses.replace(GOOD, ends=[9])] * 3, max_tokens=9)
    assert len(whole.errors) == len(whole) == 3
    assert not len(whole.ids)
    assert whole.residual == Residual()
    assert whole.alignment is not None and whole.span_logprobs is not None and whole.mask is not None
    assert (len(whole.alignment), len(whole.span_logprobs), len(whole.mask)) == (0, 0, 0)
    assert len(TRANSLATORS["char"].translate_batch([], max_tokens=9)) == 0


def test_text_that_is_no_bytes_and_limits_that_are_none_are_refused() -> None:
    with pytest.raises(AlignmentError, match=r"got str; use text\.encode"):
        TRANSLATORS["char"].translate(dataclasses.replace(GOOD, text="hello"), max_tokens=9)  # type: ignore[arg-type]
    with pytest.raises(TextError, match=r"got str; use text\.encode"):
        Encoder(byte_bpe_tokenizer()).encode("hello")  # type: ignore[arg-type]
    with pytest.raises(TableError, match="got str; open_tokenizer reads it"):
        Encoder("gpt2")  # type: ignore[arg-type]
    for limits in ({"max_lost_bytes": -1}, {"max_struct": 7}, {"max_changed_bytes": "x"}):
        with pytest.raises(TranslationError, match="must be a number from 0"):
            Limits(**limits)


@pytest.mark.parametrize("text", [b" \xff", b"\xff ", b"a \xff \xffb", b"\xff  a"])
def test_bytes_without_a_token_beside_a_stray_byte_are_never_exact(text: bytes) -> None:
    tokenizer = byte_bpe_tokenizer()
    tokenizer.normalizer = normalizers.Strip()
    encoder = Encoder(tokenizer)
    anything = Translator(encoder, eos_id=EOS_ID, limits=Limits(max_lost_bytes=None))
    for ends in (np.arange(1, len(text) + 1), [len(text)]):
        got = anything.translate(Trace(text=text, ends=ends, finished=True, has_eos=False), max_tokens=9)
        assert got.residual.lost_bytes + got.residual.changed_bytes == text.count(b" ")
        assert got.ends[-1] == len(text)
        assert got.alignment is not None
        starts = [0, *got.ends[:-1].tolist()]
        for token, (start, end) in enumerate(zip(starts, got.ends.tolist(), strict=True)):
            if got.alignment.exact_b[token] and got.ids[token] != EOS_ID:
                assert encoder.table.bytes_of(got.ids[token : token + 1]) == text[start:end]


def test_a_text_on_which_the_library_gives_up_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_bpe_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    translator = Translator(Encoder(tokenizer), eos_id=EOS_ID)
    spell = Speller.spell

    def give_up(self: Speller, texts: Sequence[bytes], ids: Sequence[np.ndarray]) -> Spelled:
        if b"bad" in texts:
            raise TextError("the tokenizer gives no offsets")
        return spell(self, texts, ids)

    monkeypatch.setattr(Speller, "spell", give_up)
    rows = [Trace(text=text, ends=[len(text)], finished=False, has_eos=False) for text in (b"good", b"bad", b"fine")]
    whole = translator.translate_batch(rows, max_tokens=9)
    assert {text: str(error) for text, error in whole.errors.items()} == {1: "the tokenizer gives no offsets"}
    assert [len(whole[text].ids) > 0 for text in (0, 2)] == [True, True]


def test_the_table_is_searched_once_for_all_stray_bytes_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = Mock(wraps=raw_bytes._byte_ids)
    monkeypatch.setattr(raw_bytes, "_byte_ids", searched)
    text = b"a\xff" * 50
    got = TRANSLATORS["byte_bpe"].translate(Trace(text=text, ends=[100], finished=False, has_eos=False), max_tokens=200)
    assert (len(got.ids), searched.call_count) == (100, 1)
