"""Token ends of texts whose tokens do not spell them: full coverage, no wrong cut, every byte counted."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tokenalign import Encoder, TableError, TokenTable
from tokenalign.spelling import Spelled
from tokenalign.testing import TOY_TOKENIZERS, byte_bpe_tokenizer, spm_bpe_tokenizer, texts

QUICK = settings(max_examples=15, deadline=None)


def normalising(normaliser: normalizers.Normalizer) -> Tokenizer:
    tokenizer = byte_bpe_tokenizer(("é", "한국", "fi", "...", "the", "e\u0301"))
    tokenizer.normalizer = normaliser
    return tokenizer


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", "hello", "world", "w", "##o", "##r", "##ld", "cafe", ",", "世"]
    tokenizer = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def without_a_byte() -> Tokenizer:
    """Its vocabulary lacks the byte 0xF1, as SmolLM2's does."""
    tree = json.loads(byte_bpe_tokenizer().to_str())
    del tree["model"]["vocab"]["\xf1"]
    return Tokenizer.from_str(json.dumps(tree))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    **TOY_TOKENIZERS,
    "nfc": lambda: normalising(normalizers.NFC()),
    "nfkc": lambda: normalising(normalizers.NFKC()),
    "spm_unk": lambda: spm_bpe_tokenizer(byte_fallback=False),
    "word_piece": word_piece,
    "missing_byte": without_a_byte,
}
ENCODERS = {name: Encoder(build()) for name, build in KINDS.items()}
FORMS: st.SearchStrategy[Literal["NFC", "NFD", "NFKC", "NFKD"]] = st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"])
MARKS = st.lists(
    st.sampled_from([*"aeqK \u0301\u0323\u0307ﬁ…½，\u212b", "한국", "▁", "世", "hello ", "world", "Wo"]), max_size=12
).map("".join)


@st.composite
def rewritten(draw: st.DrawFn) -> str:
    """Texts that a normaliser changes in many ways."""
    text = draw(texts(max_size=4) | MARKS)
    return unicodedata.normalize(draw(FORMS), text)


def one(kind: str, text: str) -> Spelled:
    return ENCODERS[kind].spell([text.encode()])


def cuts(spelled: Spelled) -> list[tuple[int, int]]:
    """Tokens before each cut and its byte offset: behind every token that spells its bytes or ends a stretch."""
    known = ~spelled.changed_mask | (np.diff(spelled.ends, prepend=0) > 0)
    return [(0, 0), *zip((np.flatnonzero(known) + 1).tolist(), spelled.ends[known].tolist(), strict=True)]


def check(encoder: Encoder, text: str, spelled: Spelled) -> None:
    content, joined = text.encode(), encoder.table.bytes_of(spelled.ids)
    assert spelled.ids.tolist() == encoder.encode(content).tolist()
    assert (np.diff(spelled.ends, prepend=0) >= 0).all()
    assert spelled.ends[-1:].tolist() == [len(content)][: len(spelled.ids)]
    changed, lost = int(spelled.changed_bytes[0]), int(spelled.lost_bytes[0])
    assert (changed + lost > 0) == (joined != content)
    assert changed + lost <= len(content)
    assert spelled.changed_mask.any() == (joined != content and len(spelled.ids) > 0)
    for (first, start), (last, end) in pairwise(cuts(spelled)):
        own = encoder.table.bytes_of(spelled.ids[first:last])
        if not spelled.changed_mask[first:last].any():
            assert own == content[start:end]


def missing_none(encoder: Encoder, text: str, spelled: Spelled, normalise: Callable[[str], str]) -> None:
    """Both sides of every cut are complete: the normalised text before it, and behind it, is what the tokens spell."""
    content = text.encode()
    for token, offset in cuts(spelled):
        if not 0 < offset < len(content) or content[offset] & 0xC0 == 0x80:
            continue
        for piece, ids in ((content[:offset], spelled.ids[:token]), (content[offset:], spelled.ids[token:])):
            assert encoder.table.bytes_of(ids) == normalise(piece.decode()).encode()


@pytest.mark.parametrize("kind", sorted(KINDS))
@QUICK
@given(text=rewritten())
def test_every_kind_covers_every_text(kind: str, text: str) -> None:
    check(ENCODERS[kind], text, one(kind, text))


NORMALISE: dict[str, Callable[[str], str]] = {
    "nfc": lambda text: unicodedata.normalize("NFC", text),
    "nfkc": lambda text: unicodedata.normalize("NFKC", text),
    "spm_bpe": lambda text: text.replace("▁", " "),
    "char": lambda text: "".join(c for c in text if c in "abcdefghijklmnopqrstuvwxyz0123456789 :<>/|_\n"),
}


@dataclass
class Tampered:
    """A clone whose character offsets are wrong in places."""

    clone: Tokenizer
    shifts: list[tuple[int, int, int]]
    ids: Any = None
    offsets: Any = None

    def encode(self, text: str, *, add_special_tokens: bool) -> Tampered:
        encoding = self.clone.encode(text, add_special_tokens=add_special_tokens)
        offsets = [list(pair) for pair in encoding.offsets]
        for token, side, shift in self.shifts:
            if offsets:
                pair = offsets[token % len(offsets)]
                pair[side] = min(max(pair[side] + shift, 0), len(text))
        return Tampered(self.clone, self.shifts, encoding.ids, offsets)


def tampered(kind: str, text: str, shifts: list[tuple[int, int, int]]) -> Spelled:
    speller = ENCODERS[kind]._speller
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speller, "_clone", Tampered(speller._clone, shifts))
        return one(kind, text)


SHIFTS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 1), st.integers(-3, 3)), max_size=2)


@pytest.mark.parametrize("kind", ["nfc", "nfkc", "spm_bpe"])
@QUICK
@given(text=MARKS, shifts=SHIFTS)
def test_no_cut_is_wrong_even_where_an_offset_is(kind: str, text: str, shifts: list[tuple[int, int, int]]) -> None:
    encoder, spelled = ENCODERS[kind], tampered(kind, text, shifts)
    check(encoder, text, spelled)
    missing_none(encoder, text, spelled, NORMALISE[kind])
    assert not spelled.lost_bytes.any()


@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
@pytest.mark.parametrize("token", range(4))
@pytest.mark.parametrize("text", ["hellothere山", "山hello the", "aab山ab"])
def test_no_cut_is_wrong_where_tokens_are_missing_too(text: str, token: int, shift: int) -> None:
    spelled = tampered("spm_unk", text, [(token, 0, shift)])
    check(ENCODERS["spm_unk"], text, spelled)
    missing_none(ENCODERS["spm_unk"], text, spelled, lambda piece: piece.replace("山", ""))


def test_offsets_that_drift_and_come_back() -> None:
    """Two wrong stretches with an accidental match of equal letters between them."""
    text = "qaaaaqe\u0301"
    spelled = tampered("nfc", text, [(2, 0, 1), (3, 0, 1), (4, 0, 1)])
    missing_none(ENCODERS["nfc"], text, spelled, NORMALISE["nfc"])
    assert spelled.ends.tolist() == [1, 2, 3, 4, 5, 6, 9]


def test_offsets_are_taken_with_the_space_before_a_word() -> None:
    tokenizer = byte_bpe_tokenizer((" fi",))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    spelled = Encoder(tokenizer).spell(["q \ufb01 \ufb01".encode()])
    assert (spelled.ends.tolist(), spelled.changed_mask.tolist()) == ([1, 5, 9], [False, True, True])


@QUICK
@given(text=st.text("ab c世界\U0001f600", max_size=12))
def test_cuts_around_unknown_characters(text: str) -> None:
    spelled = one("char", text)
    missing_none(ENCODERS["char"], text, spelled, NORMALISE["char"])
    unknown = sum(len(character.encode()) for character in text if character not in "ab c")
    assert (int(spelled.changed_bytes[0]), int(spelled.lost_bytes[0])) == (0, unknown)


@pytest.mark.parametrize(
    ("kind", "text", "ends", "changed_mask", "changed", "lost"),
    [
        # The accent, 2 bytes, is in no token's offsets and belongs to the letter that it was composed into.
        ("nfc", "e\u0301the", [3, 6], [1, 0], 3, 0),
        # Two marks that change places: no token of theirs has a place of its own.
        ("nfc", "q\u0307\u0323", [1, 1, 1, 1, 5], [0, 1, 1, 1, 1], 4, 0),
        # One character of the text for three of the tokens' bytes.
        ("nfkc", "q…q", [1, 4, 5], [0, 1, 0], 3, 0),
        # The token "fi" ends inside the text's ligature and an x.
        ("nfkc", "\ufb01the", [3, 6], [1, 0], 3, 0),
        ("spm_bpe", "a▁b", [1, 4, 5], [0, 1, 0], 3, 0),
        ("char", "a世界b", [1, 1, 7, 8], [0, 1, 1, 0], 0, 6),
        ("unigram", "世", [3], [1], 0, 3),
        ("word_piece", "Hello world", [6, 11], [1, 0], 1, 1),
        ("word_piece", "\u0301", [], [], 0, 2),
        ("byte_bpe", "", [], [], 0, 0),
        # T31: the other three bytes of the character have tokens.
        ("missing_byte", "a\U00040000b", [1, 1, 1, 5, 6], [0, 1, 1, 1, 0], 0, 1),
    ],
)
def test_by_hand(kind: str, text: str, ends: list[int], changed_mask: list[int], changed: int, lost: int) -> None:
    spelled = one(kind, text)
    assert spelled.ends.tolist() == ends
    assert spelled.changed_mask.tolist() == changed_mask
    assert (spelled.changed_bytes.tolist(), spelled.lost_bytes.tolist()) == ([changed], [lost])


@pytest.mark.parametrize("lead", ["", " ", "  ", "   ", "\t", "▁", " ▁"])
@pytest.mark.parametrize("kind", ["spm_bpe", "spm_unk", "unigram"])
def test_leading_blanks_are_kept_or_counted(kind: str, lead: str) -> None:
    """T32."""
    check(ENCODERS[kind], f"{lead}the", one(kind, f"{lead}the"))


@QUICK
@given(text=texts(max_size=15))
def test_lossless_tokenizers_lose_and_change_nothing(text: str) -> None:
    """T01, T23."""
    spelled, content = one("byte_bpe", text), text.encode()
    assert ENCODERS["byte_bpe"].table.bytes_of(spelled.ids) == content
    assert spelled.ends.tolist() == ENCODERS["byte_bpe"].table.ends(spelled.ids).tolist()
    assert not spelled.changed_mask.any() and not spelled.changed_bytes.any() and not spelled.lost_bytes.any()


@pytest.mark.parametrize("kind", ["nfc", "unigram"])
@QUICK
@given(batch=st.lists(rewritten(), max_size=3))
def test_a_batch_is_its_texts_one_by_one(kind: str, batch: list[str]) -> None:
    """T24."""
    spelled = ENCODERS[kind].spell([text.encode() for text in batch])
    assert spelled.cu.tolist()[-1] == len(spelled.ids)
    assert len(spelled.cu) == len(batch) + 1
    for n, text in enumerate(batch):
        alone, tokens = one(kind, text), slice(spelled.cu[n], spelled.cu[n + 1])
        assert spelled.ids[tokens].tolist() == alone.ids.tolist()
        assert spelled.ends[tokens].tolist() == alone.ends.tolist()
        assert spelled.changed_mask[tokens].tolist() == alone.changed_mask.tolist()
        assert (spelled.changed_bytes[n], spelled.lost_bytes[n]) == (alone.changed_bytes[0], alone.lost_bytes[0])


def test_a_table_narrower_than_the_vocabulary_is_an_error() -> None:
    tokenizer = byte_bpe_tokenizer()
    encoder = Encoder(tokenizer, table=TokenTable.from_tokenizer(tokenizer, vocab_size=100))
    with pytest.raises(TableError, match="outside the table"):
        encoder.spell(["世".encode()])
