"""Distributions across vocabularies: the map and the masses against plain Python, and what must never be mixed up."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from tokenalign.align import NO_GROUP, align
from tokenalign.encoder import Encoder
from tokenalign.errors import AlignmentError, TableError, TextError, TokenAlignError
from tokenalign.table import TokenKind, TokenTable
from tokenalign.testing import EOS_ID, TOY_TOKENIZERS, byte_bpe_tokenizer, id_of, plain_texts, spm_bpe_tokenizer
from tokenalign.topk import MappedRows, TopKMass, comparable, map_topk
from tokenalign.vocabulary_map import Match, VocabularyMap

QUICK = settings(max_examples=60, deadline=None)
TABLES = {name: TokenTable.from_tokenizer(build(), roles={"eos": [EOS_ID]}) for name, build in TOY_TOKENIZERS.items()}
ENCODERS = {name: Encoder(build()) for name, build in TOY_TOKENIZERS.items()}
PAIRS = [(a, b) for a in sorted(TOY_TOKENIZERS) for b in sorted(TOY_TOKENIZERS)]
MAPS = {(a, b): VocabularyMap.of(TABLES[a], TABLES[b]) for a, b in PAIRS}
Entry = tuple[TokenKind, bytes]


def made(entries: list[Entry], fingerprint: str, eos: tuple[int, ...] = ()) -> TokenTable:
    """A table of given kinds and spellings."""
    return TokenTable(
        blob=np.frombuffer(b"".join(token for _, token in entries), np.uint8),
        widths=np.array([len(token) for _, token in entries], np.int64),
        kinds=np.array([kind for kind, _ in entries], np.uint8),
        missing_bytes=np.zeros(0, np.uint8),
        losses=(),
        fingerprint=fingerprint,
        roles={"bos": frozenset(), "eos": frozenset(eos), "pad": frozenset(), "unk": frozenset()},
    )


def text(*tokens: bytes) -> list[Entry]:
    return [(TokenKind.TEXT, token) for token in tokens]


def entries() -> st.SearchStrategy[list[Entry]]:
    """Vocabularies over two byte values, with duplicates, special tokens and holes."""
    spelled = st.tuples(
        st.sampled_from([TokenKind.TEXT, TokenKind.TEXT, TokenKind.BYTE, TokenKind.ADDED]),
        st.text("ab", max_size=4).map(str.encode),
    )
    silent = st.sampled_from([(TokenKind.SPECIAL, b""), (TokenKind.HOLE, b"")])
    return st.lists(spelled | silent, min_size=1, max_size=12)


def spellings(table: TokenTable) -> list[bytes]:
    silent = (TokenKind.HOLE, TokenKind.SPECIAL)
    return [b"" if table.kind(token_id) in silent else table.bytes_of([token_id]) for token_id in range(len(table))]


def expected_matches(table_a: TokenTable, table_b: TokenTable, encoder: Encoder | None) -> list[tuple[int, Match]]:
    """By the definition: for every source token all receiver tokens are looked through."""
    order = [TokenKind.TEXT, TokenKind.ADDED, TokenKind.BYTE]
    spelled_b = spellings(table_b)
    matches = [expected_match(token, table_b, spelled_b, order, encoder) for token in spellings(table_a)]
    for token_id in table_a.roles["eos"] if table_b.roles["eos"] else ():
        matches[token_id] = (min(table_b.roles["eos"]), Match.EQUAL)
    return matches


def expected_match(
    token: bytes, table_b: TokenTable, spelled_b: list[bytes], order: list[TokenKind], encoder: Encoder | None
) -> tuple[int, Match]:
    candidates = [
        (len(begun), -order.index(table_b.kind(other)), -other)
        for other, begun in enumerate(spelled_b)
        if begun and token.startswith(begun)
    ]
    if not candidates:
        return -1, Match.NONE
    length, _, minus_id = max(candidates)
    if length == len(token):
        return -minus_id, Match.EQUAL
    if encoder is not None:
        try:
            begun = spelled_b[encoder.encode(token)[0]]
            _, _, minus_id = max(entry for entry in candidates if begun and entry[0] == len(begun))
        except (TextError, IndexError, ValueError):
            pass
    return -minus_id, Match.PREFIX


def expected_row(vmap: VocabularyMap, ids: list[int], logprobs: list[float]) -> tuple[dict[int, float], list[float]]:
    """Probability of each receiver id, and the masses equal, prefix, residual, tail."""
    onto: dict[int, list[float]] = {}
    masses: dict[int, list[float]] = {kind: [] for kind in Match}
    for token_id, logprob in zip(ids, logprobs, strict=True):
        if token_id >= 0:
            masses[vmap.match[token_id]].append(math.exp(logprob))
            onto.setdefault(int(vmap.to_b[token_id]), []).append(math.exp(logprob))
    onto.pop(-1, None)
    parts = [math.fsum(masses[kind]) for kind in (Match.EQUAL, Match.PREFIX, Match.NONE)]
    return {token_id: math.fsum(probs) for token_id, probs in onto.items()}, [*parts, 1 - math.fsum(parts)]


@st.composite
def rows(draw: st.DrawFn, width: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """A few rows of distinct ids below width, padded anywhere, with a tail."""
    n_rows, k = draw(st.integers(0, 4)), draw(st.integers(0, min(width, 8)))
    ids = np.array([draw(st.permutations(range(width)))[:k] for _ in range(n_rows)], np.int64).reshape(n_rows, k)
    logits = draw(st.lists(st.floats(-30, 0) | st.just(0.0), min_size=n_rows * (k + 1), max_size=n_rows * (k + 1)))
    weights = np.exp(np.array(logits).reshape(n_rows, k + 1))
    logprobs = np.log(weights / weights.sum(axis=1, keepdims=True))[:, :k]
    padding = np.array(draw(st.lists(st.booleans(), min_size=n_rows * k, max_size=n_rows * k)), bool).reshape(n_rows, k)
    return np.where(padding, -1, ids), np.where(padding, np.nan, logprobs)


def fields(mapped: MappedRows) -> list[bytes]:
    parts = (mapped.ids, mapped.probs, mapped.equal, mapped.prefix, mapped.residual, mapped.tail)
    return [part.tobytes() for part in parts]


def assert_as_expected(vmap: VocabularyMap, ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float64]) -> None:
    mapped = map_topk(vmap, ids, logprobs)
    assert mapped.ids.shape == mapped.probs.shape == ids.shape
    for row in range(len(ids)):
        onto, parts = expected_row(vmap, ids[row].tolist(), logprobs[row].tolist())
        got = dict(zip(mapped.ids[row, : len(onto)].tolist(), mapped.probs[row, : len(onto)].tolist(), strict=True))
        assert got == pytest.approx(onto, rel=1e-6)
        assert (mapped.ids[row, len(onto) :] == -1).all() and not mapped.probs[row, len(onto) :].any()
        assert list(got) == sorted(got, key=lambda token_id: (-got[token_id], token_id))
        assert [part[row] for part in (mapped.equal, mapped.prefix, mapped.residual, mapped.tail)] == pytest.approx(
            parts, abs=1e-9
        )
    total = mapped.equal + mapped.prefix + mapped.residual + mapped.tail
    assert total == pytest.approx(np.ones(len(ids)), abs=1e-6)
    assert mapped.probs.sum(axis=1) == pytest.approx(mapped.equal + mapped.prefix, abs=1e-6)


@pytest.mark.parametrize("name_a, name_b", [pair for pair in PAIRS if pair[0] != pair[1]])
@pytest.mark.parametrize("prefix", ["longest", "encoder"])
def test_every_toy_token_is_matched_as_defined(name_a: str, name_b: str, prefix: Literal["longest", "encoder"]) -> None:
    encoder = ENCODERS[name_b] if prefix == "encoder" else None
    vmap = VocabularyMap.of(TABLES[name_a], TABLES[name_b], prefix=prefix, encoder_b=encoder)
    assert vmap.prefix == prefix
    expected = expected_matches(TABLES[name_a], TABLES[name_b], encoder)
    assert list(zip(vmap.to_b.tolist(), vmap.match.tolist(), strict=True)) == expected


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_map_and_masses_of_any_vocabularies(data: st.DataObject) -> None:
    side_a, side_b = data.draw(entries()), data.draw(entries())
    table_a, table_b = made(side_a, "a"), made(side_b, "b")
    vmap = VocabularyMap.of(table_a, table_b)
    assert list(zip(vmap.to_b.tolist(), vmap.match.tolist(), strict=True)) == expected_matches(table_a, table_b, None)
    assert_as_expected(vmap, *data.draw(rows(len(side_a))))


@pytest.mark.parametrize("pair", PAIRS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_masses_between_toy_tokenizers(pair: tuple[str, str], data: st.DataObject) -> None:
    vmap = MAPS[pair]
    ids, logprobs = data.draw(rows(8))
    chosen = np.array(data.draw(st.lists(st.integers(0, len(vmap) - 1), min_size=8, max_size=8, unique=True)))
    assert_as_expected(vmap, np.where(ids < 0, ids, chosen[ids]), logprobs)


@QUICK
@given(data=st.data(), pair=st.sampled_from(PAIRS))
def test_the_order_of_entries_changes_no_bit(data: st.DataObject, pair: tuple[str, str]) -> None:
    vmap = MAPS[pair]
    ids = np.array([data.draw(st.lists(st.integers(0, len(vmap) - 1), min_size=24, max_size=24, unique=True))] * 2)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    logprobs = np.log(rng.dirichlet(np.ones(30), 2)[:, :24])
    ids[:, 20:] = -1
    order = rng.permuted(np.tile(np.arange(24), (2, 1)), axis=1)
    shuffled = map_topk(vmap, np.take_along_axis(ids, order, 1), np.take_along_axis(logprobs, order, 1))
    assert fields(shuffled) == fields(map_topk(vmap, ids, logprobs))


def test_a_sum_does_not_depend_on_the_order() -> None:
    """Ten tokens that begin with "1" come to one number, whichever comes first (in floats a + b + c has an order)."""
    source = made(text(*(f"1{digit}".encode() for digit in range(10))), "a")
    vmap = VocabularyMap.of(source, made(text(b"0", b"1"), "b"))
    rng = np.random.default_rng(0)
    ids, logprobs = np.arange(10), np.log(rng.dirichlet(np.ones(11) / 4)[:10] + 1e-12)
    reference = fields(map_topk(vmap, ids[None], logprobs[None]))
    for _ in range(30):
        order = rng.permutation(10)
        assert fields(map_topk(vmap, ids[None, order], logprobs[None, order])) == reference


def test_equal_tokenizers_map_to_themselves_whatever_their_width() -> None:
    tokenizer = spm_bpe_tokenizer()
    size = tokenizer.get_vocab_size()
    narrow, wide = (TokenTable.from_tokenizer(tokenizer, vocab_size=size + more) for more in (-2, 9))
    for table_a, table_b in ((narrow, wide), (wide, narrow), (wide, wide)):
        vmap = VocabularyMap.of(table_a, table_b)
        kept = min(len(table_a), len(table_b), size)
        assert vmap.to_b.tolist() == [*range(kept), *[-1] * (len(table_a) - kept)]
        assert vmap.match.tolist() == [Match.EQUAL] * kept + [Match.NONE] * (len(table_a) - kept)
    assert VocabularyMap.of(wide, wide).coverage().equal == 1
    ids, probs = np.array([[5, 300, 2, 7]]), np.array([[0.4, 0.3, 0.2, 0.05]])
    mapped = map_topk(VocabularyMap.of(narrow, wide), ids, np.log(probs))
    assert mapped.ids.tolist() == ids.tolist()
    assert mapped.probs == pytest.approx(probs, rel=1e-7)
    assert (mapped.equal[0], mapped.tail[0]) == pytest.approx((0.95, 0.05))
    hole = map_topk(VocabularyMap.of(wide, narrow), [[size + 3, 5]], np.log([[0.25, 0.5]]))
    assert (hole.ids.tolist(), hole.residual[0]) == ([[5, -1]], pytest.approx(0.25))


def test_digits_go_to_the_first_digit_and_nowhere_else() -> None:
    source, receiver = byte_bpe_tokenizer(["123", "45"]), byte_bpe_tokenizer([])
    tables = [TokenTable.from_tokenizer(tokenizer) for tokenizer in (source, receiver)]
    vmap = VocabularyMap.of(*tables)
    ids = [[id_of(source, piece) for piece in ("123", "1", "45")]]
    mapped = map_topk(vmap, ids, np.log([[0.5, 0.2, 0.1]]))
    assert mapped.ids.tolist() == [[id_of(receiver, "1"), id_of(receiver, "4"), -1]]
    assert mapped.probs == pytest.approx(np.array([[0.7, 0.1, 0]]))
    assert (mapped.equal[0], mapped.prefix[0]) == pytest.approx((0.2, 0.6))


def test_byte_piece_and_normal_piece_are_one() -> None:
    spm, byte_level = spm_bpe_tokenizer(), byte_bpe_tokenizer()
    piece, byte_piece, plain = id_of(spm, "a"), id_of(spm, "<0x61>"), id_of(byte_level, "a")
    assert MAPS["byte_bpe", "spm_bpe"].to_b[plain] == piece
    mapped = map_topk(MAPS["spm_bpe", "byte_bpe"], [[byte_piece, piece]], np.log([[0.25, 0.5]]))
    assert (mapped.ids.tolist(), mapped.probs.tolist()) == ([[plain, -1]], [[0.75, 0]])
    unchanged = map_topk(MAPS["spm_bpe", "spm_bpe"], [[byte_piece, piece]], np.log([[0.25, 0.5]]))
    assert unchanged.ids.tolist() == [[piece, byte_piece]]


def test_of_equal_tokens_a_normal_piece_is_preferred() -> None:
    kinds = (TokenKind.BYTE, TokenKind.ADDED, TokenKind.TEXT, TokenKind.TEXT)
    source = made(text(b"a"), "a")
    for n, chosen in ((4, 2), (2, 1), (1, 0)):
        assert VocabularyMap.of(source, made([(kind, b"a") for kind in kinds[:n]], "b")).to_b.tolist() == [chosen]


def test_tokens_that_decode_to_the_same_text_stay_apart() -> None:
    """The bytes above 127 all decode to U+FFFD."""
    spelled, spelled_b = spellings(TABLES["byte_bpe"]), spellings(TABLES["spm_bpe"])
    partial = [i for i, token in enumerate(spelled) if len(token) == 1 and token.decode(errors="replace") == "\ufffd"]
    mapped = map_topk(MAPS["byte_bpe", "spm_bpe"], [partial], [[math.log(1 / 128)] * 128])
    assert {spelled_b[i] for i in mapped.ids[0].tolist()} == {spelled[i] for i in partial}
    assert mapped.equal.tolist() == pytest.approx([1])


def test_special_tokens_are_matched_by_role_alone() -> None:
    special = (TokenKind.SPECIAL, b"")
    source = made([special, special, special, *text(b"x")], "a", eos=(1, 2))
    receiver = made([*text(b"x"), special, special, special], "b", eos=(3, 2))
    assert VocabularyMap.of(source, receiver).to_b.tolist() == [-1, 2, 2, 0]
    assert VocabularyMap.of(source, receiver, eos_id=3).to_b.tolist() == [-1, 3, 3, 0]
    assert VocabularyMap.of(source, receiver, roles=False).to_b.tolist() == [-1, -1, -1, 0]
    assert VocabularyMap.of(source, made(text(b"x"), "b")).to_b.tolist() == [-1, -1, -1, 0]
    assert VocabularyMap.of(source, receiver).match.tolist() == [Match.NONE, *[Match.EQUAL] * 3]
    ended = map_topk(VocabularyMap.of(source, receiver), [[2, 0, 1]], np.log([[0.25, 0.25, 0.5]]))
    assert (ended.ids.tolist(), ended.residual.tolist()) == ([[2, -1, -1]], [0.25])


def test_the_encoder_may_begin_with_less_than_the_longest_prefix() -> None:
    # Merges in order: u+e, a+l, al+u. "alue" is written al|ue; the longest token it begins with is "alu".
    receiver = byte_bpe_tokenizer(["ue", "alu"])
    table_a, table_b = TokenTable.from_tokenizer(byte_bpe_tokenizer(["alue"])), TokenTable.from_tokenizer(receiver)
    alue = id_of(byte_bpe_tokenizer(["alue"]), "alue")
    by_encoder = VocabularyMap.of(table_a, table_b, prefix="encoder", encoder_b=Encoder(receiver))
    assert by_encoder.to_b[alue] == id_of(receiver, "al")
    assert VocabularyMap.of(table_a, table_b).to_b[alue] == id_of(receiver, "alu")


def test_an_encoder_that_changes_the_text_does_not_choose() -> None:
    receiver = byte_bpe_tokenizer(["AB"])
    receiver.normalizer = normalizers.Lowercase()
    table_a, encoder = made(text(b"ABC"), "a"), Encoder(receiver)
    vmap = VocabularyMap.of(table_a, TokenTable.from_tokenizer(receiver), prefix="encoder", encoder_b=encoder)
    assert vmap.to_b.tolist() == [id_of(receiver, "AB")]


def test_map_is_read_only_and_counts_its_coverage_without_holes() -> None:
    source = made([*text(b"x", b"xy", b"z", b"q"), (TokenKind.HOLE, b"")], "a")
    vmap = VocabularyMap.of(source, made(text(b"x", b"z"), "b"))
    coverage = vmap.coverage()
    assert (coverage.equal, coverage.prefix, coverage.none) == (0.5, 0.25, 0.25)
    for array in (vmap.to_b, vmap.match):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_an_encoder_or_end_that_is_not_the_receivers_is_refused() -> None:
    a, b = TABLES["byte_bpe"], TABLES["spm_bpe"]
    with pytest.raises(TableError, match=r"needs `encoder_b` .* got fingerprint=None"):
        VocabularyMap.of(a, b, prefix="encoder")
    with pytest.raises(TableError, match=f"got fingerprint='{ENCODERS['char'].fingerprint}'; build"):
        VocabularyMap.of(a, b, prefix="encoder", encoder_b=ENCODERS["char"])
    with pytest.raises(TableError, match="outside the table"):
        VocabularyMap.of(a, b, eos_id=len(b))
    with pytest.raises(TableError, match="eos_id=0, a hole"):
        VocabularyMap.of(a, made([(TokenKind.HOLE, b"")], "b"), eos_id=0)


@pytest.mark.parametrize(
    "ids, logprobs, error, message",
    [
        ([[1, 2]], [[-1.0]], AlignmentError, r"ids.shape=\(1, 2\).*logprobs.shape=\(1, 1\)"),
        ([1, 2], [-1.0, -2.0], AlignmentError, r"ids.shape=\(2,\)"),
        ([[1.0]], [[-1.0]], AlignmentError, "ids.dtype=float64"),
        ([[1, 2], [3, 10_000]], [[-1.0] * 2] * 2, TableError, r"got ids\[1, 1\]=10000 for a table of"),
        ([[1, 2], [3, 4]], [[-1.0, -1.0], [math.nan, -1.0]], AlignmentError, r"got logprobs\[1, 0\]=nan for id 3"),
        ([[1, 2]], [[-1.0, 0.0011]], AlignmentError, r"got logprobs\[0, 1\]=0.0011 for id 2"),
        ([[1, 2], [3, 4]], [[-1.0, -1.0], [0.0, -6.9]], AlignmentError, r"got 1.001008 in row 1"),
        ([[1, 2, 3], [5, 4, 5]], [[-2.0] * 3] * 2, AlignmentError, "got id 5 twice in row 1"),
        ([[0, 4, 0]], [[-2.0] * 3], AlignmentError, "got id 0 twice in row 0"),
    ],
)
def test_broken_rows_are_refused(ids: list[int], logprobs: list[float], error: type[TokenAlignError], message: str) -> None:
    with pytest.raises(error, match=message):
        map_topk(MAPS["byte_bpe", "spm_bpe"], np.asarray(ids), np.asarray(logprobs))


def test_rounding_above_one_is_scaled_away() -> None:
    vmap = VocabularyMap.of(made(text(b"x", b"yx", b"q"), "a"), made(text(b"x", b"y"), "b"))
    mapped = map_topk(vmap, [[0, 1, 2], [0, -1, -1]], [[math.log(0.5), math.log(0.2), math.log(0.3005)], [0.001, 5.0, 0]])
    assert mapped.probs == pytest.approx(np.array([[0.5 / 1.0005, 0.2 / 1.0005, 0], [1, 0, 0]]))
    masses = [mapped.equal[0], mapped.prefix[0], mapped.residual[0]]
    assert masses == pytest.approx([0.5 / 1.0005, 0.2 / 1.0005, 0.3005 / 1.0005])
    assert (mapped.equal[1], mapped.tail.tolist()) == (1, [0, 0])


def test_impossible_entries_come_last_and_equal_ones_by_id() -> None:
    mapped = map_topk(MAPS["char", "char"], [[9, 4, 8, 5, -3]], [[-math.inf, math.log(0.25), -1.0, math.log(0.25), 0.0]])
    assert mapped.ids.tolist() == [[8, 4, 5, 9, -1]]
    assert mapped.probs[0, 3:].tolist() == [0, 0]


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (3, 0)])
def test_empty_blocks(shape: tuple[int, int]) -> None:
    mapped = map_topk(MAPS["char", "char"], np.zeros(shape, np.int32), np.zeros(shape))
    assert mapped.ids.shape == mapped.probs.shape == shape
    assert mapped.tail.tolist() == [1.0] * shape[0]


def test_masses_add_up() -> None:
    source = made(text(b"x", b"xy", b"q"), "a")
    vmap = VocabularyMap.of(source, made(text(b"x"), "b"))
    mapped = map_topk(vmap, [[0, 1, 2], [0, -1, -1]], np.log([[0.5, 0.25, 0.125], [1.0, 1.0, 1.0]]))
    masses = [mapped.mass.equal, mapped.mass.prefix, mapped.mass.residual, mapped.mass.tail]
    assert masses == pytest.approx([1.5, 0.25, 0.125, 0.125])
    some, more = TopKMass(rows=2, equal=1.5, prefix=0.25, residual=0.125, tail=0.125), TopKMass(not_comparable=3)
    total = TopKMass(rows=4, equal=3.0, prefix=0.5, residual=0.25, tail=0.25, not_comparable=3)
    assert mapped.mass.rows == 2
    assert some + more + some == total


def test_only_common_starts_are_comparable() -> None:
    # Source tokens start at 0, 2, 5, 9 (the end); receiver tokens at 0, 1, 2, 4, 9 (the end).
    first_a, first_b = comparable(align([2, 5, 9, 9], [1, 2, 4, 9, 9], eos_a=True, eos_b=True))
    assert (first_a.tolist(), first_b.tolist()) == ([0, 1, 3], [0, 2, 4])
    first_a, first_b = comparable(align([2, 5, 9, 9], [1, 2, 4, 9], eos_a=True))
    assert (first_a.tolist(), first_b.tolist()) == ([0, 1], [0, 2])
    assert [side.tolist() for side in comparable(align([], []))] == [[], []]


@pytest.mark.parametrize("name_a, name_b", PAIRS)
@settings(max_examples=8, deadline=None)
@given(plain=plain_texts(max_size=25))
def test_comparable_positions_start_at_the_same_byte(name_a: str, name_b: str, plain: str) -> None:
    ends = [TABLES[name].ends(ENCODERS[name].encode(plain.encode())) for name in (name_a, name_b)]
    alignment = align(*ends)
    starts = [np.concatenate([[0], side[:-1]])[: len(side)] for side in ends]
    first_a, first_b = comparable(alignment)
    common = sorted(set(starts[0].tolist()) & set(starts[1].tolist()))
    assert starts[0][first_a].tolist() == starts[1][first_b].tolist() == common
    assert NO_GROUP not in alignment.group_a[first_a]


def test_copies_of_a_map_are_read_only_too() -> None:
    vmap = MAPS["byte_bpe", "char"]
    for made in (pickle.loads(pickle.dumps(vmap)), copy.deepcopy(vmap)):
        assert (made.to_b.tolist(), made.match.tolist()) == (vmap.to_b.tolist(), vmap.match.tolist())
        assert not made.to_b.flags.writeable
        assert not made.match.flags.writeable


@pytest.mark.parametrize("width", [0, 1, 60, 200])
def test_a_receiver_table_narrower_than_its_encoder(width: int) -> None:
    """What the encoder begins with may be an id for which the model has no logit."""
    narrow = TokenTable.from_tokenizer(byte_bpe_tokenizer(), vocab_size=width)
    vmap = VocabularyMap.of(TABLES["unigram"], narrow, prefix="encoder", encoder_b=ENCODERS["byte_bpe"])
    assert vmap.to_b.max() < width
    assert vmap.to_b.tolist() == [to for to, _ in expected_matches(TABLES["unigram"], narrow, ENCODERS["byte_bpe"])]
