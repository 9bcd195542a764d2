"""Alignment against a brute-force oracle: groups, exactness, roles, symmetry, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenalign import NO_GROUP, Alignment, AlignmentError, Encoder, TokenTable, align, align_batch
from tokenalign.testing import TOY_TOKENIZERS, byte_bpe_tokenizer, plain_texts, spm_bpe_tokenizer

QUICK = settings(max_examples=60, deadline=None)
TABLES = {name: TokenTable.from_tokenizer(build()) for name, build in TOY_TOKENIZERS.items()}
ENCODERS = {name: Encoder(build()) for name, build in TOY_TOKENIZERS.items()}
PAIRS = [(a, b) for a in sorted(TOY_TOKENIZERS) for b in sorted(TOY_TOKENIZERS)]


@st.composite
def segmentations(draw: st.DrawFn) -> tuple[list[int], list[int], bool, bool]:
    """Ends of two segmentations of one byte string, zero-width tokens and end-of-sequence tokens among them."""
    total = draw(st.integers(0, 30))
    sides = []
    for _ in range(2):
        inner = draw(st.lists(st.integers(0, total), max_size=20))
        sides.append(sorted([*inner, *([total] if total else [])]))
    eos = draw(st.tuples(st.booleans(), st.booleans()))
    a, b = ([*ends, total] if flag else ends for ends, flag in zip(sides, eos, strict=True))
    return a, b, *eos


def brute_force(ends_a: list[int], ends_b: list[int]) -> list[int]:
    """All positive offsets that are ends on both sides."""
    return sorted((set(ends_a) & set(ends_b)) - {0})


def covered(ends: list[int], groups: np.ndarray, group: int) -> set[int]:
    """Byte positions that the tokens of a group cover."""
    starts = [0, *ends[:-1]]
    return {byte for s, e, g in zip(starts, ends, groups, strict=True) if g == group for byte in range(s, e)}


def fields(alignment: Alignment) -> list[list[int]]:
    return [alignment.group_a.tolist(), alignment.group_b.tolist(), alignment.group_ends.tolist()]


@QUICK
@given(segmentations())
def test_groups_are_the_finest_common_cut(case: tuple[list[int], list[int], bool, bool]) -> None:
    ends_a, ends_b, eos_a, eos_b = case
    alignment = align(ends_a, ends_b, eos_a=eos_a, eos_b=eos_b)
    content_a, content_b = ends_a[: len(ends_a) - eos_a], ends_b[: len(ends_b) - eos_b]
    cuts = brute_force(content_a, content_b)
    role_group = [cuts[-1] if cuts else 0] if eos_a and eos_b else []
    assert alignment.group_ends.tolist() == cuts + role_group
    for group, (start, end) in enumerate(zip([0, *cuts], cuts, strict=False)):
        expected = set(range(start, end))
        assert covered(ends_a, alignment.group_a, group) == expected
        assert covered(ends_b, alignment.group_b, group) == expected


@QUICK
@given(segmentations())
def test_zero_width_tokens_join_the_group_that_starts_there(case: tuple[list[int], list[int], bool, bool]) -> None:
    ends_a, ends_b, eos_a, eos_b = case
    alignment = align(ends_a, ends_b, eos_a=eos_a, eos_b=eos_b)
    cuts = brute_force(ends_a, ends_b)
    content = ends_a[: len(ends_a) - eos_a]
    for start, end, group in zip([0, *content], content, alignment.group_a, strict=False):
        if start == end:
            behind = [index for index, cut in enumerate(cuts) if cut > start]
            assert group == (behind[0] if behind else len(cuts) - 1)


@QUICK
@given(segmentations())
def test_exact_means_one_token_each_side_with_equal_bytes(case: tuple[list[int], list[int], bool, bool]) -> None:
    ends_a, ends_b, eos_a, eos_b = case
    alignment = align(ends_a, ends_b, eos_a=eos_a, eos_b=eos_b)
    for group, exact in zip(alignment.group_b.tolist(), alignment.exact_b.tolist(), strict=True):
        sizes = [int((side == group).sum()) for side in (alignment.group_a, alignment.group_b)]
        assert exact == (group != NO_GROUP and sizes == [1, 1])
        if exact:
            assert covered(ends_a, alignment.group_a, group) == covered(ends_b, alignment.group_b, group)


@QUICK
@given(segmentations())
def test_transpose(case: tuple[list[int], list[int], bool, bool]) -> None:
    ends_a, ends_b, eos_a, eos_b = case
    one = align(ends_a, ends_b, eos_a=eos_a, eos_b=eos_b)
    other = align(ends_b, ends_a, eos_a=eos_b, eos_b=eos_a)
    assert fields(one) == [fields(other)[1], fields(other)[0], fields(other)[2]]
    assert sorted(one.group_b[one.exact_b]) == sorted(other.group_b[other.exact_b])


@QUICK
@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.booleans())
def test_with_itself_everything_is_exact(widths: list[int], eos: bool) -> None:
    ends = [*np.cumsum(widths).tolist()]
    ends += ends[-1:] if eos else []
    alignment = align(ends, ends, eos_a=eos, eos_b=eos)
    assert alignment.exact_b.all()
    assert alignment.group_a.tolist() == alignment.group_b.tolist() == list(range(len(ends)))


@pytest.mark.parametrize("kind_a, kind_b", PAIRS)
@settings(max_examples=10, deadline=None)
@given(text=plain_texts(max_size=25))
def test_real_pairs_cut_at_every_common_end(kind_a: str, kind_b: str, text: str) -> None:
    ids_a, ids_b = (ENCODERS[kind].encode(text.encode()) for kind in (kind_a, kind_b))
    ends_a, ends_b = TABLES[kind_a].ends(ids_a), TABLES[kind_b].ends(ids_b)
    alignment = align(ends_a, ends_b)
    assert alignment.group_ends.tolist() == brute_force(ends_a.tolist(), ends_b.tolist())
    for group in range(len(alignment)):
        sides = (TABLES[kind_a].bytes_of(ids_a[alignment.group_a == group]), ids_b[alignment.group_b == group])
        assert sides[0] == TABLES[kind_b].bytes_of(sides[1])


@pytest.mark.parametrize("bos_a", [0, 1])
def test_a_bos_on_one_side_does_not_collapse_the_groups(bos_a: int) -> None:
    text = b"hello there reverse the def ing hello there the end of a plain line"
    a, b = (TokenTable.from_tokenizer(t) for t in (byte_bpe_tokenizer(), spm_bpe_tokenizer()))
    ids_a = [1] * bos_a + Encoder(byte_bpe_tokenizer()).encode(text).tolist()
    ids_b = Encoder(spm_bpe_tokenizer()).encode(text).tolist()
    alignment = align(a.ends(ids_a), b.ends(ids_b))
    assert len(alignment) >= 0.8 * min(len(ids_a), len(ids_b))
    assert alignment.group_a[0] == 0


def test_emoji_split_within_characters() -> None:
    text = "👩\u200d👩 世界".encode()
    single_bytes = np.arange(1, len(text) + 1)
    a = TABLES["byte_bpe"]
    alignment = align(a.ends(ENCODERS["byte_bpe"].encode(text)), single_bytes)
    assert covered(single_bytes.tolist(), alignment.group_b, len(alignment) - 1) <= set(range(len(text)))
    assert alignment.group_b[-1] == len(alignment) - 1
    assert alignment.group_ends[-1] == len(text)


def test_one_sided_end_of_sequence_has_no_group() -> None:
    alignment = align([2, 3, 3], [1, 3], eos_a=True)
    assert fields(alignment) == [[0, 0, NO_GROUP], [0, 0], [3]]
    alignment = align([2, 3], [1, 3, 3], eos_b=True)
    assert fields(alignment) == [[0, 0], [0, 0, NO_GROUP], [3]]
    assert not alignment.exact_b.any()


def test_empty_texts() -> None:
    assert fields(align([], [])) == [[], [], []]
    both = align([0], [0], eos_a=True, eos_b=True)
    assert fields(both) == [[0], [0], [0]]
    assert both.exact_b.tolist() == [True]
    assert fields(align([0, 0], [0], eos_a=True, eos_b=True)) == [[NO_GROUP, 0], [0], [0]]
    assert fields(align([], [0], eos_b=True)) == [[], [NO_GROUP], []]


def test_open_end_leaves_what_follows_the_last_common_end() -> None:
    # Source: 0-2, 2-5, 5-9 (runs past byte 7, where the receiver's text breaks off); receiver: 0-1, 1-2, 2-5, 5-6, 6-7.
    alignment = align([2, 5, 9], [1, 2, 5, 6, 7], open_end=True)
    assert fields(alignment) == [[0, 1, NO_GROUP], [0, 0, 1, NO_GROUP, NO_GROUP], [2, 5]]
    assert alignment.exact_b.tolist() == [False, False, True, False, False]


def test_unequal_totals_are_refused_with_both() -> None:
    with pytest.raises(AlignmentError, match="got 5 bytes in 2 source tokens and 4 bytes in 1 receiver tokens"):
        align([2, 5], [4])


@pytest.mark.parametrize(
    "ends, eos, message",
    [
        ([3, 2], False, r"never fall, got ends_a\[1\]=2"),
        ([-1, 2], False, r"got ends_a\[0\]=-1"),
        ([2, 3], True, "`eos_a` says .* got width 1"),
        ([], True, "got no token"),
    ],
)
def test_broken_ends_are_refused(ends: list[int], eos: bool, message: str) -> None:
    with pytest.raises(AlignmentError, match=message):
        align(ends, [3], eos_a=eos)


def test_ends_of_a_wrong_shape_or_type_are_refused() -> None:
    with pytest.raises(AlignmentError, match="dtype=float64"):
        align([1.0], [1])
    with pytest.raises(AlignmentError, match=r"shape=\(1, 1\)"):
        align([1], [[1]])


def test_offsets_beyond_32_bits() -> None:
    shift = 2**33
    alignment = align([shift, shift + 4], [shift + 1, shift + 4])
    assert alignment.group_ends.tolist() == [shift + 4]


Row = tuple[list[int], list[int], bool, bool, bool]


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    """Texts with and without end-of-sequence tokens, open ends and empty texts among them."""
    rows = []
    for ends_a, ends_b, eos_a, eos_b in draw(st.lists(segmentations(), max_size=6)):
        is_open = not (eos_a or eos_b) and draw(st.booleans())
        cut = draw(st.integers(0, len(ends_b))) if is_open else len(ends_b)
        rows.append((ends_a, ends_b[:cut], eos_a, eos_b, is_open))
    return rows


def align_rows(rows: list[Row]) -> Alignment:
    cu_a, cu_b = np.cumsum([0, *(len(row[0]) for row in rows)]), np.cumsum([0, *(len(row[1]) for row in rows)])
    a, b = [end for row in rows for end in row[0]], [end for row in rows for end in row[1]]
    eos_a, eos_b, open_end = ([row[field] for row in rows] for field in (2, 3, 4))
    return align_batch(np.array(a, int), cu_a, np.array(b, int), cu_b, eos_a=eos_a, eos_b=eos_b, open_end=open_end)


@pytest.mark.slow
@QUICK
@given(batches())
def test_a_batch_is_its_texts_one_by_one(rows: list[Row]) -> None:
    whole = align_rows(rows)
    for text, (ends_a, ends_b, eos_a, eos_b, is_open) in enumerate(rows):
        alone, part = align(ends_a, ends_b, eos_a=eos_a, eos_b=eos_b, open_end=is_open), whole[text]
        assert fields(part) == fields(alone)
        assert part.exact_b.tolist() == alone.exact_b.tolist()
        assert part.overlaps.bytes.tolist() == alone.overlaps.bytes.tolist()
    assert len(whole) == sum(len(whole[text]) for text in range(len(rows)))


@pytest.mark.slow
@QUICK
@given(batches())
def test_a_batch_shares_no_byte_between_texts(rows: list[Row]) -> None:
    whole = align_rows(rows)
    overlaps = whole.overlaps
    text_of = [np.repeat(np.arange(len(rows)), np.diff(cu)) for cu in (whole.cu_a, whole.cu_b)]
    assert text_of[0][overlaps.token_a].tolist() == text_of[1][overlaps.token_b].tolist()
    expected = [min((a or [0])[-1] + eos_a, (b or [0])[-1] + eos_b) for a, b, eos_a, eos_b, _ in rows]
    shared = np.bincount(text_of[1][overlaps.token_b], weights=overlaps.bytes, minlength=len(rows))
    assert shared.tolist() == expected
    assert (overlaps.bytes > 0).all()


def test_a_batch_names_the_text_at_fault() -> None:
    with pytest.raises(AlignmentError, match="got 3 bytes in 1 source tokens and 2 bytes in 1 receiver tokens of text 1"):
        align_rows([([1], [1], False, False, False), ([3], [2], False, False, False)])
    with pytest.raises(AlignmentError, match="last token of text 1 is an end-of-sequence token of width 0, got no token"):
        align_rows([([1], [1], False, False, False), ([], [2], True, False, False)])
    with pytest.raises(AlignmentError, match=r"`cu_a` must rise from 0 to the 2 tokens in 2 numbers, got \[0, 3\]"):
        align_batch([1, 2], [0, 3], [2], [0, 1], eos_a=[False], eos_b=[False], open_end=[False])
    with pytest.raises(AlignmentError, match="got 1 and 2 with 1 open_end"):
        align_batch([1], [0, 1], [1], [0, 1, 1], eos_a=[False], eos_b=[False] * 2, open_end=[False])


def test_an_open_end_has_no_end_of_sequence() -> None:
    with pytest.raises(AlignmentError, match="open_end=True"):
        align([2, 2], [2], eos_a=True, open_end=True)
