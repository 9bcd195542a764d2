"""Small tokenizers of every kind, made in code, and strategies for texts that break tokenizers.

Needs hypothesis for `texts` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tokenalign.pieces import byte_stand_ins

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

SPECIALS = ("<pad>", "<bos>", "<eos>")
EOS_ID = SPECIALS.index("<eos>")
# Added but not special, as in real vocabularies: must stay text when a text spells it.
THINK = "<think>"
# Control and added tokens of families in use.
_LOOK_ALIKES = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|eot_id|>",
    "</s>",
    "[INST]",
    "<start_of_turn>",
    "<｜end▁of▁sentence｜>",
    "[UNK]",
)
_PLAIN = "abcdefghijklmnopqrstuvwxyz0123456789 :<>/|_\n"
_WORDS = ("the", "there", "hello", "reverse", "def", "12", "ing", "éè", "世界", "😀", "  ")


def byte_bpe_tokenizer(words: Iterable[str] = (*_WORDS, "\r\n")) -> Tokenizer:
    """Byte-level BPE (GPT-2's kind) with a merge path to every word, with and without a space before it; lossless."""
    stand_in = {value: character for character, value in byte_stand_ins().items()}
    alphabet = list(stand_in.values())
    spelled = ["".join(stand_in[byte] for byte in f"{space}{word}".encode()) for word in words for space in ("", " ")]
    vocab, merges = _merge_up([*SPECIALS, *alphabet], spelled)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_specials(tokenizer)


def spm_bpe_tokenizer(words: Iterable[str] = _WORDS, *, byte_fallback: bool = True) -> Tokenizer:
    """SentencePiece-like BPE (Llama-2's kind): U+2581 for spaces, dummy prefix, bytes for what has no piece."""
    byte_pieces = [f"<0x{value:02X}>" for value in range(256)]
    spelled = [f"{space}{word}".replace(" ", "▁") for word in words for space in ("", " ")]
    characters = sorted({character for word in spelled for character in word} | set("▁abcdefghijklmnopqrstuvwxyz"))
    vocab, merges = _merge_up([*SPECIALS, "<unk>", *byte_pieces, *characters], spelled)
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=byte_fallback, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_specials(tokenizer, "<unk>")


def char_tokenizer(alphabet: str = _PLAIN) -> Tokenizer:
    """One token per character of an alphabet; anything else is unknown."""
    vocab = {piece: index for index, piece in enumerate([*SPECIALS, "<unk>", *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _with_specials(tokenizer, "<unk>")


def unigram_tokenizer(
    pieces: Iterable[str] = ("ab", "abc", "he", "hello", "▁the", "er", "in"),
    alphabet: str = _PLAIN.replace(" ", "▁"),
) -> Tokenizer:
    """Unigram with Metaspace and dummy prefix (T5's kind); characters outside the alphabet are unknown."""
    scored = [(special, 0.0) for special in (*SPECIALS, "<unk>")]
    scored += [(piece, -float(2 + index % 3)) for index, piece in enumerate(pieces)]
    scored += [(character, -6.0) for character in alphabet]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=len(SPECIALS), byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _with_specials(tokenizer, "<unk>")


TOY_TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_bpe": byte_bpe_tokenizer,
    "spm_bpe": spm_bpe_tokenizer,
    "char": char_tokenizer,
    "unigram": unigram_tokenizer,
}


def id_of(tokenizer: Tokenizer, piece: str) -> int:
    """The id of a piece that must exist; KeyError otherwise."""
    return tokenizer.get_vocab()[piece]


def texts(max_size: int = 40) -> SearchStrategy[str]:
    """Texts that break tokenizers: all scripts, joiners, combining stacks, controls, line ends, runs of blanks,
    look-alikes of special tokens and of byte pieces, U+2581 and GPT-2's stand-ins."""
    from hypothesis import strategies as st

    look_alikes = [*SPECIALS, "<unk>", THINK, f" {THINK} ", "<0x0A>", "▁", "Ġ", "\ufdd0", "\ufffd", *_LOOK_ALIKES]
    stacks = ["👩\u200d👩\u200d👧", "🇩🇪", "1\ufe0f\u20e3", "👍🏽", "e\u0301\u0323", "\u1112\u1161\u11ab", "각", "ﬁ", "Å"]
    blanks = ["\x00", "\x85", "\r\n", "\r", "\n\n", "\u2028", "\u2029", "    ", "\t", " " * 70, "\t\t\t", "\u3000", "\u200b"]
    turned = ["\u202e", "\u2067مرحبا\u2069", "\ufeff"]
    words = ["hello there", "世界", "12345", "Привет", "สวัสดี", "हिन्दी", "    return x", "don't"]
    nasty = st.sampled_from([*look_alikes, *stacks, *blanks, *turned, *words])
    character = st.characters(exclude_categories=["Cs"])
    return st.lists(nasty | character, max_size=max_size).map("".join)


def plain_texts(max_size: int = 40) -> SearchStrategy[str]:
    """Texts of at most so many characters that every toy tokenizer can spell, words of their vocabularies among them."""
    from hypothesis import strategies as st

    words = ["hello", "there", " the", "12", "ing", "  ", "abc", " def", "reverse"]
    parts = st.lists(st.sampled_from(words) | st.sampled_from(_PLAIN), max_size=max_size)
    return parts.map(lambda drawn: "".join(drawn)[:max_size])


def _with_specials(tokenizer: Tokenizer, *more: str) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(content, special=True) for content in (*SPECIALS, *more)])
    tokenizer.add_tokens([AddedToken(THINK, lstrip=True, rstrip=True, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return tokenizer


def _merge_up(pieces: list[str], words: Iterable[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary with a left-to-right merge path to each word."""
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = []
    for word in words:
        left = word[0]
        for character in word[1:]:
            if left + character not in vocab:
                vocab[left + character] = len(vocab)
                merges.append((left, character))
            left += character
    return vocab, merges
