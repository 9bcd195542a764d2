"""Encoding of completions: text stays text, no prefix, no truncation, clear refusals."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from tokenalign import Encoder, TableError, TextError, TokenKind, TokenTable
from tokenalign.testing import (
    SPECIALS,
    THINK,
    TOY_TOKENIZERS,
    byte_bpe_tokenizer,
    id_of,
    spm_bpe_tokenizer,
    texts,
    unigram_tokenizer,
)

QUICK = settings(max_examples=20, deadline=None)
TABLES = {name: TokenTable.from_tokenizer(build()) for name, build in TOY_TOKENIZERS.items()}
ENCODERS = {name: Encoder(build()) for name, build in TOY_TOKENIZERS.items()}
# Added ids, the unknown token excepted: it is what a vocabulary without the character gives.
ADDED = {
    name: {token_id for token_id, token in build().get_added_tokens_decoder().items() if token.content != "<unk>"}
    for name, build in TOY_TOKENIZERS.items()
}
KINDS = sorted(TOY_TOKENIZERS)


@pytest.mark.parametrize("kind", KINDS)
@QUICK
@given(text=texts())
def test_no_text_becomes_a_special_or_added_token(kind: str, text: str) -> None:
    ids = ENCODERS[kind].encode(text.encode())
    assert not set(ids.tolist()) & ADDED[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "spelling",
    [*SPECIALS, THINK, "<|endoftext|>", "</think>", "<|im_start|>user", "<s>", "<0x41>", f"a {THINK} b", f"{THINK}{THINK}"],
)
def test_look_alikes_are_spelled_out(kind: str, spelling: str) -> None:
    ids = ENCODERS[kind].encode(spelling.encode())
    assert TABLES[kind].bytes_of(ids) == spelling.encode()
    assert TokenKind.SPECIAL not in TABLES[kind].kinds[ids]


def test_the_given_tokenizer_does_match_them() -> None:
    """The look-alike tests above would pass for nothing if the toy tokenizers matched nothing."""
    for build in TOY_TOKENIZERS.values():
        tokenizer = build()
        assert id_of(tokenizer, THINK) in tokenizer.encode(f"a{THINK}").ids
        assert id_of(tokenizer, "<eos>") in tokenizer.encode("a<eos>").ids


@pytest.mark.parametrize("build", [spm_bpe_tokenizer, unigram_tokenizer])
@pytest.mark.parametrize("text", ["hello", " hello", "  the", "the", "", "\nthe"])
def test_continuations_carry_no_dummy_prefix(build: type, text: str) -> None:
    tokenizer: Tokenizer = build()
    ids = Encoder(tokenizer).encode(text.encode())
    assert TokenTable.from_tokenizer(tokenizer).bytes_of(ids) == text.encode()


@pytest.mark.parametrize("text", ["hello there", " the 12", "x", "\r\n 世界"])
def test_continuation_equals_encoding_behind_a_newline(text: str) -> None:
    """The known way round the dummy prefix: encode a newline in front and drop the prefix piece and the newline
    byte."""
    tokenizer = spm_bpe_tokenizer()
    behind_newline = tokenizer.encode("\n" + text, add_special_tokens=False)
    assert behind_newline.tokens[:2] == ["▁", "<0x0A>"]
    assert Encoder(tokenizer).encode(text.encode()).tolist() == behind_newline.ids[2:]


def test_byte_level_prefix_space_is_not_added() -> None:
    tokenizer = byte_bpe_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=True)])
    assert TokenTable.from_tokenizer(tokenizer).bytes_of(Encoder(tokenizer).encode(b"the")) == b"the"


def test_truncation_padding_and_dropout_are_off_and_the_original_is_left_alone() -> None:
    tokenizer = byte_bpe_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.model.dropout = 0.9
    before = tokenizer.to_str()
    text = b"hello there " * 10
    ids = Encoder(tokenizer).encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == ENCODERS["byte_bpe"].encode(text).tolist()
    assert tokenizer.to_str() == before


@pytest.mark.parametrize("text, offset", [(b"ab\xff", 2), (b"\xf0\x9f\x98", 0), (b"a\xed\xa0\x80", 1)])
def test_invalid_utf8_is_refused_with_its_offset(text: bytes, offset: int) -> None:
    with pytest.raises(TextError, match=rf"at offset {offset} of {len(text)}"):
        ENCODERS["byte_bpe"].encode(text)


def test_a_tokenizer_that_gives_up_is_named() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    with pytest.raises(TextError, match=f"the tokenizer {Encoder(tokenizer).fingerprint} cannot encode a text of 1 bytes"):
        Encoder(tokenizer).encode(b"b")


def test_a_normaliser_in_a_sequence_stays() -> None:
    tokenizer = byte_bpe_tokenizer()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("x"), normalizers.NFC()])
    ids = Encoder(tokenizer).encode("e\u0301".encode())
    assert TokenTable.from_tokenizer(tokenizer).bytes_of(ids) == "é".encode()


@pytest.mark.parametrize("kind", KINDS)
def test_threads_give_the_serial_results(kind: str) -> None:
    """T21."""
    encoder = ENCODERS[kind]
    jobs = [f"hello there {n} |".encode() for n in range(100)]
    serial = np.concatenate([encoder.encode(job) for job in jobs]).tolist()
    with ThreadPoolExecutor(8) as pool:
        assert np.concatenate(list(pool.map(encoder.encode, jobs))).tolist() == serial
        for spelled in pool.map(lambda _: encoder.spell(jobs, threads=2), range(8)):
            assert spelled.ids.tolist() == serial


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_batch_gives_the_ids_of_each_text(kind: str, threads: int) -> None:
    jobs = [b"hello there", b"", b" the 12\n", b"x"] * 3
    got = ENCODERS[kind].encode_batch(jobs, threads=threads)
    assert [ids.tolist() for ids in got] == [ENCODERS[kind].encode(job).tolist() for job in jobs]
    assert {ids.dtype for ids in got} == {np.dtype(np.int32)}
    assert ENCODERS[kind].encode_batch([], threads=threads) == []


@pytest.mark.parametrize("threads", [1, 3])
def test_invalid_utf8_in_a_batch_is_refused(threads: int) -> None:
    with pytest.raises(TextError, match="at offset 1 of 2"):
        ENCODERS["byte_bpe"].encode_batch([b"ok", b"a\xff", b"ok"], threads=threads)


def test_a_table_of_another_tokenizer_is_refused() -> None:
    with pytest.raises(TableError, match="must be of one tokenizer"):
        Encoder(byte_bpe_tokenizer(), table=TABLES["char"])


@pytest.mark.parametrize("kind", ["byte_bpe", "spm_bpe"])
@QUICK
@given(left=texts(max_size=5), right=texts(max_size=5))
def test_a_seam_between_segments_is_a_token_end(kind: str, left: str, right: str) -> None:
    """T16: segments encoded apart and put together cover the same bytes, with a cut at the seam."""
    encoder, segments = ENCODERS[kind], [left.replace("▁", "").encode(), right.replace("▁", "").encode()]
    spelled = encoder.spell(segments)
    ends = encoder.table.ends(spelled.ids)
    assert encoder.table.bytes_of(spelled.ids) == b"".join(segments)
    assert len(segments[0]) in [0, *ends.tolist()]
    assert ends[: spelled.cu[1]].tolist() == spelled.ends[: spelled.cu[1]].tolist()
