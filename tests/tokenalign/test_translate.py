"""Translation: roles, round trip, tails, limits and the residual."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from tokenalign import (
    NO_GROUP,
    AlignmentError,
    Encoder,
    Limits,
    Residual,
    RoleError,
    TableError,
    TextError,
    TokenTable,
    TooLongError,
    Trace,
    Translation,
    TranslationError,
    Translator,
    sum_spans,
)
from tokenalign.testing import EOS_ID, TOY_TOKENIZERS, byte_bpe_tokenizer, char_tokenizer, plain_texts, texts

QUICK = settings(max_examples=20, deadline=None)
TABLES = {name: TokenTable.from_tokenizer(build()) for name, build in TOY_TOKENIZERS.items()}
ENCODERS = {name: Encoder(build()) for name, build in TOY_TOKENIZERS.items()}
TRANSLATORS = {name: Translator(ENCODERS[name], eos_id=EOS_ID) for name in TOY_TOKENIZERS}
KINDS = sorted(TOY_TOKENIZERS)
PAIRS = [(a, b) for a in KINDS for b in KINDS]


def source_ends(kind: str, text: bytes, *, eos: bool) -> np.ndarray:
    ids = ENCODERS[kind].encode(text).tolist()
    return TABLES[kind].ends([*ids, EOS_ID] if eos else ids)


def finished(kind: str, text: bytes, ends: np.ndarray | None = None, *, max_tokens: int = 10_000) -> Translation:
    trace = Trace(text=text, ends=ends, finished=True, has_eos=ends is not None)
    return TRANSLATORS[kind].translate(trace, max_tokens=max_tokens)


def cut_off(kind: str, text: bytes, ends: np.ndarray | None) -> Translation:
    trace = Trace(text=text, ends=ends, finished=False, has_eos=False)
    return TRANSLATORS[kind].translate(trace, max_tokens=10_000)


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
        ends = source_ends(kind, text.encode(), eos=eos)
        trace = Trace(text=text.encode(), ends=ends, finished=True, has_eos=eos, mask=np.ones(len(ends), bool))
        got = TRANSLATORS[kind].translate(trace, max_tokens=99)
        tokens, n_bytes = len(got.ids) - (not eos), len(text.encode())
        all_exact = Residual(
            n_tokens=tokens, n_exact=tokens, n_groups=tokens, one_to_one=tokens, n_bytes=n_bytes, exact_bytes=n_bytes
        )
        assert got.residual == all_exact
        assert got.residual.struct == 0


@pytest.mark.parametrize("is_finished", [True, False])
def test_end_of_sequence_iff_finished(is_finished: bool) -> None:
    got = TRANSLATORS["char"].translate(Trace(text=b"ab", ends=None, finished=is_finished, has_eos=False), max_tokens=9)
    assert (got.ids == EOS_ID).sum() == is_finished
    assert len(got.ends) == len(got.ids)
    assert got.alignment is None
    assert got.residual == Residual()


def test_an_end_of_sequence_that_the_source_lacks_has_no_group_and_is_no_loss() -> None:
    got = TRANSLATORS["char"].translate(Trace(text=b"ab", ends=[1, 2], finished=True, has_eos=False), max_tokens=9)
    assert got.alignment is not None
    assert got.alignment.group_b.tolist() == [0, 1, NO_GROUP]
    assert (got.residual.n_tokens, got.residual.n_exact, got.residual.role_tokens) == (2, 2, 0)


def test_empty_text() -> None:
    got = finished("byte_bpe", b"", np.array([0]))
    assert (got.ids.tolist(), got.ends.tolist()) == ([EOS_ID], [0])
    assert got.residual == Residual(n_tokens=1, n_exact=1, n_groups=1, one_to_one=1)
    assert cut_off("byte_bpe", b"", np.array([], np.int64)).ids.tolist() == []


@pytest.mark.parametrize("kind", KINDS)
@QUICK
@given(text=texts(max_size=12))
def test_any_text_is_spelled_or_counted(kind: str, text: str) -> None:
    content = text.encode()
    anything = Translator(ENCODERS[kind], eos_id=EOS_ID, limits=Limits(max_lost_bytes=None))
    got = anything.translate(Trace(text=content, ends=None, finished=True, has_eos=False), max_tokens=10_000)
    lost = got.residual.lost_bytes + got.residual.changed_bytes
    assert (TABLES[kind].bytes_of(got.ids) == content) == (lost == 0)
    assert lost <= len(content)
    if TABLES[kind].lossless:
        assert lost == 0
    if got.residual.lost_bytes:
        with pytest.raises(TranslationError, match=f"got lost_bytes={got.residual.lost_bytes} with max_lost_bytes=0") as caught:
            finished(kind, content)
        assert caught.value.residual == got.residual


@pytest.mark.parametrize(
    "kind, text, lost, changed",
    [("char", "abÖc", 2, 0), ("unigram", "aÖÖ", 4, 0), ("spm_bpe", "a▁b", 0, 3), ("char", "ab\tc", 1, 0)],
)
def test_what_the_vocabulary_lacks_is_counted(kind: str, text: str, lost: int, changed: int) -> None:
    anything = Translator(ENCODERS[kind], eos_id=EOS_ID, limits=Limits(max_lost_bytes=None))
    trace = Trace(text=text.encode(), ends=np.arange(1, len(text.encode()) + 1), finished=True, has_eos=False)
    residual = anything.translate(trace, max_tokens=99).residual
    assert (residual.lost_bytes, residual.changed_bytes) == (lost, changed)


def test_a_composing_normaliser_changes_only_what_it_composes() -> None:
    tokenizer = byte_bpe_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    encoder = Encoder(tokenizer)
    text = "xe\u0301y".encode()
    trace = Trace(text=text, ends=np.arange(1, len(text) + 1), finished=True, has_eos=False, logprobs=-np.ones(len(text)))
    got = Translator(encoder, eos_id=EOS_ID).translate(trace, max_tokens=9)
    assert encoder.table.bytes_of(got.ids) == "xéy".encode()
    assert (got.residual.changed_bytes, got.residual.lost_bytes) == (3, 0)
    assert got.alignment is not None and got.span_logprobs is not None
    # x and y are exact; the accent's three bytes are one span of the source's path, and no token of it is exact.
    assert got.span_logprobs.tolist() == [-1, -3, -1]
    assert got.alignment.exact_b.tolist() == [True, *[False] * (len(got.ids) - 3), True, False]
    strict = Translator(encoder, eos_id=EOS_ID, limits=Limits(max_changed_bytes=2))
    with pytest.raises(TranslationError, match=r"got changed_bytes=3 with max_changed_bytes=2 .*NFC"):
        strict.translate(trace, max_tokens=9)
    composed = Trace(text="xé".encode(), ends=None, finished=True, has_eos=False)
    assert strict.translate(composed, max_tokens=9).residual.changed_bytes == 0


def test_a_text_without_any_token_is_refused_whatever_the_limits() -> None:
    tokenizer = char_tokenizer("ab")
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    translator = Translator(Encoder(tokenizer), eos_id=EOS_ID, limits=Limits(max_lost_bytes=None))
    for is_finished in (True, False):
        with pytest.raises(TranslationError, match="no token of the receiver") as caught:
            translator.translate(Trace(text=b"  ", ends=[1, 2], finished=is_finished, has_eos=False), max_tokens=9)
        assert caught.value.residual == Residual(lost_bytes=2)


def test_rows_can_be_refused_by_structure() -> None:
    """A source of single bytes to a receiver that merges some of them."""
    strict = Translator(ENCODERS["byte_bpe"], eos_id=EOS_ID, limits=Limits(max_struct=0.4))
    few = Trace(text=b"xyz qq hello", ends=np.arange(1, 13), finished=False, has_eos=False)
    assert strict.translate(few, max_tokens=99).residual.struct == pytest.approx(1 / 8)
    with pytest.raises(TranslationError, match=r"got struct=0\.5 with max_struct=0\.4"):
        strict.translate(Trace(text=b" hello", ends=np.arange(1, 7), finished=False, has_eos=False), max_tokens=99)


def test_too_long_is_refused_and_never_cut() -> None:
    text = b"abcdef"
    assert len(finished("char", text, max_tokens=7).ids) == 7
    with pytest.raises(TooLongError, match="got 7 tokens with max_tokens=6"):
        finished("char", text, max_tokens=6)
    with pytest.raises(TooLongError, match="got 6 tokens with max_tokens=5"):
        TRANSLATORS["char"].translate(Trace(text=text, ends=None, finished=False, has_eos=False), max_tokens=5)


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
    assert got.residual == Residual(
        n_tokens=2, n_exact=1, n_groups=1, one_to_one=1, n_bytes=1, exact_bytes=1, tail_bytes=3, tail_tokens=1
    )


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


STRAY = [b"a\xffb", b"a\x80", b"\xe4A", b"a\xe4\xb8", b"\xf0\x9f\x98\xe4\xb8\x96\xff"]


@pytest.mark.parametrize("text", STRAY)
@pytest.mark.parametrize("kind", ["byte_bpe", "spm_bpe"])
def test_stray_bytes_become_byte_tokens(kind: str, text: bytes) -> None:
    ends = np.arange(1, len(text) + 1)
    got = finished(kind, text, np.append(ends, ends[-1]))
    assert TABLES[kind].bytes_of(got.ids) == text
    assert got.ends.tolist() == TABLES[kind].ends(got.ids).tolist()
    assert (got.residual.lost_bytes, got.residual.tail_bytes) == (0, 0)


@pytest.mark.parametrize("text", STRAY)
def test_stray_bytes_without_a_token_are_refused_with_the_offset(text: bytes) -> None:
    offset = len(text.decode(errors="surrogateescape").split("\udc80"[0])[0])
    with pytest.raises(TextError, match=r"has no token for the byte, got 0x[89a-f][0-9a-f] at offset \d+ of"):
        finished("char", text)
    assert offset <= len(text)


@given(st.binary(max_size=30), st.booleans())
@QUICK
def test_any_bytes_translate_to_a_byte_level_receiver(text: bytes, is_finished: bool) -> None:
    trace = Trace(text=text, ends=np.arange(1, len(text) + 1), finished=is_finished, has_eos=False)
    got = TRANSLATORS["byte_bpe"].translate(trace, max_tokens=99)
    held = got.residual.tail_bytes
    assert held <= (0 if is_finished else 3)
    assert TABLES["byte_bpe"].bytes_of(got.ids) == text[: len(text) - held]
    if held:
        assert "unexpected end of data" in decode_error(text[len(text) - held :])


def decode_error(text: bytes) -> str:
    with pytest.raises(UnicodeDecodeError) as caught:
        text.decode()
    return caught.value.reason


@pytest.mark.parametrize("kind", KINDS)
@QUICK
@given(text=plain_texts(max_size=25), seed=st.integers(0, 99))
def test_non_canonical_source_segmentations_conserve(kind: str, text: str, seed: int) -> None:
    content = text.encode()
    rng = random.Random(seed)
    ends = np.array(sorted({*rng.sample(range(len(content)), len(content) // 2), len(content)} - {0}), np.int64)
    got = TRANSLATORS[kind].translate(Trace(text=content, ends=ends, finished=True, has_eos=False), max_tokens=99)
    assert got.alignment is not None
    logprobs = [rng.uniform(-9, 0) for _ in ends]
    assert sum_spans(logprobs, got.alignment).sum() == pytest.approx(math.fsum(logprobs), rel=1e-9)
    assert (got.residual.struct == 0) == (got.ends[:-1].tolist() == ends.tolist())


def test_source_ends_that_do_not_cover_the_text_are_refused() -> None:
    with pytest.raises(AlignmentError, match="cover the text of 2 bytes, got 1 as the last end"):
        cut_off("char", b"ab", np.array([1]))
    with pytest.raises(AlignmentError, match="cover the text of 4 bytes, got 2 as the last end"):
        cut_off("char", "ab€".encode()[:4], np.array([1, 2]))


def test_roles_that_cannot_be_mapped_are_refused() -> None:
    with pytest.raises(RoleError, match="finished=False, has_eos=True"):
        TRANSLATORS["char"].translate(Trace(text=b"a", ends=[1, 1], finished=False, has_eos=True), max_tokens=9)
    no_eos = Translator(ENCODERS["char"], eos_id=None)
    with pytest.raises(RoleError, match="eos_id=None"):
        no_eos.translate(Trace(text=b"a", ends=[1], finished=True, has_eos=False), max_tokens=9)
    assert no_eos.translate(Trace(text=b"a", ends=[1], finished=False, has_eos=False), max_tokens=9).ids.size == 1


def test_a_foreign_end_of_sequence_is_refused() -> None:
    with pytest.raises(TableError, match="got eos_id=9999"):
        Translator(ENCODERS["char"], eos_id=9999)
