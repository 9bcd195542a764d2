"""Transfer of traces: conservation, bounds, inclusion, and a small language model whose paths can be enumerated."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from tokenalign import (
    NO_GROUP,
    Alignment,
    AlignmentError,
    TokenTable,
    VocabularyMap,
    align,
    map_topk,
    mean_over_bytes,
    project_labels,
    project_mask,
    split_spans,
    straddling,
    sum_spans,
)

QUICK = settings(max_examples=60, deadline=None)
VALUES = st.floats(-50, 50)


@st.composite
def traces(draw: st.DrawFn) -> tuple[Alignment, np.ndarray]:
    """An alignment of two random segmentations of the same bytes, and values of the source tokens."""
    total = draw(st.integers(0, 30))
    sides = [sorted([*draw(st.lists(st.integers(0, total), max_size=15)), total]) for _ in range(2)]
    eos = draw(st.tuples(st.booleans(), st.booleans()))
    a, b = ([*ends, total] if flag else ends for ends, flag in zip(sides, eos, strict=True))
    values = draw(st.lists(VALUES, min_size=len(a), max_size=len(a)))
    return align(a, b, eos_a=eos[0], eos_b=eos[1]), np.array(values)


def overlapped(alignment: Alignment, token: int) -> list[int]:
    """Source tokens that share a byte with a receiver token; the end-of-sequence tokens are one byte behind the
    text."""

    def bounds(ends: np.ndarray, index: int, eos: bool) -> tuple[int, int]:
        if eos and index == len(ends) - 1:
            return int(ends[-1]), int(ends[-1]) + 1
        return (int(ends[index - 1]) if index else 0), int(ends[index])

    start, end = bounds(alignment.ends_b, token, bool(alignment.eos_b[0]))
    found = []
    for index in range(len(alignment.ends_a)):
        first, last = bounds(alignment.ends_a, index, bool(alignment.eos_a[0]))
        if max(first, start) < min(last, end):
            found.append(index)
    return found


def test_k_to_m_by_hand() -> None:
    # Bytes:     h e l l o _ w
    # Source:    [h e][l l][o][_ w]        ends 2 4 5 7, log-probs -1, -2, -4, -8
    # Receiver:  [h][e l l][o _][w]        ends 1 4 6 7
    # Common ends: 4 and 7. Group 0: 2 source tokens for 2 receiver tokens, -1 + -2 = -3. Group 1: 2 for 2, -4 + -8 = -12.
    alignment = align([2, 4, 5, 7], [1, 4, 6, 7])
    assert alignment.group_a.tolist() == [0, 0, 1, 1]
    assert alignment.group_b.tolist() == [0, 0, 1, 1]
    assert alignment.group_ends.tolist() == [4, 7]
    assert not alignment.exact_b.any()
    assert sum_spans([-1.0, -2.0, -4.0, -8.0], alignment).tolist() == [-3.0, -12.0]
    # Means: [h] lies in -1; [e l l] = (1 byte of -1 + 2 bytes of -2) / 3 = -5/3; [o _] = (-4 + -8) / 2 = -6; [w] = -8.
    assert mean_over_bytes([-1.0, -2.0, -4.0, -8.0], alignment).tolist() == pytest.approx([-1, -5 / 3, -6, -8], abs=1e-15)
    # Mask over [he] and [o]: [h] all and any; [e l l] any; [o _] any; [w] none.
    mask = [True, False, True, False]
    assert project_mask(mask, alignment, how="all").tolist() == [True, False, False, False]
    assert project_mask(mask, alignment, how="any").tolist() == [True, True, True, False]


@QUICK
@given(traces())
def test_sums_are_conserved_per_group_and_in_total(case: tuple[Alignment, np.ndarray]) -> None:
    alignment, values = case
    sums = sum_spans(values, alignment)
    assert sums.dtype == np.float64
    for group, got in enumerate(sums):
        assert got == pytest.approx(math.fsum(values[alignment.group_a == group]), rel=1e-9, abs=1e-12)
    assert sums.sum() == pytest.approx(math.fsum(values[alignment.group_a != NO_GROUP]), rel=1e-9, abs=1e-9)


@QUICK
@given(traces())
def test_only_an_unmatched_end_of_sequence_is_left_out(case: tuple[Alignment, np.ndarray]) -> None:
    alignment, _ = case
    if alignment.ends_a[-1] > 0:
        assert (alignment.group_a == NO_GROUP).sum() == (alignment.eos_a and not alignment.eos_b)
        assert (alignment.group_b == NO_GROUP).sum() == (alignment.eos_b and not alignment.eos_a)


@QUICK
@given(traces())
def test_means_lie_between_their_sources(case: tuple[Alignment, np.ndarray]) -> None:
    alignment, values = case
    for token, got in enumerate(mean_over_bytes(values, alignment)):
        sources = values[overlapped(alignment, token)]
        assert np.isnan(got) if not len(sources) else sources.min() <= got <= sources.max()


@QUICK
@given(traces(), VALUES)
def test_constants_stay_to_the_bit(case: tuple[Alignment, np.ndarray], constant: float) -> None:
    alignment, values = case
    means = mean_over_bytes(np.full_like(values, constant), alignment)
    assert set(means[~np.isnan(means)].tolist()) <= {constant}


@QUICK
@given(traces())
def test_the_integral_over_bytes_is_conserved(case: tuple[Alignment, np.ndarray]) -> None:
    alignment, values = case
    widths_a, widths_b = np.diff(alignment.ends_a, prepend=0), np.diff(alignment.ends_b, prepend=0)
    means = np.nan_to_num(mean_over_bytes(values, alignment))
    assert (means * widths_b).sum() == pytest.approx((values * widths_a).sum(), rel=1e-9, abs=1e-9)


@QUICK
@given(traces())
def test_masks_all_and_any(case: tuple[Alignment, np.ndarray]) -> None:
    alignment, values = case
    mask = values > 0
    every, some = (project_mask(mask, alignment, how="all"), project_mask(mask, alignment, how="any"))
    for token in range(len(alignment.group_b)):
        sources = mask[overlapped(alignment, token)].tolist()
        assert every[token] == (bool(sources) and all(sources))
        assert some[token] == any(sources)
    assert project_mask(np.zeros_like(mask), alignment, how="any").sum() == 0


@QUICK
@given(st.lists(st.tuples(st.integers(1, 9), VALUES), min_size=1, max_size=30))
def test_to_itself_is_the_identity_to_the_bit(tokens: list[tuple[int, float]]) -> None:
    ends = np.cumsum([width for width, _ in tokens])
    values = np.array([value for _, value in tokens])
    alignment = align(ends, ends)
    assert sum_spans(values, alignment).tolist() == values.tolist()
    assert mean_over_bytes(values, alignment).tolist() == values.tolist()
    assert project_mask(values > 0, alignment).tolist() == (values > 0).tolist()


@pytest.mark.slow
@QUICK
@given(traces(), st.sampled_from(["bytes", "uniform", "prior"]))
def test_a_split_keeps_totals_and_says_what_is_known(
    case: tuple[Alignment, np.ndarray], by: Literal["bytes", "uniform", "prior"]
) -> None:
    alignment, values = case
    sums = sum_spans(values, alignment)
    prior = -np.arange(1.0, len(alignment.group_b) + 1) if by == "prior" else None
    split = split_spans(sums, alignment, by=by, prior_b=prior)
    for group, total in enumerate(sums):
        own = alignment.group_b == group
        assert math.fsum(split.values[own]) == pytest.approx(total, rel=1e-9, abs=1e-9)
        assert split.known_mask[own].tolist() == [own.sum() == 1] * own.sum()
        assert (split.values[own] <= 0).all() or total > 0
        if own.sum() == 1:
            assert split.values[own] == total
    assert np.isnan(split.values[alignment.group_b == NO_GROUP]).all()
    assert not split.known_mask[alignment.group_b == NO_GROUP].any()


def test_splits_by_hand() -> None:
    # Source [abcd] with -8 and [e] with -1; receiver [a][bcd][e]. Group 0 holds two receiver tokens of 1 and 3 bytes.
    alignment = align([4, 5], [1, 4, 5])
    sums = sum_spans([-8.0, -1.0], alignment)
    assert split_spans(sums, alignment).values.tolist() == [-2, -6, -1]
    assert split_spans(sums, alignment, by="uniform").values.tolist() == [-4, -4, -1]
    # Prior -3 and -1 within the group: three quarters and one quarter of -8.
    assert split_spans(sums, alignment, by="prior", prior_b=[-3, -1, -7]).values.tolist() == [-6, -2, -1]
    assert split_spans(sums, alignment, by="prior", prior_b=[0, 0, 0]).values.tolist() == [-4, -4, -1]
    assert split_spans(sums, alignment).known_mask.tolist() == [False, False, True]


def test_splits_that_do_not_fit_are_refused() -> None:
    alignment = align([4, 5], [1, 4, 5])
    with pytest.raises(AlignmentError, match=r"got shape=\(3,\) for 2 groups"):
        split_spans([0, 0, 0], alignment)
    with pytest.raises(AlignmentError, match="got by='byte'"):
        split_spans([0, 0], alignment, by="byte")  # type: ignore[arg-type]
    with pytest.raises(AlignmentError, match="got how='most'"):
        project_mask([True, True], alignment, how="most")  # type: ignore[arg-type]
    with pytest.raises(AlignmentError, match="finite"):
        split_spans([0, 0], alignment, by="prior", prior_b=[-1, -np.inf, -1])
    with pytest.raises(AlignmentError, match=r"got shape=\(2, 1\)"):
        project_labels([[0], [1]], alignment)
    with pytest.raises(AlignmentError, match="prior_b=None"):
        split_spans([0, 0], alignment, by="prior")
    with pytest.raises(AlignmentError, match=r"one finite value per receiver token, got shape=\(2,\)"):
        split_spans([0, 0], alignment, by="prior", prior_b=[0, 0])


@pytest.mark.slow
@QUICK
@given(traces())
def test_several_sources_ride_one_alignment(case: tuple[Alignment, np.ndarray]) -> None:
    """Log-probs of several models, or advantages of several kinds: [A, K] is K times [A]."""
    alignment, values = case
    both = np.stack([values, -2 * values], axis=1)
    sums, means = sum_spans(both, alignment), mean_over_bytes(both, alignment)
    splits = split_spans(sums, alignment)
    for k, alone in enumerate((values, -2 * values)):
        assert sums[:, k].tolist() == sum_spans(alone, alignment).tolist()
        np.testing.assert_array_equal(means[:, k], mean_over_bytes(alone, alignment))
        np.testing.assert_array_equal(splits.values[:, k], split_spans(sums[:, k], alignment).values)


@pytest.mark.slow
@QUICK
@given(traces())
def test_labels_by_most_bytes(case: tuple[Alignment, np.ndarray]) -> None:
    alignment, values = case
    labels = (values / 20).astype(np.int64)
    got, mixed = project_labels(labels, alignment), straddling(labels, alignment)
    overlaps = alignment.overlaps
    for token in range(len(alignment.group_b)):
        held: dict[int, int] = {}
        for a, b, width in zip(
            overlaps.token_a,
            np.repeat(overlaps.owner, np.diff(overlaps.first, append=len(overlaps.token_a))),
            overlaps.bytes,
            strict=True,
        ):
            if b == token:
                held[int(labels[a])] = held.get(int(labels[a]), 0) + int(width)
        assert mixed[token] == (len(held) > 1)
        assert got[token] == -1 if not held else held[int(got[token])] == max(held.values())
    most = project_mask(values > 0, alignment, how="majority")
    assert (most <= project_mask(values > 0, alignment, how="any")).all()
    assert (most >= project_mask(values > 0, alignment, how="all")).all()


def test_single_precision_sums_accumulate_in_double() -> None:
    n = 100_000
    values = np.full(n, -0.1, np.float32)
    alignment = align(np.arange(1, n + 1), [n])
    assert sum_spans(values, alignment)[0] == pytest.approx(n * float(np.float32(-0.1)), rel=1e-9)


def test_a_trace_of_the_wrong_length_is_refused() -> None:
    alignment = align([2, 4], [4])
    for transfer in (sum_spans, mean_over_bytes, project_mask):
        with pytest.raises(AlignmentError, match=r"got shape=\(3,\) for 2 tokens"):
            transfer([1, 0, 1], alignment)


class ToyLM:
    """A first-order language model with random weights over the strings of a small vocabulary."""

    def __init__(self, seed: int) -> None:
        self.vocab = (b"a", b"b", b"ab", b"ba", b"aba")
        logits = np.random.default_rng(seed).normal(size=(len(self.vocab) + 1, len(self.vocab)))
        self.probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    def prob(self, path: tuple[int, ...]) -> float:
        """Probability of emitting the path, by multiplication."""
        return math.prod(float(self.probs[previous, token]) for previous, token in zip((-1, *path), path, strict=False))

    def paths(self, text: bytes) -> list[tuple[int, ...]]:
        """Every segmentation of a text."""
        if not text:
            return [()]
        heads = [index for index, piece in enumerate(self.vocab) if text.startswith(piece)]
        return [(index, *rest) for index in heads for rest in self.paths(text[len(self.vocab[index]) :])]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_span_sums_are_path_values_of_an_enumerable_model(seed: int) -> None:
    """For all pairs of segmentations: a group's sum is log P(path through the group) - log P(path before it)."""
    lm = ToyLM(seed)
    paths = lm.paths(b"abaab")
    ends = {path: np.cumsum([len(lm.vocab[token]) for token in path]) for path in paths}
    several = 0
    for source in paths:
        logprobs = [math.log(lm.probs[previous, token]) for previous, token in zip((-1, *source), source, strict=False)]
        for receiver in paths:
            alignment = align(ends[source], ends[receiver])
            sums = sum_spans(logprobs, alignment)
            for group, got in enumerate(sums):
                inside = np.flatnonzero(alignment.group_a == group)
                through, before = lm.prob(source[: inside[-1] + 1]), lm.prob(source[: inside[0]])
                assert got == pytest.approx(math.log(through / before), rel=1e-9)
                several += len(inside) > 1
            for token in np.flatnonzero(alignment.exact_b):
                position = int(np.flatnonzero(alignment.group_a == alignment.group_b[token])[0])
                assert source[position] == receiver[token]
                assert sums[alignment.group_b[token]] == logprobs[position]
            assert sums.sum() == pytest.approx(math.log(lm.prob(source)), rel=1e-9)
    assert several


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("receiver", [(b"a", b"b"), (b"b", b"a", b"ab")], ids=len)
def test_mapped_rows_are_conditionals_of_an_enumerable_model(seed: int, receiver: tuple[bytes, ...]) -> None:
    """T05: behind every path a mapped row is the probability that what the source goes on with begins so. Over single
    bytes that is the next byte's probability, by adding up all pairs of tokens."""
    lm = ToyLM(seed)
    tables = [table_of(vocab) for vocab in (lm.vocab, receiver)]
    mapped = map_topk(VocabularyMap.of(*tables), np.tile(np.arange(len(lm.vocab)), (6, 1)), np.log(lm.probs))
    for previous in range(-1, len(lm.vocab)):
        row = dict(zip(mapped.ids[previous].tolist(), mapped.probs[previous].tolist(), strict=True))
        begun = dict.fromkeys(receiver, 0.0)
        for first, second in itertools.product(range(len(lm.vocab)), repeat=2):
            text = lm.vocab[first] + (lm.vocab[second] if len(receiver) == 2 else b"")
            longest = max((piece for piece in receiver if text.startswith(piece)), key=len)
            begun[longest] += float(lm.probs[previous, first] * lm.probs[first, second])
        for token, piece in enumerate(receiver):
            assert row[token] == pytest.approx(begun[piece], rel=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_path_is_at_most_as_likely_as_its_bytes(seed: int) -> None:
    """T05: a span's sum is of the source's own tokens; other tokens of the same bytes add to the bytes' probability."""
    lm = ToyLM(seed)
    paths = lm.paths(b"abaab")
    whole = math.fsum(lm.prob(path) for path in paths)
    sums = [
        float(sum_spans([math.log(lm.probs[pair]) for pair in zip((-1, *path), path, strict=False)], one_group(lm, path))[0])
        for path in paths
    ]
    assert math.fsum(map(math.exp, sums)) == pytest.approx(whole, rel=1e-9)
    assert max(sums) < math.log(whole)


def one_group(lm: ToyLM, path: tuple[int, ...]) -> Alignment:
    ends = np.cumsum([len(lm.vocab[token]) for token in path])
    return align(ends, ends[-1:])


def table_of(vocab: tuple[bytes, ...]) -> TokenTable:
    return TokenTable.from_tokenizer(Tokenizer(models.WordLevel({piece.decode(): n for n, piece in enumerate(vocab)})))
