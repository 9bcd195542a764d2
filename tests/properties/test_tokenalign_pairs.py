"""What holds for every ordered pair of eight tokenizers in use, themselves included, for any text."""

from __future__ import annotations

import codecs
import math
import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers_in_use import (
    PAIRS,
    TOY_PAIRS,
    Crossing,
    crossed,
    encoder,
    eos_ids,
    lines_crossed,
    resegmented,
    spoken,
    translator,
)

from tokenalign import (
    NO_GROUP,
    TextError,
    TokenKind,
    Trace,
    TranslationError,
    align_batch,
    mean_over_bytes,
    noncanonical,
    project_mask,
    split_segments,
    split_spans,
    straddling,
    sum_spans,
)
from tokenalign.testing import plain_texts, texts

Property = Callable[[Crossing], None]
OF_ALL_BYTES = [pair for pair in TOY_PAIRS if {*pair} <= {"byte_bpe", "spm_bpe"}]
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


def content_of(trace: Trace, tail_bytes: int) -> bytes:
    return trace.text[: len(trace.text) - tail_bytes]


def covers(crossing: Crossing) -> None:
    """T01, T02, T13, T26, T31: ends rise to the whole text, one of everything per token, and what is counted is what
    differs; refused are bytes that are no UTF-8 where the receiver lacks a token for them, and texts without any token."""
    table = crossing.tables[1]
    for text, error in crossing.translation.errors.items():
        content = crossing.traces[text].text
        if isinstance(error, TranslationError):
            assert not len(encoder(crossing.receiver).encode(content)) and error.residual is not None
            assert error.residual.lost_bytes == len(content) > 0
        else:
            assert isinstance(error, TextError) and len(table.missing_bytes)
            with pytest.raises(UnicodeDecodeError):
                content.decode()
    for trace, got in crossing.accepted:
        content, residual = content_of(trace, got.residual.tail_bytes), got.residual
        assert got.alignment is not None and got.mask is not None
        assert len(got.ids) == len(got.ends) == len(got.mask) == len(got.alignment.group_b)
        assert (np.diff(got.ends, prepend=0) >= 0).all()
        spelled, counted = table.bytes_of(got.ids), residual.changed_bytes + residual.lost_bytes
        assert np.append(0, got.ends)[-1] == len(content)
        assert (counted > 0) == (spelled != content)
        assert counted <= len(content)
        if not counted:
            assert got.ends.tolist() == table.ends(got.ids).tolist()


def cuts_finest(crossing: Crossing) -> None:
    """T03: groups end at all ends that both sides have, by intersecting sets, and every token is in the group that holds
    its first byte."""
    for trace, got in crossing.accepted:
        alignment = got.alignment
        assert alignment is not None
        both_end = trace.has_eos and trace.finished
        ends = [list(map(int, np.asarray(trace.ends))), got.ends.tolist()]
        common = sorted((set(ends[0]) & set(ends[1])) - {0}) + ([len(trace.text)] if both_end else [])
        assert alignment.group_ends.tolist() == common
        cuts = common[:-1] if both_end else common
        for side, groups, last in zip(
            ends, (alignment.group_a, alignment.group_b), (trace.has_eos, trace.finished), strict=True
        ):
            contents = len(side) - last
            starts = np.array([0, *side[:-1]])[:contents]
            wide = np.diff(side[:contents], prepend=0) > 0
            expected = np.searchsorted(cuts, starts, side="right")
            assert groups[:contents][wide].tolist() == np.where(expected < len(cuts), expected, NO_GROUP)[wide].tolist()
            if last:
                assert groups[-1] == (len(cuts) if both_end else NO_GROUP)


def says_exact_of_equals_only(crossing: Crossing) -> None:
    """T05, T18: an exact token has the very bytes of one source token, and its span the very log-prob."""
    for trace, got in crossing.accepted:
        alignment = got.alignment
        assert alignment is not None and got.span_logprobs is not None and trace.logprobs is not None
        ids_a = crossing.ids[next(n for n, each in enumerate(crossing.traces) if each is trace)]
        table_a, table_b = crossing.tables
        for token in np.flatnonzero(alignment.exact_b):
            (source,) = np.flatnonzero(alignment.group_a == alignment.group_b[token])
            assert table_a.bytes_of(ids_a[source : source + 1]) == table_b.bytes_of(got.ids[token : token + 1])
            assert got.span_logprobs[alignment.group_b[token]] == np.asarray(trace.logprobs)[source]


def conserves_sums(crossing: Crossing) -> None:
    """T04: per group and in total, end of sequence included, of log-probs and of masked ones; splits keep them."""
    for trace, got in crossing.accepted:
        alignment, logprobs, mask = got.alignment, np.asarray(trace.logprobs), np.asarray(trace.mask)
        assert alignment is not None and got.span_logprobs is not None
        for values, sums in ((logprobs, got.span_logprobs), (logprobs * mask, sum_spans(logprobs * mask, alignment))):
            for group, total in enumerate(sums.tolist()):
                assert math.isclose(total, math.fsum(values[alignment.group_a == group]), rel_tol=1e-9)
            grouped = math.fsum(values[alignment.group_a != NO_GROUP])
            assert math.isclose(math.fsum(sums), grouped, rel_tol=1e-9)
            split = split_spans(sums, alignment).values
            assert math.isclose(math.fsum(split[alignment.group_b != NO_GROUP]), grouped, rel_tol=1e-9)
        left_out = (alignment.group_a == NO_GROUP).sum()
        assert left_out == got.residual.tail_tokens + (trace.has_eos and not trace.finished)


def transposes(crossing: Crossing) -> None:
    """T06."""
    there = crossing.translation.alignment
    assert there is not None
    open_end = [residual.tail_bytes > 0 for residual in crossing.translation.residuals]
    forth = align_batch(
        there.ends_a, there.cu_a, there.ends_b, there.cu_b, eos_a=there.eos_a, eos_b=there.eos_b, open_end=open_end
    )
    back = align_batch(
        there.ends_b, there.cu_b, there.ends_a, there.cu_a, eos_a=there.eos_b, eos_b=there.eos_a, open_end=open_end
    )
    assert (back.group_a == forth.group_b).all() and (back.group_b == forth.group_a).all()
    assert back.group_ends.tolist() == forth.group_ends.tolist()
    assert back.group_b[back.exact_b].tolist() == forth.group_b[forth.exact_b].tolist()
    assert back.overlaps.bytes.tolist() == forth.overlaps.bytes.tolist()


def keeps_itself(crossing: Crossing) -> None:
    """T07: to itself a tokenizer's own text stays as it is, with every token exact and every trace to the bit."""
    if crossing.source != crossing.receiver:
        return
    for (trace, got), own in zip(crossing.accepted, crossing.own, strict=True):
        if encoder(crossing.source).table.missing_bytes.size and not is_canonical(crossing.source, own):
            continue
        held = got.residual.tail_tokens
        assert got.ids[: len(got.ids) - trace.finished].tolist() == own[: len(own) - held].tolist()
        if not held:
            alignment, n_tokens = got.alignment, len(own) + trace.has_eos
            assert alignment is not None and got.mask is not None
            assert got.residual.struct == got.residual.changed_bytes == got.residual.lost_bytes == 0
            assert got.residual.n_exact == n_tokens
            logprobs = np.asarray(trace.logprobs)
            for values in (sum_spans(logprobs, alignment), mean_over_bytes(logprobs, alignment)):
                assert values[:n_tokens].tolist() == logprobs.tolist()
            assert got.mask[:n_tokens].tolist() == np.asarray(trace.mask).tolist()


def is_canonical(name: str, ids: np.ndarray) -> bool:
    try:
        return np.array_equal(encoder(name).encode(encoder(name).table.bytes_of(ids)), ids)
    except TextError:
        return False


def round_trips(crossing: Crossing) -> None:
    """T08: constants come back; what a text has become after one trip, and a split of its sums, stays so after another."""
    first_way = crossed(crossing.source, crossing.receiver, crossing.own[::4])
    once = first_way.to(crossing.source)
    twice = once.to(crossing.receiver).to(crossing.source)
    for text in range(len(once.traces)):
        if not any(text in trip.translation.errors for trip in (first_way, once, twice)):
            first, second = (trip.tables[1].bytes_of(trip.translation[text].ids) for trip in (once, twice))
            assert first == second
    there = crossing.translation.alignment
    assert there is not None
    open_end = [residual.tail_bytes > 0 for residual in crossing.translation.residuals]
    back = align_batch(
        there.ends_b, there.cu_b, there.ends_a, there.cu_a, eos_a=there.eos_b, eos_b=there.eos_a, open_end=open_end
    )
    constant = mean_over_bytes(np.full(len(there.ends_a), 0.1), there)
    constant[np.isnan(constant)] = 0.1
    returned = mean_over_bytes(constant, back)
    assert set(returned[~np.isnan(returned)].tolist()) <= {0.1}
    assert crossing.translation.span_logprobs is not None
    sums = crossing.translation.span_logprobs
    for _ in range(2):
        over_b = split_spans(sums, there).values
        over_a = split_spans(sum_spans(np.nan_to_num(over_b), back), back).values
        sums = sum_spans(np.nan_to_num(over_a), there)
        assert sums == pytest.approx(crossing.translation.span_logprobs, rel=1e-9)


def averages_over_bytes(crossing: Crossing) -> None:
    """T09, T10: by a value for every byte; means lie within those of their bytes and keep the integral, masks are "all"
    or "any" of their bytes, and no byte that was not trained is."""
    for trace, got in crossing.accepted:
        alignment, values, mask = got.alignment, np.asarray(trace.logprobs), np.asarray(trace.mask)
        assert alignment is not None and got.mask is not None
        means, any_mask = mean_over_bytes(values, alignment), project_mask(mask, alignment, how="any")
        crossing_mask = straddling(mask, alignment)
        assert got.mask.tolist() == project_mask(mask, alignment).tolist()
        reach = min(int(np.append(0, alignment.ends_a)[-1]), int(np.append(0, got.ends)[-1]))
        n_tokens = len(values) - trace.has_eos
        widths = np.diff(alignment.ends_a[:n_tokens], prepend=0)
        per_byte = np.repeat(np.arange(n_tokens), widths)[:reach]
        integral = 0.0
        for token, (start, end) in enumerate(pairwise([0, *got.ends.tolist()])):
            is_end = trace.finished and token == len(got.ids) - 1
            over = np.array([n_tokens] * trace.has_eos if is_end else per_byte[start:end], np.int64)
            if not len(over):
                assert np.isnan(means[token]) and not got.mask[token] and not any_mask[token]
                continue
            assert values[over].min() <= means[token] <= values[over].max()
            assert (got.mask[token], any_mask[token]) == (mask[over].all(), mask[over].any())
            assert crossing_mask[token] == (mask[over].any() and not mask[over].all())
            integral += 0.0 if is_end else float(means[token]) * len(over)
        assert math.isclose(integral, math.fsum(values[per_byte]), rel_tol=1e-9, abs_tol=1e-12)


def stays_whole_when_cut(crossing: Crossing) -> None:
    """T11: broken off behind any token a text is shorter, never other: no replacement character, at most 3 bytes held
    back and counted, and the same sums up to every end that both have."""
    by_bytes = sorted(
        zip(crossing.traces, crossing.own, strict=True), key=lambda each: sum(byte > 127 for byte in each[0].text)
    )
    for ids in [ids[:50] for _, ids in by_bytes[-2:]]:
        cuts = crossed(crossing.source, crossing.receiver, [ids[:count] for count in range(len(ids) + 1)], finished=False)
        values = -np.arange(1.0, len(ids) + 1)
        whole = cuts.translation.alignment if cuts.translation.errors else cuts.translation[len(ids)].alignment
        assert whole is not None
        for trace, got in cuts.accepted:
            alignment, tail = got.alignment, got.residual.tail_bytes
            assert alignment is not None and tail <= 3
            content = content_of(trace, tail)
            joined = cuts.tables[1].bytes_of(got.ids)
            if not got.residual.lost_bytes:
                assert joined.decode(errors="replace").count("\ufffd") == content.decode(errors="replace").count("\ufffd")
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            decoder.decode(trace.text)
            assert len(decoder.getstate()[0]) == tail
            if tail:
                assert got.residual.tail_tokens == (alignment.group_a == NO_GROUP).sum() >= 1
            if not cuts.translation.errors:
                both = np.intersect1d(alignment.group_ends, whole.group_ends)
                until = [
                    np.cumsum(sum_spans(values[: len(each.group_a)], each))[np.searchsorted(each.group_ends, both)]
                    for each in (alignment, whole)
                ]
                assert until[0].tolist() == until[1].tolist()


def takes_any_segmentation(crossing: Crossing) -> None:
    """T12: other tokens of the same bytes align and conserve as well, and are counted."""
    rng = random.Random(len(crossing.ids))
    own = crossing.own[::3]
    others = [resegmented(crossing.source, ids, rng) for ids in own]
    crossing_of_others = crossed(crossing.source, crossing.receiver, others)
    for body in (covers, cuts_finest, conserves_sums, says_exact_of_equals_only):
        body(crossing_of_others)
    for ids, other in zip(own[:20], others, strict=False):
        if is_canonical(crossing.source, ids):
            counted = noncanonical(encoder(crossing.source), other, has_eos=False)
            assert (counted.noncanonical_tokens > 0) == (other.tolist() != ids.tolist())
            assert counted.noncanonical_tokens >= counted.checked_tokens - len(ids)


def makes_no_control_tokens(crossing: Crossing) -> None:
    """T14, T15, T29: whatever a text spells, its only control token is the receiver's end of sequence, last, where the text
    is finished; any of the source's ends of sequence meets it in a group of their own."""
    table = crossing.tables[1]
    for trace, got in crossing.accepted:
        kinds = table.kinds[got.ids]
        at = np.flatnonzero(kinds == TokenKind.SPECIAL)
        assert at.tolist() == [len(got.ids) - 1] * trace.finished
        if trace.finished:
            assert got.ids[-1] == eos_ids(crossing.receiver)[-1]
        added = got.ids[kinds == TokenKind.ADDED]
        assert table.bytes_of(added).strip() == b""  # runs of blanks of Gemma's
        if trace.has_eos:
            assert got.alignment is not None
            assert got.alignment.group_a[-1] == got.alignment.group_b[-1] == len(got.alignment) - 1
            assert got.alignment.exact_b[-1]


def joins_segments(crossing: Crossing) -> None:
    """T16: cut where roles change, every seam is an end on both sides; bytes and sums are those of the joint text."""
    table = crossing.tables[1]
    for trace, got in crossing.accepted[::7]:
        labels = np.cumsum(np.arange(len(np.asarray(trace.ends))) % 5 == 4)
        segments = split_segments(trace, labels)
        apart = translator(crossing.receiver).translate_batch(segments, max_tokens=100_000)
        assert b"".join(segment.text for segment in segments) == trace.text
        if apart.errors:
            continue
        lost = apart.residual.changed_bytes + apart.residual.lost_bytes
        specials = table.kinds[apart.ids] == TokenKind.SPECIAL
        assert specials.sum() == sum(segment.finished for segment in segments)
        if not lost and not apart.residual.tail_bytes:
            assert table.bytes_of(apart.ids) == trace.text
            assert apart.ends[apart.cu[1:-1] - 1].tolist() == [len(segment.text) for segment in segments[:-1]]
        assert apart.span_logprobs is not None and got.span_logprobs is not None
        if not apart.residual.tail_bytes:
            assert math.isclose(math.fsum(apart.span_logprobs), math.fsum(got.span_logprobs), rel_tol=1e-9)


def is_its_texts_one_by_one(crossing: Crossing) -> None:
    """T24."""
    for trace, got in crossing.accepted[::9]:
        alone = translator(crossing.receiver).translate(trace, max_tokens=100_000)
        assert alone.residual == got.residual
        for one, other in (
            (alone.ids, got.ids),
            (alone.ends, got.ends),
            (alone.mask, got.mask),
            (alone.span_logprobs, got.span_logprobs),
        ):
            assert one is not None and other is not None and one.tolist() == other.tolist()


PROPERTIES: list[Property] = [
    covers,
    cuts_finest,
    says_exact_of_equals_only,
    conserves_sums,
    transposes,
    keeps_itself,
    round_trips,
    averages_over_bytes,
    stays_whole_when_cut,
    takes_any_segmentation,
    makes_no_control_tokens,
    joins_segments,
    is_its_texts_one_by_one,
]


at_every_pair = pytest.mark.parametrize("source, receiver", PAIRS)
each_property = pytest.mark.parametrize("holds", PROPERTIES, ids=lambda body: body.__name__)


def in_use(test: Callable[..., None]) -> Callable[..., None]:
    """Marks of tests over real tokenizers, which one worker loads for all of them."""
    for mark in (pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.xdist_group("tokenizers_in_use")):
        mark(test)
    return test


@st.composite
def toy_crossings(draw: st.DrawFn) -> Crossing:
    """Any text between toys that have tokens for all bytes, else texts that both can spell."""
    source, receiver = draw(st.sampled_from(OF_ALL_BYTES) | st.sampled_from(TOY_PAIRS))
    one = texts(max_size=8) if (source, receiver) in OF_ALL_BYTES else plain_texts(max_size=25)
    return crossed(source, receiver, spoken(source, draw(st.lists(one, min_size=1, max_size=3))))


@pytest.mark.slow
@each_property
@settings(max_examples=20, deadline=None, suppress_health_check=QUIET)
@given(crossing=toy_crossings())
def test_toys(holds: Property, crossing: Crossing) -> None:
    holds(crossing)


@in_use
@each_property
@at_every_pair
def test_mixed_text(source: str, receiver: str, holds: Property) -> None:
    holds(lines_crossed(source, receiver))


@in_use
@each_property
@at_every_pair
@settings(max_examples=5, deadline=None, suppress_health_check=QUIET)
@given(batch=st.lists(texts(max_size=12), min_size=1, max_size=3))
def test_any_text(source: str, receiver: str, holds: Property, batch: list[str]) -> None:
    holds(crossed(source, receiver, spoken(source, batch)))


@in_use
@pytest.mark.soak
@each_property
@settings(max_examples=1000, deadline=None, suppress_health_check=QUIET)
@given(pair=st.sampled_from(PAIRS), batch=st.lists(texts(max_size=12), min_size=1, max_size=3))
def test_any_text_at_length(pair: tuple[str, str], holds: Property, batch: list[str]) -> None:
    source, receiver = pair
    holds(crossed(source, receiver, spoken(source, batch)))
