"""Every format read into a tokenizer that gives the ids of the format's own library; roles; refusals."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tokenalign import Encoder, TokenKind, TokenTable, cache
from tokenalign.definition import Definition
from tokenalign.errors import SourceError, TokenAlignError
from tokenalign.rank_files import from_ranks, holds_ranks
from tokenalign.sources import open_roles, open_tokenizer
from tokenalign.table import ROLES
from tokenalign.testing import byte_bpe_tokenizer, char_tokenizer, texts, unigram_tokenizer

LINES = (Path(__file__).parent.parent / "data" / "mixed200.txt").read_bytes().decode().split("\n")
PATTERN = r"'s|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = ["the", " the", "there", "\r\n", "    ", "世界", "😀", " é", "12", "th", "he", "ere", " th"]
QUICK = settings(max_examples=40, deadline=None)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUTUALRL_CACHE", str(tmp_path / "cache"))


def ranks() -> dict[bytes, int]:
    """All bytes, the words with what leads to them, one byte after the other, and a word that no merge makes."""
    tokens = [bytes([value]) for value in range(256)]
    for word in WORDS:
        spelled = word.encode()
        tokens += [spelled[:end] for end in range(2, len(spelled) + 1) if spelled[:end] not in tokens]
    return {token: rank for rank, token in enumerate([*tokens, b"qqqq"])}


RANKS_TOKENIZER = from_ranks(ranks(), PATTERN, {"<eos>": 400})
RANKS_TABLE, RANKS_ENCODER = TokenTable.from_tokenizer(RANKS_TOKENIZER), Encoder(RANKS_TOKENIZER)


def rank_file(path: Path) -> Path:
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks().items()))
    return path


def sentencepiece_model(kind: str, **options: Any) -> Any:
    """A SentencePieceProcessor trained on the mixed text."""
    library = pytest.importorskip("sentencepiece")
    options = {"vocab_size": 900, "byte_fallback": True, "character_coverage": 0.98} | options
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, model_type=kind, hard_vocab_limit=False, minloglevel=2, **options
    )
    return library.SentencePieceProcessor(model_proto=model.getvalue())


def differing(processor: Any, tokenizer: Tokenizer, lines: list[str]) -> list[str]:
    tokenizer.encode_special_tokens = True  # SentencePiece reads control pieces in a text as text
    return [line for line in lines if processor.encode(line) != tokenizer.encode(line, add_special_tokens=False).ids]


def test_a_tokenizer_and_a_transformers_object_are_taken_as_they_are() -> None:
    tokenizer = byte_bpe_tokenizer()
    assert open_tokenizer(tokenizer) is tokenizer
    assert open_tokenizer(SimpleNamespace(backend_tokenizer=tokenizer)) is tokenizer


def test_a_file_that_truncates_and_pads_gives_whole_texts(tmp_path: Path) -> None:
    """T21: a saved truncation is a setting of a run, not of a vocabulary."""
    tokenizer = byte_bpe_tokenizer()
    whole = tokenizer.encode("hello there " * 9).ids
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=500)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for source in (tmp_path, str(tmp_path), tmp_path / "tokenizer.json"):
        assert open_tokenizer(source).encode("hello there " * 9).ids == whole


def test_ranks_give_the_ids_of_tiktoken(tmp_path: Path) -> None:
    """T20: for a file and for an Encoding object, special tokens included."""
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding("toy", pat_str=PATTERN, mergeable_ranks=ranks(), special_tokens={"<|endoftext|>": 400})
    by_object = open_tokenizer(encoding)
    by_file = open_tokenizer(rank_file(tmp_path / "toy.tiktoken"), pattern=PATTERN)
    encoder = Encoder(by_object)
    for line in [*LINES, "qqqq", "qqqqq"]:
        expected = encoding.encode_ordinary(line)
        assert by_file.encode(line, add_special_tokens=False).ids == expected
        assert encoder.encode(line.encode()).tolist() == expected
    assert by_object.token_to_id("<|endoftext|>") == 400
    table = TokenTable.from_tokenizer(by_object, roles=open_roles(encoding))
    assert (len(table), table.lossless) == (401, True)
    assert table.roles["eos"] == {400}
    assert table.kind(400) is TokenKind.SPECIAL


def test_rank_files_are_known_by_content_not_by_name(tmp_path: Path) -> None:
    folder = rank_file(tmp_path / "tokenizer.model").parent
    assert open_tokenizer(folder, pattern=PATTERN).encode(" there").ids == [ranks()[b" the"], ord("r"), ord("e")]
    with pytest.raises(SourceError, match=r"got pattern=None for path='.*tokenizer.model'; give the family's"):
        open_tokenizer(folder)


@QUICK
@given(text=texts())
def test_ranks_keep_any_text(text: str) -> None:
    assert RANKS_TABLE.bytes_of(RANKS_ENCODER.encode(text.encode())) == text.encode()


def test_merges_come_by_rank_of_the_whole_then_of_the_halves() -> None:
    by_rank = {b"ab": 0, b"b": 1, b"c": 2, b"bc": 3, b"abc": 4, b"a": 5}
    merges = Definition.of(from_ranks(by_rank, PATTERN, {})).merges
    assert merges == [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")]


def test_tekken_counts_its_special_tokens_first(tmp_path: Path) -> None:
    vocab = [{"rank": n, "token_bytes": base64.b64encode(token).decode(), "token_str": None} for token, n in ranks().items()]
    config = {"pattern": PATTERN, "default_vocab_size": len(vocab) + 20, "default_num_special_tokens": 22}
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab}))
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.encode("the").ids == [22 + ranks()[b"the"]]
    assert (tokenizer.token_to_id("</s>"), tokenizer.token_to_id("<SPECIAL_21>")) == (2, 21)
    assert tokenizer.get_vocab_size() == len(vocab) + 20
    assert open_roles(tmp_path) == {"bos": {1}, "eos": {2}, "pad": {11}, "unk": {0}}


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("extra_spaces", [True, False])
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids(kind: str, extra_spaces: bool, prefix: bool, tmp_path: Path) -> None:
    """T20, T32: every line, with spaces dropped or not and a dummy prefix or none, from the object and from its file."""
    options = {"remove_extra_whitespaces": not extra_spaces, "add_dummy_prefix": prefix}
    processor = sentencepiece_model(kind, normalization_rule_name="identity", **options)
    file = tmp_path / "toy.model"
    file.write_bytes(processor.serialized_model_proto())
    lines = [*LINES, "", " ", "   ", "  a  b  ", "▁a ▁", "▁▁", "a\t b", "<s>a</s>", "<0x0A>", "<unk>"]
    for source in (processor, file):
        assert differing(processor, open_tokenizer(source), lines) == []
    assert open_roles(processor) == open_roles(file) == {"bos": {1}, "eos": {2}, "unk": {0}}


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_maps_characters(kind: str) -> None:
    processor = sentencepiece_model(kind, normalization_rule_name="nmt_nfkc")
    composed = [unicodedata.normalize("NFC", line) for line in LINES]
    decomposed = ["o\u0302\u0301 x", "\u30ab\u3099", "\u1112\u1161\u11ab", "e\u0301", "ﬁ ½ ～ \u3000x\u200b"]
    assert differing(processor, open_tokenizer(processor), [*composed, *decomposed]) == []


def test_sentencepiece_control_pieces_are_made_by_no_merge() -> None:
    processor = sentencepiece_model("bpe", control_symbols=["th"], normalization_rule_name="identity")
    tokenizer = open_tokenizer(processor)
    assert differing(processor, tokenizer, [*LINES, "the path"]) == []
    assert TokenTable.from_tokenizer(tokenizer).kind(processor.piece_to_id("th")) is TokenKind.SPECIAL


def test_sentencepiece_without_byte_pieces_has_an_unknown_token() -> None:
    processor = sentencepiece_model("bpe", byte_fallback=False, normalization_rule_name="identity")
    tokenizer = open_tokenizer(processor)
    assert differing(processor, tokenizer, LINES) == []
    assert "has an unknown token" in TokenTable.from_tokenizer(tokenizer).losses


def test_sentencepiece_user_defined_pieces_are_added_tokens_and_spell_text() -> None:
    processor = sentencepiece_model("bpe", user_defined_symbols=["<sep>"], add_dummy_prefix=False)
    tokenizer = open_tokenizer(processor)
    assert differing(processor, tokenizer, ["a<sep>b", "<sep><sep>"]) == []
    assert TokenTable.from_tokenizer(tokenizer).bytes_of(processor.encode("a<sep>b")) == b"a<sep>b"


def test_other_sentencepiece_kinds_are_refused() -> None:
    for kind, options in (("char", {}), ("bpe", {"treat_whitespace_as_suffix": True})):
        with pytest.raises(SourceError, match=r"got model_type=(4|2), treat_whitespace_as_suffix="):
            open_tokenizer(sentencepiece_model(kind, **options))


def test_conversions_are_kept_and_kept_apart_by_pattern(tmp_path: Path) -> None:
    file = rank_file(tmp_path / "toy.tiktoken")
    by_line = r"[^\n]+|\n"
    first = {pattern: open_tokenizer(file, pattern=pattern).to_str() for pattern in (PATTERN, by_line)}
    directory = cache.place()
    assert directory is not None
    assert len(list(directory.iterdir())) == 2
    assert {pattern: open_tokenizer(file, pattern=pattern).to_str() for pattern in (PATTERN, by_line)} == first
    for kept in directory.iterdir():
        kept.write_bytes(kept.read_bytes()[:-7])
    assert open_tokenizer(file, pattern=PATTERN).to_str() == first[PATTERN]


def test_roles_of_a_folder_come_from_all_of_its_files(tmp_path: Path) -> None:
    """T29: an end of sequence is a set of ids, named in several places."""
    byte_bpe_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert open_roles(tmp_path) == {}
    configs = {
        "tokenizer_config.json": {"bos_token": {"content": "<bos>", "lstrip": False}, "eos_token": "<eos>", "pad_token": None},
        "generation_config.json": {"eos_token_id": [2, 9], "pad_token_id": 0, "bos_token_id": -1},
        "config.json": {"eos_token_id": 7, "unk_token_id": True, "text_config": {"eos_token_id": 8}},
    }
    for name, config in configs.items():
        (tmp_path / name).write_text(json.dumps(config))
    expected = {"bos": {1}, "eos": {2, 7, 8, 9}, "pad": {0}}
    assert open_roles(tmp_path) == open_roles(tmp_path / "tokenizer.json") == expected
    table = TokenTable.from_tokenizer(byte_bpe_tokenizer(), roles=open_roles(tmp_path))
    assert table.roles == {**expected, "unk": set()}
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SourceError, match=r"no JSON object, got path='.*config.json'"):
        open_roles(tmp_path)


def test_roles_of_objects() -> None:
    spoken = SimpleNamespace(eos_token_id=[2, 5], bos_token_id=1, pad_token_id=None)
    assert open_roles(spoken) == {"bos": {1}, "eos": {2, 5}}
    assert open_roles(byte_bpe_tokenizer()) == {}
    assert set(TokenTable.from_tokenizer(byte_bpe_tokenizer()).roles) == set(ROLES)


def test_a_tokenizer_file_that_is_hostile_or_old_gives_an_error_of_this_package(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    file = tmp_path / "tokenizer.json"
    content = byte_bpe_tokenizer().to_str()
    tree = json.loads(content)
    bare, untyped = json.loads(content), json.loads(content)
    del bare["added_tokens"], untyped["model"]["type"]
    for old in (bare, untyped):
        file.write_text(json.dumps(old))
        assert open_roles(tmp_path) == {"eos": {2}}
    for content in (
        json.dumps(tree | {"added_tokens": None}),
        json.dumps(tree | {"added_tokens": [{"id": -1, "content": "x", "special": True}]}),
        json.dumps(tree | {"model": {"type": "BPE", "vocab": None, "merges": []}}),
        json.dumps(tree | {"model": 3}),
        '{"model": {"type": "BPE", "vocab": ' + "[" * 100_000,
        '{"model": ' * 100_000,
        "\x00",
    ):
        file.write_text(content)
        for refuse in (open_roles, open_tokenizer):
            with pytest.raises(SourceError, match="; path="):
                refuse(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(SourceError, match="no JSON object"):
        open_roles(tmp_path)


@pytest.mark.parametrize("token_id", [2**24, 2**28, 2**31, 2**32 - 1, 10**12, -4])
def test_ids_out_of_all_proportion_are_refused_before_they_take_the_memory(token_id: int, tmp_path: Path) -> None:
    tree = json.loads(byte_bpe_tokenizer().to_str())
    tree["model"]["vocab"]["xy"] = token_id
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(SourceError, match=rf"from 0 to 16777215, got id={token_id}\b"):
        open_tokenizer(tmp_path)
    with pytest.raises(SourceError, match=rf"from 0 to 16777215, got id={token_id}\b"):
        from_ranks({**ranks(), b"zz": token_id}, PATTERN, {})
    with pytest.raises(SourceError, match=rf"from 0 to 16777215, got id={token_id}\b"):
        from_ranks(ranks(), PATTERN, {"<eos>": token_id})


def test_ranks_that_are_no_vocabulary_are_refused(tmp_path: Path) -> None:
    for more, specials, why in (
        ({b"zz": 7}, {}, "got id=7 twice"),
        ({}, {"<eos>": 7}, "got id=7 twice"),
        ({b"x" * 100_000: 999}, {}, "1 to 1024 bytes, got one of 100000"),
        ({b"": 999}, {}, "1 to 1024 bytes, got one of 0"),
        ({}, {"the": 999}, r"no token of text, got \['the'\]"),
    ):
        with pytest.raises(SourceError, match=why):
            from_ranks({**ranks(), **more}, PATTERN, specials)
    twice = tmp_path / "twice.tiktoken"
    twice.write_bytes(b"AA== 0\nAQ== 1\nAA== 2\n")
    with pytest.raises(SourceError, match=r"got b'\\x00' again in line 3; path="):
        open_tokenizer(twice, pattern=PATTERN)


@pytest.mark.parametrize(
    "change",
    [
        {"vocab": [{"rank": 0, "token_bytes": "A"}]},
        {"vocab": [{"rank": -9, "token_bytes": "AA=="}]},
        {"vocab": [{"rank": 0, "token_bytes": "AA=="}, {"rank": 1, "token_bytes": "AA=="}]},
        {"special_tokens": [{"rank": 0, "token_str": "x"}, {"rank": 1, "token_str": "x"}]},
        {"config": {"pattern": ".", "default_vocab_size": 9, "default_num_special_tokens": 10**12}},
        {"config": {"pattern": ".", "default_vocab_size": 9, "default_num_special_tokens": -1}},
        {"config": {"pattern": "(", "default_vocab_size": 9, "default_num_special_tokens": 2}},
    ],
)
def test_hostile_tekken_files_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    config = {"pattern": ".", "default_vocab_size": 9, "default_num_special_tokens": 2}
    tekken = {"config": config, "vocab": [{"rank": 0, "token_bytes": "AA=="}]}
    file = tmp_path / "tekken.json"
    file.write_text(json.dumps(tekken))
    open_tokenizer(file)
    file.write_text(json.dumps(tekken | change))
    with pytest.raises(SourceError, match="; path="):
        open_tokenizer(file)


@pytest.mark.parametrize("kind", [1, 2])
def test_hostile_sentencepiece_models_are_refused(kind: int, tmp_path: Path) -> None:
    schema = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")

    def written(**fields: Any) -> bytes:
        proto = schema.ModelProto()
        proto.trainer_spec.model_type = kind
        pieces = [("<unk>", 0.0, 2), ("a", -1.0, 1), ("b", -1.0, 1), *fields.pop("more", [])]
        for piece, score, type_ in fields.pop("pieces", pieces):
            proto.pieces.add(piece=piece, score=score, type=type_)
        proto.normalizer_spec.precompiled_charsmap = fields.pop("charsmap", b"")
        content: bytes = proto.SerializeToString()
        return content

    sound = written()
    file = tmp_path / "x.model"
    file.write_bytes(sound)
    open_tokenizer(file)
    for content in (
        written(pieces=[("a", -1.0, 1)]),
        written(more=[("a", -1.0, 1)]),
        written(more=[("x" * 100_000, -1.0, 1)]),
        written(more=[("", -1.0, 1)]),
        written(more=[("c", float("nan"), 1)]),
        written(more=[("c", float("-inf"), 1)]),
        written(more=[("<unk2>", 0.0, 2)]),
        written(charsmap=b"\xff" * 9),
        sound.replace(b"a", b"\xff"),
    ):
        file.write_bytes(content)
        with pytest.raises(SourceError, match="; path="):
            open_tokenizer(file)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_a_file_gives_another_error(data: st.DataObject, damaged: dict[str, bytes], tmp_path: Path) -> None:
    """Bytes of every format overwritten, cut out or put in."""
    name = data.draw(st.sampled_from(sorted(damaged)))
    content = bytearray(damaged[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at, until = sorted(data.draw(st.integers(0, len(content))) for _ in range(2))
        content[at : min(until, at + 8)] = data.draw(st.binary(max_size=8) | st.sampled_from([b"0", b"null", b"-1", b"[{"]))
    (tmp_path / name).write_bytes(content)
    pattern = PATTERN if name == "x.tiktoken" and holds_ranks(bytes(content)) else None
    with contextlib.suppress(TokenAlignError):
        open_roles(tmp_path / name)
    with contextlib.suppress(TokenAlignError):
        tokenizer = open_tokenizer(tmp_path / name, pattern=pattern)
        TokenTable.from_tokenizer(tokenizer)
        Encoder(tokenizer).encode("hello \ufdd0 <eos> é世界".encode())


@pytest.fixture(scope="module")
def damaged() -> dict[str, bytes]:
    """A small sound file of every format."""
    ranks = {bytes([value]): value for value in range(40)} | {b"\0\1": 40}
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for token, rank in ranks.items()]
    config = {"pattern": r"\p{L}+|.", "default_vocab_size": 43, "default_num_special_tokens": 2}
    return {
        "x.tiktoken": b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()),
        "tekken.json": json.dumps({"config": config, "vocab": vocab}).encode(),
        "char.json": char_tokenizer().to_str().encode(),
        "unigram.json": unigram_tokenizer().to_str().encode(),
        "x.model": sentencepiece_model("unigram", vocab_size=700).serialized_model_proto(),
    }


def test_whatever_else_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    for name, content in (("bad.json", b"{}"), ("tekken.json", b"{}"), ("x.model", b"\x00\xff"), ("y.model", b"")):
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / "files" / name).write_bytes(content)
        with pytest.raises(SourceError, match=rf"this is no .*; path='.*{name}'"):
            open_tokenizer(tmp_path / "files" / name)
    with pytest.raises(SourceError, match="no such file or folder"):
        open_tokenizer(tmp_path / "missing")
    with pytest.raises(SourceError, match=r"holds no tokenizer \(tokenizer.json, tekken.json, tokenizer.model\)"):
        open_tokenizer(tmp_path)
    with pytest.raises(SourceError, match="got an object of type int"):
        open_tokenizer(3)
    with pytest.raises(SourceError, match="goes with a file of tiktoken ranks"):
        open_tokenizer(byte_bpe_tokenizer(), pattern=PATTERN)
    broken = tmp_path / "broken.tiktoken"
    broken.write_bytes(b"AA== 0\nAQ==\n")
    with pytest.raises(SourceError, match=r"got b'AQ==' in line 2; path="):
        open_tokenizer(broken, pattern=PATTERN)
    with pytest.raises(SourceError, match="no regular expression"):
        from_ranks(ranks(), "(", {})
