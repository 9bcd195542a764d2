"""Byte-pair ranks, tiktoken's kind of vocabulary, as a tokenizer: base64 files, Mistral's Tekken, GPT-2's stand-ins."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tokenalign.errors import SourceError
from tokenalign.pieces import byte_stand_ins

_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?(\n|\Z)")
# The first ids of Tekken files that name no special tokens themselves.
_TEKKEN_SPECIALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


class _TekkenConfig(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _TekkenToken(msgspec.Struct):
    rank: int
    token_bytes: str


class _TekkenSpecial(msgspec.Struct):
    rank: int
    token_str: str


class _Tekken(msgspec.Struct):
    config: _TekkenConfig
    vocab: list[_TekkenToken]
    special_tokens: list[_TekkenSpecial] | None = None


def holds_ranks(content: bytes) -> bool:
    """Whether a file is tiktoken's: lines of a base64 token and its rank."""
    return _RANK_LINE.match(content) is not None


def read_ranks(content: bytes) -> dict[bytes, int]:
    """Rank of each token of a tiktoken file. Raises SourceError with the line that is no token and rank."""
    ranks = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise SourceError(
                f"a tiktoken file holds a base64 token and its rank in each line, got {line[:40]!r} in line {number}"
            ) from error
    return ranks


def from_ranks(ranks: Mapping[bytes, int], pattern: str, specials: Mapping[str, int]) -> Tokenizer:
    """Byte-level BPE with tiktoken's ids: every split of a token into two tokens is a merge of the token's rank, as
    transformers' TikTokenConverter has it. specials: ids of the control tokens.

    Raises SourceError for a pattern that the library's regex engine does not take.
    """
    stand_in = [character for character, _ in sorted(byte_stand_ins().items(), key=lambda item: item[1])]
    pieces = {token: "".join([stand_in[value] for value in token]) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            known = [(left, right) for left, right in halves if left in ranks and right in ranks]
            known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
            merges += [(pieces[left], pieces[right]) for left, right in known]
    vocab = {pieces[token]: rank for token, rank in ranks.items()} | dict(specials)
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # the library raises bare Exception
        raise SourceError(f"the split pattern is no regular expression of the `tokenizers` library: {error}") from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    named = sorted(specials, key=lambda name: specials[name])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in named])
    return tokenizer


def from_tekken(content: bytes) -> Tokenizer:
    """Mistral's `tekken.json`: ids of text stand behind the special tokens', as many as the default size holds.

    Raises SourceError for other JSON.
    """
    tekken = _read_tekken(content)
    config = tekken.config
    first = config.default_num_special_tokens
    count = config.default_vocab_size - first
    ranks = {base64.b64decode(token.token_bytes): token.rank + first for token in tekken.vocab if token.rank < count}
    return from_ranks(ranks, config.pattern, _specials(tekken))


def tekken_specials(content: bytes) -> dict[str, int]:
    """Ids of the special tokens of a `tekken.json` by name. Raises SourceError as `from_tekken` does."""
    return _specials(_read_tekken(content))


def _read_tekken(content: bytes) -> _Tekken:
    try:
        return msgspec.json.decode(content, type=_Tekken)
    except msgspec.MsgspecError as error:
        raise SourceError(f"this is no tekken.json: {error}") from error


def _specials(tekken: _Tekken) -> dict[str, int]:
    named = (
        dict(enumerate(_TEKKEN_SPECIALS))
        if tekken.special_tokens is None
        else {special.rank: special.token_str for special in tekken.special_tokens}
    )
    return {named.get(index, f"<SPECIAL_{index}>"): index for index in range(tekken.config.default_num_special_tokens)}


def byte_level_bpe(vocab: dict[str, int], merges: list[tuple[str, str]], *, single_digits: bool = False) -> Tokenizer:
    """GPT-2's kind of tokenizer from a vocabulary and merges in stand-in characters. single_digits: SmolLM2's, where
    every digit stands alone."""
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level]) if single_digits else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
