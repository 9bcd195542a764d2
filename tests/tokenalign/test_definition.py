"""Definitions: what makes two the same, the edited form for continuations, and refusals."""

from __future__ import annotations

import json

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from tokenalign import Encoder, TableError, TokenTable
from tokenalign.definition import Definition
from tokenalign.testing import TOY_TOKENIZERS, byte_bpe_tokenizer


def test_fingerprint_follows_the_definition_but_not_truncation_or_padding() -> None:
    """T20, T21."""
    base = TokenTable.from_tokenizer(byte_bpe_tokenizer()).fingerprint
    assert len(base) == 32
    same = byte_bpe_tokenizer()
    same.enable_truncation(8)
    same.enable_padding()
    assert TokenTable.from_tokenizer(same).fingerprint == base == Encoder(same).fingerprint
    changed = [byte_bpe_tokenizer() for _ in range(4)]
    changed[0].normalizer = normalizers.NFC()
    changed[1].pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    changed[2].add_tokens(["<more>"])
    changed[3].decoder = None
    changed.append(byte_bpe_tokenizer(words=["the", "reh"]))
    changed.append(byte_bpe_tokenizer())
    changed[-1].post_processor = processors.ByteLevel()
    for pattern in (r"\w+", r"\w"):
        changed.append(byte_bpe_tokenizer())
        changed[-1].pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    for change in ("merges", "special"):
        definition = json.loads(byte_bpe_tokenizer().to_str())
        if change == "merges":
            definition["model"]["merges"].reverse()
        else:
            definition["added_tokens"][-1]["special"] = True
        changed.append(Tokenizer.from_str(json.dumps(definition)))
    fingerprints = {TokenTable.from_tokenizer(tokenizer).fingerprint for tokenizer in changed}
    assert len(fingerprints | {base}) == 11


def test_a_continuation_shares_the_definition_but_for_its_edits() -> None:
    for build in TOY_TOKENIZERS.values():
        definition = Definition.of(build())
        edited = json.loads(definition.for_continuation())
        assert edited["added_tokens"] == []
        assert edited["truncation"] is edited["padding"] is None
        assert edited["decoder"] == definition.tree["decoder"]
        assert edited["model"].get("merges") == definition.tree["model"].get("merges")
        assert definition.merges == [tuple(merge) for merge in definition.tree["model"].get("merges", [])]
        assert Tokenizer.from_str(json.dumps(edited)).get_vocab_size() == len(definition.vocab)


def test_control_tokens_that_merges_spell_are_out_of_reach() -> None:
    """T14: by a merge, by being a single character, and as a whole word where merges are passed over."""
    vocab = {"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4, "!": 5}
    for ignore in (False, True):
        tokenizer = Tokenizer(models.BPE(vocab, [("<", "s"), ("<s", ">")], ignore_merges=ignore))
        tokenizer.add_special_tokens(["<s>", "!"])
        assert Encoder(tokenizer).encode(b"<s>!").tolist() == [3, 2]
    unmerged = Tokenizer(models.BPE({"<": 0, "s": 1, "<s": 2}, [], ignore_merges=True))
    unmerged.add_special_tokens(["<s"])
    assert Encoder(unmerged).encode(b"<s").tolist() == [0, 1]
    assert Definition.of(tokenizer).vocab == vocab


def test_control_tokens_among_word_pieces_are_out_of_reach() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "[X]": 1, "a": 2}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[X]", "[UNK]"])
    assert Encoder(tokenizer).encode(b"[X]").tolist() == [0]
    assert Encoder(tokenizer).encode(b"a").tolist() == [2]


def test_marks_behind_words_are_refused() -> None:
    suffixed = Tokenizer(models.BPE({"a</w>": 0}, [], end_of_word_suffix="</w>"))
    with pytest.raises(TableError, match=r"got model.type='BPE'"):
        TokenTable.from_tokenizer(suffixed)
    with pytest.raises(TableError):
        Encoder(suffixed)


def test_what_is_no_definition_is_refused() -> None:
    for content in ("[]", "{}", '{"model": 3}', "{"):
        with pytest.raises(TableError, match=r"this is no tokenizer\.json"):
            Definition.read(content)
