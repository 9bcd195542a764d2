"""Byte-pair ranks, tiktoken's kind of vocabulary, as a tokenizer: base64 files, Mistral's Tekken, GPT-2's stand-ins."""

from __future__ import annotations

import base64
import binascii
import re
from collections import Counter
from collections.abc import Mapping

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tokenalign.definition import MOST_IDS
from tokenalign.errors import SourceError
from tokenalign.foreign import foreign
from tokenalign.pieces import byte_stand_ins

_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?(\n|\Z)")
# Splitting a token takes the square of its length; the longest in use are 128 spaces.
_MOST_TOKEN_BYTES = 1024
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
    """Rank of each token of a tiktoken file. Raises SourceError with the line that is no token and rank, or whose token
    an earlier line has."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            spelled, rank = line.split()
            token = base64.b64decode(spelled, validate=True)
            if token in ranks:
                raise SourceError(f"a tiktoken file has each token once, got {token[:40]!r} again in line {number}")
            ranks[token] = int(rank)
        except SourceError:
            raise
        except (ValueError, binascii.Error) as error:
            raise SourceError(
                f"a tiktoken file holds a base64 token and its rank in each line, got {line[:40]!r} in line {number}"
            ) from error
    return ranks


def from_ranks(ranks: Mapping[bytes, int], pattern: str, specials: Mapping[str, int]) -> Tokenizer:
    """Byte-level BPE with tiktoken's ids: every split of a token into two tokens is a merge of the token's rank, as
    transformers' TikTokenConverter has it. specials: ids of the control tokens.

    Raises SourceError for a pattern that the library's regex engine does not take, for ids that are not distinct or not
    from 0 to 2**24 - 1, and for tokens that are empty, longer than 1024 bytes or spelled like a control token.
    """
    _check_ids([*ranks.values(), *specials.values()])
    sizes = list(map(len, ranks))
    if min(sizes, default=1) == 0 or max(sizes, default=1) > _MOST_TOKEN_BYTES:
        raise SourceError(f"tokens must have 1 to {_MOST_TOKEN_BYTES} bytes, got one of {max(sizes) if min(sizes) else 0}")
    stand_in = [character for character, _ in sorted(byte_stand_ins().items(), key=lambda item: item[1])]
    pieces = {token: "".join([stand_in[value] for value in token]) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            known = [(left, right) for left, right in halves if left in ranks and right in ranks]
            known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
            merges += [(pieces[left], pieces[right]) for left, right in known]
    vocab = {pieces[token]: rank for token, rank in ranks.items()}
    both = vocab.keys() & specials.keys()
    if both:
        raise SourceError(f"control tokens must be spelled like no token of text, got {sorted(both)[:4]}")
    vocab |= specials
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    with foreign(SourceError, "the split pattern is no regular expression of the `tokenizers` library"):
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
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
    used = [token for token in tekken.vocab if token.rank < count]
    with foreign(SourceError, "a token of the tekken.json is no base64"):
        ranks = {base64.b64decode(token.token_bytes): token.rank + first for token in used}
    if len(ranks) < len(used):
        raise SourceError(f"a tekken.json has each token once, got {len(used)} tokens, {len(ranks)} of them different")
    return from_ranks(ranks, config.pattern, _specials(tekken))


def tekken_specials(content: bytes) -> dict[str, int]:
    """Ids of the special tokens of a `tekken.json` by name. Raises SourceError as `from_tekken` does."""
    return _specials(_read_tekken(content))


def _read_tekken(content: bytes) -> _Tekken:
    with foreign(SourceError, "this is no tekken.json"):
        tekken = msgspec.json.decode(content, type=_Tekken)
    count = tekken.config.default_num_special_tokens
    if not 0 <= count <= MOST_IDS:
        raise SourceError(f"this is no tekken.json: got default_num_special_tokens={count}")
    return tekken


def _check_ids(ids: list[int]) -> None:
    if len(set(ids)) < len(ids):
        raise SourceError(f"a token id must be of one token, got id={Counter(ids).most_common(1)[0][0]} twice")
    for bad in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= bad < MOST_IDS:
            raise SourceError(f"token ids must be from 0 to {MOST_IDS - 1}, got id={bad}")


def _specials(tekken: _Tekken) -> dict[str, int]:
    named = (
        dict(enumerate(_TEKKEN_SPECIALS))
        if tekken.special_tokens is None
        else {special.rank: special.token_str for special in tekken.special_tokens}
    )
    count = tekken.config.default_num_special_tokens
    ids = {named.get(index, f"<SPECIAL_{index}>"): index for index in range(count)}
    if len(ids) < count:
        raise SourceError(f"special tokens must have different names, got {count} tokens and {len(ids)} names")
    return ids


def byte_level_bpe(vocab: dict[str, int], merges: list[tuple[str, str]], *, single_digits: bool = False) -> Tokenizer:
    """GPT-2's kind of tokenizer from a vocabulary and merges in stand-in characters. single_digits: SmolLM2's, where
    every digit stands alone."""
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level]) if single_digits else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
