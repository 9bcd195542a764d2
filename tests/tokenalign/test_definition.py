"""Definitions: what makes two the same, the edited form for continuations, and refusals."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from tokenalign import Encoder, TableError, TextError, TokenKind, TokenTable
from tokenalign.definition import Definition
from tokenalign.testing import TOY_TOKENIZERS, byte_bpe_tokenizer, spm_bpe_tokenizer, texts


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
        clone, controls = Tokenizer.from_str(json.dumps(edited)), {token.id for token in definition.added_tokens}
        kept = {piece: index for piece, index in definition.vocab.items() if index not in controls}
        assert clone.get_vocab().items() >= kept.items()


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


def with_byte_piece_as_control() -> Tokenizer:
    tokenizer = spm_bpe_tokenizer()
    tokenizer.add_special_tokens(["<0x00>"])
    return tokenizer


REACHABLE: dict[str, Callable[[], Tokenizer]] = {
    **TOY_TOKENIZERS,
    "words": lambda: controlled(models.WordLevel({"[UNK]": 0, "<s>": 1, "a": 2}, unk_token="[UNK]"), "[UNK]"),
    "word pieces": lambda: controlled(models.WordPiece({"[UNK]": 0, "<s>": 1, "a": 2, "##b": 3}, unk_token="[UNK]"), "##b"),
    "look-up": lambda: controlled(models.BPE({"<s>": 0, "a": 1, "?": 2}, [], ignore_merges=True, unk_token="?"), "?"),
    "unigram": lambda: controlled(models.Unigram([("<s>", 0.0), ("a", -1.0), ("?", -2.0)], 2, False), "a"),
    "byte piece": with_byte_piece_as_control,
}


def controlled(model: models.Model, *specials: str) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<s>", *specials])
    return tokenizer


@functools.cache
def with_names(kind: str) -> tuple[Encoder, list[str], set[int]]:
    """An encoder, all spellings that its clone or the tokenizer knows, and the control tokens but the unknown one."""
    tokenizer = REACHABLE[kind]()
    encoder, definition = Encoder(tokenizer), Definition.of(tokenizer)
    clone = Tokenizer.from_str(definition.for_continuation())
    names = [*clone.get_vocab(), *definition.vocab, "<s>", "\0", *(f"\ufdd0{n}\ufdd1" for n in range(4))]
    return encoder, names, set(np.flatnonzero(encoder.table.kinds == TokenKind.SPECIAL).tolist()) - {definition.unk_id}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(REACHABLE))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_text_gives_a_control_token_whatever_the_clone_calls_it(kind: str, data: st.DataObject) -> None:
    """Not even one who reads this package and sends the very names of the clone's vocabulary."""
    encoder, names, controls = with_names(kind)
    part = st.sampled_from([name for name in names if name]) | texts(max_size=3)
    text = data.draw(st.sampled_from(names) | st.lists(part, max_size=5).map("".join))
    try:
        ids = encoder.encode(text.encode())
    except TextError:
        return
    assert not controls & set(ids.tolist())


def test_ids_out_of_all_proportion_are_refused() -> None:
    far = Tokenizer(models.WordLevel({"a": 2**24}, unk_token="a"))
    for read in (TokenTable.from_tokenizer, Encoder):
        with pytest.raises(TableError, match="from 0 to 16777215, got id=16777216"):
            read(far)


def test_parts_in_python_are_refused() -> None:
    class Own:
        def pre_tokenize(self, text: object) -> None: ...

    tokenizer = byte_bpe_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Own())
    with pytest.raises(TableError, match="the tokenizer has no definition"):
        TokenTable.from_tokenizer(tokenizer)


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
