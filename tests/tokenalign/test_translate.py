"""Translation: roles, round trip, tails, limits and the residual."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from tokenalign import (
    NO_GROUP,
    AlignmentError,
    Encoder,
    Residual,
    RoleError,
    TableError,
    TextError,
    TokenTable,
    TooLongError,
    Translation,
    TranslationError,
    Translator,
    sum_spans,
)
from tokenalign.testing import EOS_ID, TOY_TOKENIZERS, byte_bpe_tokenizer, plain_texts, texts

QUICK = settings(max_examples=20, deadline=None)
TABLES = {name: TokenTable.from_tokenizer(build()) for name, build in TOY_TOKENIZERS.items()}
ENCODERS = {name: Encoder(build()) for name, build in TOY_TOKENIZERS.items()}
TRANSLATORS = {name: Translator(ENCODERS[name], TABLES[name], eos_id=EOS_ID) for name in TOY_TOKENIZERS}
KINDS = sorted(TOY_TOKENIZERS)
PAIRS = [(a, b) for a in KINDS for b in KINDS]


def source_ends(kind: str, text: bytes, *, eos: bool) -> np.ndarray:
    ids = ENCODERS[kind].encode(text).tolist()
    return TABLES[kind].ends([*ids, EOS_ID] if eos else ids)


def finished(kind: str, text: bytes, ends: np.ndarray | None = None, *, max_tokens: int = 10_000) -> Translation:
    return TRANSLATORS[kind].translate(text, ends, finished=True, source_has_eos=ends is not None, max_tokens=max_tokens)


def cut_off(kind: str, text: bytes, ends: np.ndarray | None) -> Translation:
    return TRANSLATORS[kind].translate(text, ends, finished=False, source_has_eos=False, max_tokens=10_000)


@pytest.mark.parametrize("kind_a, kind_b", PAIRS)
@settings(max_examples=10, deadline=None)
@given(text=plain_texts(max_size=25))
def test_round_trip_with_the_receivers_end_of_sequence(kind_a: str, kind_b: str, text: str) -> None:
    got = finished(kind_b, text.encode(), source_ends(kind_a, text.encode(), eos=True))
    assert got.ids.dtype == np.int32
    assert got.ids.tolist() == [*ENCODERS[kind_b].encode(text.encode()).tolist(), EOS_ID]
    assert got.ends.tolist() == TABLES[kind_b].ends(got.ids).tolist()
    assert TABLES[kind_b].bytes_of(got.ids) == text.encode()
    assert got.alignment is not None
    assert got.alignment.exact_b[-1]
    assert (got.alignment.group_b >= 0).all()
    assert got.residual.n_tokens == len(got.ids)


@pytest.mark.parametrize("kind", KINDS)
@QUICK
@given(text=plain_texts())
def test_to_itself_the_residual_is_zero(kind: str, text: str) -> None:
    for eos in (True, False):
        got = TRANSLATORS[kind].translate(
            text.encode(), source_ends(kind, text.encode(), eos=eos), finished=True, source_has_eos=eos, max_tokens=99
        )
        tokens = len(got.ids) - (not eos)
        assert got.residual == Residual(n_tokens=tokens, n_exact=tokens, n_groups=tokens)
        assert got.residual.struct == 0


@pytest.mark.parametrize("is_finished", [True, False])
def test_end_of_sequence_iff_finished(is_finished: bool) -> None:
    got = TRANSLATORS["char"].translate(b"ab", None, finished=is_finished, source_has_eos=False, max_tokens=9)
    assert (got.ids == EOS_ID).sum() == is_finished
    assert len(got.ends) == len(got.ids)
    assert got.alignment is None
    assert got.residual == Residual()


def test_an_end_of_sequence_that_the_source_lacks_has_no_group_and_is_no_loss() -> None:
    got = TRANSLATORS["char"].translate(b"ab", [1, 2], finished=True, source_has_eos=False, max_tokens=9)
    assert got.alignment is not None
    assert got.alignment.group_b.tolist() == [0, 1, NO_GROUP]
    assert (got.residual.n_tokens, got.residual.n_exact) == (2, 2)


def test_empty_text() -> None:
    got = finished("byte_bpe", b"", np.array([0]))
    assert (got.ids.tolist(), got.ends.tolist()) == ([EOS_ID], [0])
    assert got.residual == Residual(n_tokens=1, n_exact=1, n_groups=1)
    assert cut_off("byte_bpe", b"", np.array([], np.int64)).ids.tolist() == []


@pytest.mark.parametrize("kind", KINDS)
@QUICK
@given(text=texts(max_size=12))
def test_any_text_is_spelled_exactly_or_refused(kind: str, text: str) -> None:
    content = text.encode()
    try:
        got = finished(kind, content)
    except TranslationError as error:
        joined = TABLES[kind].bytes_of(ENCODERS[kind].encode(content))
        assert content[: error.offset] == joined[: error.offset]
        assert content[error.offset : error.offset + 1] != joined[error.offset : error.offset + 1]
        assert 1 <= error.text_bytes <= len(content) - error.offset
        assert not TABLES[kind].lossless
    else:
        assert TABLES[kind].bytes_of(got.ids) == content


@pytest.mark.parametrize(
    "kind, text, offset, changed",
    [("char", "abÖc", 2, 2), ("unigram", "aÖÖ", 1, 4), ("spm_bpe", "a▁b", 1, 3), ("char", "ab\tc", 2, 1)],
)
def test_what_the_vocabulary_lacks_is_refused_with_the_offset(kind: str, text: str, offset: int, changed: int) -> None:
    with pytest.raises(TranslationError, match=f"at offset {offset} of {len(text.encode())}") as caught:
        finished(kind, text.encode())
    assert (caught.value.offset, caught.value.text_bytes) == (offset, changed)


def test_a_composing_normaliser_is_refused_only_where_it_changes_bytes() -> None:
    tokenizer = byte_bpe_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    translator = Translator(Encoder(tokenizer), TokenTable.from_tokenizer(tokenizer), eos_id=EOS_ID)
    composed = translator.translate("xé".encode(), None, finished=True, source_has_eos=False, max_tokens=9)
    assert composed.ids[-1] == EOS_ID
    with pytest.raises(TranslationError, match="at offset 1 of 4"):
        translator.translate("xe\u0301".encode(), None, finished=True, source_has_eos=False, max_tokens=9)


def test_too_long_is_refused_and_never_cut() -> None:
    text = b"abcdef"
    assert len(finished("char", text, max_tokens=7).ids) == 7
    with pytest.raises(TooLongError, match="got 7 tokens with max_tokens=6"):
        finished("char", text, max_tokens=6)
    with pytest.raises(TooLongError, match="got 6 tokens with max_tokens=5"):
        TRANSLATORS["char"].translate(text, None, finished=False, source_has_eos=False, max_tokens=5)


CUT_TEXT = "hello 世界 there 😀😀 éè the\r\n12"


@pytest.mark.parametrize("receiver", ["byte_bpe", "spm_bpe"])
def test_cut_at_every_token_of_single_bytes(receiver: str) -> None:
    """The source spells byte by byte, so that its cuts fall within characters."""
    text = CUT_TEXT.encode()
    logprobs = -np.arange(1.0, len(text) + 1)
    held_back = set()
    for length in range(len(text) + 1):
        got = cut_off(receiver, text[:length], np.arange(1, length + 1))
        joined = TABLES[receiver].bytes_of(got.ids)
        tail = got.residual.tail_bytes
        assert joined + text[length - tail : length] == text[:length]
        assert joined.decode() == CUT_TEXT[: len(joined.decode())]
        assert got.residual.tail_tokens == tail
        assert got.alignment is not None
        assert (got.alignment.group_a == NO_GROUP).sum() == tail
        assert sum_spans(logprobs[:length], got.alignment).sum() == logprobs[: length - tail].sum()
        held_back.add(tail)
    assert held_back == {0, 1, 2, 3}


def test_a_token_that_straddles_the_cut_belongs_to_no_span() -> None:
    # Source tokens: "a", then " " with the first three bytes of an emoji. The receiver gets "a ", whose space is in no span.
    text = "a 😀".encode()[:-1]
    got = cut_off("char", text, np.array([1, 5]))
    assert TABLES["char"].bytes_of(got.ids) == b"a "
    assert got.alignment is not None
    assert got.alignment.group_a.tolist() == got.alignment.group_b.tolist() == [0, NO_GROUP]
    assert got.alignment.exact_b.tolist() == [True, False]
    assert got.residual == Residual(n_tokens=2, n_exact=1, n_groups=1, tail_bytes=3, tail_tokens=1)


def test_spans_before_a_cut_stay_as_they_were() -> None:
    text = CUT_TEXT.encode()
    ids = ENCODERS["byte_bpe"].encode(text)
    ends = TABLES["byte_bpe"].ends(ids)
    logprobs = -np.arange(1.0, len(ids) + 1)
    whole = cut_off("spm_bpe", text, ends).alignment
    assert whole is not None
    for count in range(1, len(ids)):
        part = cut_off("spm_bpe", text[: ends[count - 1]], ends[:count]).alignment
        assert part is not None
        common = np.intersect1d(whole.group_ends, part.group_ends)
        cumulative = [
            dict(zip(alignment.group_ends.tolist(), np.cumsum(sum_spans(values, alignment)).tolist(), strict=True))
            for alignment, values in ((whole, logprobs), (part, logprobs[:count]))
        ]
        assert [cumulative[0][end] for end in common] == [cumulative[1][end] for end in common]
        assert len(common) >= count / 2 - 2


@pytest.mark.parametrize("text", [b"a\xffb", b"a\x80", b"\xe4A"])
def test_invalid_bytes_that_are_no_tail_are_refused(text: bytes) -> None:
    with pytest.raises(TextError, match="not valid UTF-8, got byte"):
        cut_off("byte_bpe", text, None)


def test_a_finished_text_may_not_end_within_a_character() -> None:
    with pytest.raises(TextError, match="offset 1 of 3"):
        finished("byte_bpe", b"a\xe4\xb8")


@pytest.mark.parametrize("kind", KINDS)
@QUICK
@given(text=plain_texts(max_size=25), seed=st.integers(0, 99))
def test_non_canonical_source_segmentations_conserve(kind: str, text: str, seed: int) -> None:
    content = text.encode()
    rng = random.Random(seed)
    ends = np.array(sorted({*rng.sample(range(len(content)), len(content) // 2), len(content)} - {0}), np.int64)
    got = TRANSLATORS[kind].translate(content, ends, finished=True, source_has_eos=False, max_tokens=99)
    assert got.alignment is not None
    logprobs = [rng.uniform(-9, 0) for _ in ends]
    assert sum_spans(logprobs, got.alignment).sum() == pytest.approx(math.fsum(logprobs), rel=1e-9)
    assert (got.residual.struct == 0) == (got.ends[:-1].tolist() == ends.tolist())


def test_source_ends_that_do_not_cover_the_text_are_refused() -> None:
    with pytest.raises(AlignmentError, match="got 1 bytes in 1 source tokens and 2 bytes in 2 receiver tokens"):
        cut_off("char", b"ab", np.array([1]))
    with pytest.raises(AlignmentError, match=r"cover the text of 4 bytes, got \[2\]"):
        cut_off("char", "ab€".encode()[:4], np.array([1, 2]))


def test_roles_that_cannot_be_mapped_are_refused() -> None:
    with pytest.raises(RoleError, match="finished=False, source_has_eos=True"):
        TRANSLATORS["char"].translate(b"a", [1, 1], finished=False, source_has_eos=True, max_tokens=9)
    no_eos = Translator(ENCODERS["char"], TABLES["char"], eos_id=None)
    with pytest.raises(RoleError, match="eos_id=None"):
        no_eos.translate(b"a", [1], finished=True, source_has_eos=False, max_tokens=9)
    assert no_eos.translate(b"a", [1], finished=False, source_has_eos=False, max_tokens=9).ids.size == 1


def test_a_translator_of_two_tokenizers_or_a_foreign_end_is_refused() -> None:
    with pytest.raises(TableError, match="of one tokenizer"):
        Translator(ENCODERS["char"], TABLES["byte_bpe"], eos_id=EOS_ID)
    with pytest.raises(TableError, match="got eos_id=9999"):
        Translator(ENCODERS["char"], TABLES["char"], eos_id=9999)


def test_residuals_add_up() -> None:
    one = Residual(n_tokens=4, n_exact=1, n_groups=2, tail_bytes=1, tail_tokens=1)
    two = Residual(n_tokens=6, n_exact=4, n_groups=5, text_bytes=7)
    both = sum([one, two], start=Residual())
    assert both == Residual(n_tokens=10, n_exact=5, n_groups=7, text_bytes=7, tail_bytes=1, tail_tokens=1)
    assert [one.struct, two.struct, both.struct] == pytest.approx([0.75, 1 / 3, 0.5])
    assert Residual().struct == 0
