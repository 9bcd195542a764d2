"""Tables: every id's bytes, for every kind of tokenizer, and refusals."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tokenalign import Encoder, TableError, TokenKind, TokenTable, errors
from tokenalign.pieces import byte_stand_ins
from tokenalign.testing import (
    EOS_ID,
    THINK,
    TOY_TOKENIZERS,
    byte_bpe_tokenizer,
    char_tokenizer,
    id_of,
    plain_texts,
    spm_bpe_tokenizer,
    texts,
    unigram_tokenizer,
)

QUICK = settings(max_examples=30, deadline=None)
TABLES = {name: TokenTable.from_tokenizer(build()) for name, build in TOY_TOKENIZERS.items()}
ENCODERS = {name: Encoder(build()) for name, build in TOY_TOKENIZERS.items()}
KINDS = sorted(TOY_TOKENIZERS)
MIXED = (Path(__file__).parent.parent / "data" / "mixed200.txt").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
@QUICK
@given(text=plain_texts())
def test_joined_bytes_are_the_text(kind: str, text: str) -> None:
    ids = ENCODERS[kind].encode(text.encode())
    assert TABLES[kind].bytes_of(ids) == text.encode()


@QUICK
@given(text=texts())
def test_a_lossless_tokenizer_spells_any_text(text: str) -> None:
    assert TABLES["byte_bpe"].lossless
    assert TABLES["byte_bpe"].bytes_of(ENCODERS["byte_bpe"].encode(text.encode())) == text.encode()


@pytest.mark.parametrize("kind", ["byte_bpe", "spm_bpe"])
def test_mixed_text_line_by_line(kind: str) -> None:
    lines = MIXED.split(b"\n")
    different = [line for line in lines if TABLES[kind].bytes_of(ENCODERS[kind].encode(line)) != line]
    marked = [line for line in lines if "▁".encode() in line]
    assert different == ([] if kind == "byte_bpe" else marked)


@pytest.mark.parametrize("kind", KINDS)
@QUICK
@given(data=st.data())
def test_ends_partition_the_bytes_of_any_ids(kind: str, data: st.DataObject) -> None:
    table = TABLES[kind]
    known = np.flatnonzero(table.kinds != TokenKind.HOLE)
    ids = data.draw(st.lists(st.sampled_from(known.tolist()), max_size=30))
    ends = table.ends(ids)
    widths = np.diff(ends, prepend=0)
    pieces = [table.bytes_of([token_id]) for token_id in ids]
    assert widths.tolist() == [len(piece) for piece in pieces]
    assert table.bytes_of(ids) == b"".join(pieces)
    assert (ends[-1] if len(ends) else 0) == len(b"".join(pieces))
    for token_id, width in zip(ids, widths, strict=True):
        if width == 0:
            assert table.kind(token_id) is TokenKind.SPECIAL


def test_bytes_of_every_kind_of_piece() -> None:
    spm = spm_bpe_tokenizer()
    table = TokenTable.from_tokenizer(spm)
    by_piece = {
        "▁the": (b" the", TokenKind.TEXT),
        "<0x0A>": (b"\n", TokenKind.BYTE),
        "<0xF0>": (b"\xf0", TokenKind.BYTE),
        "😀": ("😀".encode(), TokenKind.TEXT),
        THINK: (b"<think>", TokenKind.ADDED),
        "<eos>": (b"", TokenKind.SPECIAL),
        "<unk>": (b"", TokenKind.SPECIAL),
    }
    for piece, (spelled, kind) in by_piece.items():
        token_id = id_of(spm, piece)
        assert (table.bytes_of([token_id]), table.kind(token_id)) == (spelled, kind), piece


def test_byte_pieces_are_bytes_even_where_no_text_becomes_them() -> None:
    tokenizer = spm_bpe_tokenizer(byte_fallback=False)
    assert TokenTable.from_tokenizer(tokenizer).bytes_of([id_of(tokenizer, "<0x0A>")]) == b"\n"


def test_the_unknown_token_spells_nothing_though_no_one_called_it_special() -> None:
    by_name = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    by_id = Tokenizer(models.Unigram([("a", -1.0), ("?", 0.0)], 1, False))
    for tokenizer in (by_name, by_id):
        table = TokenTable.from_tokenizer(tokenizer)
        assert (table.kind(1), table.bytes_of([0, 1])) == (TokenKind.SPECIAL, b"a")


def test_added_space_runs_are_spaces() -> None:
    tokenizer = spm_bpe_tokenizer()
    tokenizer.add_tokens([AddedToken("▁▁▁")])
    table = TokenTable.from_tokenizer(tokenizer)
    assert table.bytes_of([id_of(tokenizer, "▁▁▁")]) == b"   "


def test_byte_piece_and_equal_text_piece_stay_two_ids() -> None:
    tokenizer = spm_bpe_tokenizer()
    table = TokenTable.from_tokenizer(tokenizer)
    both = [id_of(tokenizer, "<0x61>"), id_of(tokenizer, "a")]
    assert both[0] != both[1]
    assert table.bytes_of(both) == b"aa"
    assert table.ends(both).tolist() == [1, 2]
    assert [table.kind(token_id) for token_id in both] == [TokenKind.BYTE, TokenKind.TEXT]


def test_padded_logits_are_holes_and_a_narrow_head_cuts_the_vocabulary() -> None:
    """T19."""
    tokenizer = byte_bpe_tokenizer()
    size = tokenizer.get_vocab_size()
    padded = TokenTable.from_tokenizer(tokenizer, vocab_size=size + 10)
    narrow = TokenTable.from_tokenizer(tokenizer, vocab_size=size - 1)
    ids = Encoder(tokenizer).encode(b"hello there")
    assert (len(padded), len(narrow)) == (size + 10, size - 1)
    assert padded.kind(size) is TokenKind.HOLE
    assert padded.bytes_of(ids) == narrow.bytes_of(ids) == b"hello there"
    assert padded.fingerprint == narrow.fingerprint
    with pytest.raises(TableError, match=rf"a hole.*ids\[1\]={size + 3} .* {size + 10} ids"):
        padded.ends([5, size + 3])
    with pytest.raises(TableError, match=rf"outside the table, got ids\[0\]={size - 1} "):
        narrow.bytes_of([size - 1])


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_foreign_ids_are_refused_with_position_and_size(bad: int) -> None:
    table = TABLES["char"]
    with pytest.raises(TableError, match=rf"got ids\[2\]={bad} for a table of {len(table)} ids"):
        table.bytes_of([4, 5, bad])
    with pytest.raises(TableError, match=f"={bad} "):
        table.kind(bad)


def test_ids_that_are_no_row_of_integers_are_refused() -> None:
    with pytest.raises(TableError, match=r"shape=\(1, 2\)"):
        TABLES["char"].ends([[4, 5]])
    with pytest.raises(TableError, match="dtype=float64"):
        TABLES["char"].ends([4.0])
    assert TABLES["char"].ends([]).tolist() == []
    assert TABLES["char"].bytes_of([]) == b""


def test_a_table_is_read_only() -> None:
    for array in (TABLES["char"].blob, TABLES["char"].offsets, TABLES["char"].kinds):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def copies(original: object) -> list[object]:
    return [pickle.loads(pickle.dumps(original)), copy.deepcopy(original), copy.copy(original)]


def test_copies_of_a_table_are_equal_and_read_only_too() -> None:
    table = TokenTable.from_tokenizer(byte_bpe_tokenizer(), roles={"eos": [2]})
    for made in copies(table):
        assert isinstance(made, TokenTable)
        for field in dataclasses.fields(TokenTable):
            value, expected = getattr(made, field.name), getattr(table, field.name)
            assert np.array_equal(value, expected) if isinstance(expected, np.ndarray) else value == expected
            assert not isinstance(value, np.ndarray) or not value.flags.writeable
        with pytest.raises(TypeError):
            made.roles["eos"] = frozenset()  # type: ignore[index]


@pytest.mark.parametrize("vocab_size", [-1, -5, 2**24 + 1, 10**12])
def test_a_width_that_no_model_has_is_refused(vocab_size: int) -> None:
    with pytest.raises(TableError, match=rf"got vocab_size={vocab_size};"):
        TokenTable.from_tokenizer(char_tokenizer(), vocab_size=vocab_size)


def test_only_a_full_byte_alphabet_without_normaliser_is_lossless() -> None:
    assert {kind: table.lossless for kind, table in TABLES.items()} == {
        "byte_bpe": True,
        "spm_bpe": False,
        "char": False,
        "unigram": False,
    }
    composed = byte_bpe_tokenizer()
    composed.normalizer = normalizers.NFC()
    assert not TokenTable.from_tokenizer(composed).lossless
    dropping = byte_bpe_tokenizer()
    dropping.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert not TokenTable.from_tokenizer(dropping).lossless
    words = Tokenizer(models.WordLevel(byte_stand_ins(), unk_token=chr(0xC0)))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert not TokenTable.from_tokenizer(words).lossless


@pytest.mark.parametrize("byte, lossless", [("A", False), ("ÿ", True)])
def test_a_missing_byte_counts_only_where_a_text_can_hold_it(byte: str, lossless: bool) -> None:
    definition = json.loads(byte_bpe_tokenizer(words=["xy"]).to_str())
    del definition["model"]["vocab"][byte]
    definition["added_tokens"] = []
    table = TokenTable.from_tokenizer(Tokenizer.from_str(json.dumps(definition)))
    assert table.lossless is lossless


def test_losses_say_in_words_what_is_not_kept() -> None:
    """T31: bytes without a token are told, not turned into an unknown token in silence."""
    definition = json.loads(byte_bpe_tokenizer(words=["xy"]).to_str())
    for piece in "AB\u0100":
        del definition["model"]["vocab"][piece]
    definition["added_tokens"] = []
    definition["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}
    table = TokenTable.from_tokenizer(Tokenizer.from_str(json.dumps(definition)))
    assert table.losses == (
        "replaces compatibility characters (NFKC)",
        "makes letters small",
        "has no token for 3 bytes of valid UTF-8: 0x00 0x41 0x42",
    )
    assert table.missing_bytes.tolist() == [0, 0x41, 0x42]
    assert TABLES["spm_bpe"].losses == ("reads U+2581 as a space",)
    assert TABLES["char"].losses == ("has an unknown token",)
    assert TABLES["unigram"].losses == ("reads U+2581 as a space", "has an unknown token")
    read_by_its_decoder = char_tokenizer()
    read_by_its_decoder.decoder = decoders.Metaspace()
    assert TokenTable.from_tokenizer(read_by_its_decoder).losses == ("reads U+2581 as a space", "has an unknown token")
    assert 0xFF in TABLES["char"].missing_bytes
    assert ord("a") not in TABLES["char"].missing_bytes


@pytest.mark.parametrize(
    "normalizer, losses",
    [
        (normalizers.Replace("a", "b"), ["replaces 'a' by 'b'"]),
        (normalizers.Replace(" ", "▁"), ["reads U+2581 as a space"]),
        (normalizers.Strip(), ["drops spaces at the ends of a text"]),
        (normalizers.StripAccents(), ["drops accents"]),
        (normalizers.NFD(), ["decomposes characters (NFD)"]),
        (normalizers.Nmt(), ["drops control characters"]),
        (normalizers.Prepend("x"), []),
    ],
)
def test_every_normaliser_that_changes_a_text_is_a_loss(normalizer: normalizers.Normalizer, losses: list[str]) -> None:
    tokenizer = byte_bpe_tokenizer()
    tokenizer.normalizer = normalizer
    table = TokenTable.from_tokenizer(tokenizer)
    assert list(table.losses) == losses
    assert table.lossless == (losses == [])


def test_widths_are_the_lengths_of_all_ids() -> None:
    for table in TABLES.values():
        assert table.widths.tolist() == [len(table.bytes_of([token_id])) for token_id in range(len(table))]
        assert table.offsets.tolist() == [0, *np.cumsum(table.widths)]
        assert len(table.blob) == table.offsets[-1]


def test_roles_are_ids_of_the_table() -> None:
    """T19: what the logits do not reach has no role; T29: a role may have several ids."""
    table = TokenTable.from_tokenizer(byte_bpe_tokenizer(), vocab_size=200, roles={"eos": [2, 0, 200], "pad": ()})
    assert table.roles == {"bos": set(), "eos": {0, 2}, "pad": set(), "unk": set()}
    assert TABLES["char"].roles["unk"] == {id_of(char_tokenizer(), "<unk>")}
    with pytest.raises(TableError, match=r"got \['EOS'\]; the roles are bos, eos, pad, unk"):
        TokenTable.from_tokenizer(byte_bpe_tokenizer(), roles={"EOS": [2]})


def test_a_piece_with_other_characters_than_stand_ins_spells_itself() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "Ġé b": 1, "": 2, "世": 3, "Ġ": 4}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    table = TokenTable.from_tokenizer(tokenizer)
    spelled = [table.bytes_of([token_id]) for token_id in range(5)]
    assert spelled == [b"a", "Ġé b".encode(), b"", "世".encode(), b" "]


def test_ids_may_be_of_any_integer_type_and_layout() -> None:
    ids = np.arange(200)
    expected = TABLES["byte_bpe"].ends(ids).tolist()
    for dtype in (np.uint8, np.int32, np.uint64):
        assert TABLES["byte_bpe"].ends(ids.astype(dtype)).tolist() == expected
    assert TABLES["byte_bpe"].ends(np.repeat(ids, 2)[::2]).tolist() == expected
    with pytest.raises(TableError, match=r"ids\[1\]=18446744073709551615 "):
        TABLES["byte_bpe"].ends(np.array([0, 2**64 - 1], dtype=np.uint64))


def test_word_pieces_spell_what_follows_their_mark() -> None:
    word_piece = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "##": 3}, unk_token="[UNK]"))
    word_piece.normalizer = normalizers.BertNormalizer()
    word_piece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    table = TokenTable.from_tokenizer(word_piece)
    assert [table.bytes_of([token_id]) for token_id in range(4)] == [b"", b"a", b"b", b"##"]
    assert table.losses == (
        "drops control characters",
        "drops spaces between words",
        "makes letters small",
        "drops accents",
        "has an unknown token",
    )


def test_special_tokens_anywhere_have_no_width() -> None:
    tokenizer = char_tokenizer()
    ids = [id_of(tokenizer, piece) for piece in ("<bos>", "a", "<pad>", "b", "<eos>")]
    table = TokenTable.from_tokenizer(tokenizer)
    assert table.ends(ids).tolist() == [0, 1, 1, 2, 2]
    assert table.bytes_of(ids) == b"ab"
    assert ids[-1] == EOS_ID


def test_unigram_pieces_spell_spaces() -> None:
    tokenizer = unigram_tokenizer()
    assert TokenTable.from_tokenizer(tokenizer).bytes_of([id_of(tokenizer, "▁the")]) == b" the"


def test_errors_survive_pickling() -> None:
    leaves = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TokenAlignError)]
    assert len(leaves) > 5
    for kind in leaves:
        copy = pickle.loads(pickle.dumps(kind("no")))
        assert (type(copy), str(copy)) == (kind, "no")
        assert kind is errors.TokenAlignError or issubclass(kind, ValueError)
