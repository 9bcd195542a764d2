"""Byte-level BPE through tiktoken's merge loop, where it provably gives the ids of the `tokenizers` library.

The two differ in what they merge. `tokenizers` merges listed pairs of pieces, tiktoken any two neighbours whose joined
bytes are a token. They agree if every token of tiktoken's table is what `tokenizers` makes of the token's own bytes:
let both be in the same state and tiktoken be about to join c and d to t. No merge has crossed the span of t, so within
it the merges so far are the first ones of t encoded alone; these end in t, hence by joining c and d, which is listed.
A token that its own bytes do not lead to is left out; where the library looks whole words up (`ignore_merges`) it stays
as a word, and may not be what two other tokens join to.

What remains, the two regular-expression engines, is kept to constructs that both read alike and tried at start-up.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import Model

from tokenalign import cache
from tokenalign.definition import Definition
from tokenalign.errors import TokenAlignError
from tokenalign.foreign import is_panic
from tokenalign.pieces import byte_stand_ins
from tokenalign.table import TokenKind, TokenTable

if TYPE_CHECKING:
    import tiktoken

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The same behind a splitter that makes every digit a piece of its own: a run of spaces before a digit ends its piece.
DIGITS_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
# Not `$` and `^` (ends of lines or of the text), not `{1,3}+` (repeated or possessive): the engines disagree on these.
_COMMON_SYNTAX = re.compile(
    r"(?:\\[pP]\{\w\w?\}|\\[sSrnt]|\\[^\w\s]|\[\^?|\]|\(\?[i!]?:?|\(|\)|\||\{\d+(?:,\d*)?\}(?![?+])|[?*+]|[^\\\[\](){}|^$.?*+&])*"
)
_CACHED_FROM_BYTES = 200_000  # of the vocabulary's JSON
_LAYOUT = 1  # of the cached ids; to be raised with any change of the proof
_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")

# Texts on which pre-tokenizers differ: scripts, joiners, line ends, runs, digits, contractions, case folding, specials.
_BATTERY = (
    *("", "   x", "\t\t x", "\n\n\n", " \n \n", "x \n", "\r\n\r\n", "a\rb", "a\x85b\u2028c\u2029", "\0\x01", "\xa0 \u3000x"),
    *(" " * n + "word" for n in range(1, 70, 3)),
    *("\n" * n + "\t" * n for n in range(1, 18, 4)),
    "I'm you're he'S we'LL they'VE I'D don't 'tis ''s 's'S \u2019s '\u017f \u017ft \u212a \xdf \ufb05 \ufb06 \u0130\u0131",
    "1 12 123 1234 12345678 3.14 1,000 x1y2 \u0661\u0662 \u4e00\u4e8c \xbd\xb2 \u2167 \u0967\u0968",
    "def f(x):\n    return {'a': [1, 2]}  # no\n\n\tif x != y: pass\r\n</div>\n//**//\n$x_1^2$ \\frac{a}{b}",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea 1\ufe0f\u20e3 \U0001f44d\U0001f3fd\U0001fae8 \U000e0067",
    "e\u0301 e\u0323\u0301 q\u0307\u0323 \xe9 \u1112\u1161\u11ab \ud55c \u0958 \u2126 \ufb01 \uff21\uff0c \u2026 \u2460 \xb4",
    "世界，你好。こんにちは カタカナ 한국어 مرحبا สวัสดี हिन्दी שלום Привет γειά",
    "\u01c5 \u02b0 \u0587 \u10d0 \u1e9e stra\xdfe \u202eabc\u202c \ufeffx \ue000 \U0001d400 \u2581\u2581 \u0120\u010a",
    "<|endoftext|><|im_start|>user\n<think> </think></s><s>[INST]<bos><eos><pad><unk><0x0A><|eot_id|>\u3008x\u3009",
    "HTMLParser camelCase ALLCAPS iPhone McDonald \xc9t\xc9 x\u0301X\u0301 \u01c4\u01c6 A\u0300\u0301b",
)


class SlowError(TokenAlignError, ValueError):
    """A tokenizer cannot take the fast path; the text says why in a line."""


class FastBpe:
    """A byte-level BPE tokenizer as tiktoken runs it. May be used from several threads at once."""

    def __init__(self, definition: Definition, clone: Tokenizer, table: TokenTable) -> None:
        """clone: the tokenizer that this one has to equal, made of the definition's `for_continuation`. table: of the
        same definition.

        Raises SlowError where the definition is of another kind, tiktoken is missing, or a probe comes out different.
        """
        try:
            import tiktoken
        except ImportError:
            raise SlowError("tiktoken is not installed; pip install 'mutualrl[fast]'") from None
        pattern = _pattern(definition)
        self._form = _normal_form(definition)
        self._normaliser = clone.normalizer
        ranks, self._ids = _cached_ranks(definition, clone, table)
        self._widths = np.fromiter(map(len, ranks), np.int64, len(ranks))
        self._complete = bool((self._ids >= 0).all())
        try:
            self._encoding: tiktoken.Encoding = tiktoken.Encoding(
                "fast", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
            )
        except ValueError as error:
            raise SlowError(f"tiktoken cannot read the pre-tokenizer's expression: {error}") from error
        self._check(clone, list(ranks))

    def encode(self, text: str) -> npt.NDArray[np.int32] | None:
        """Ids, int32 [T]; None for a text that has to take the slow path.

        Such are texts with a byte that the vocabulary lacks or a character that the pre-tokenizer's expression leaves
        out, and runs of about a million blanks, which exhaust the stack of the expression's engine.
        """
        if self._form is not None and not _in_form(self._form, text):
            text = self._normaliser.normalize_str(text)
        try:
            ranks = np.array(self._encoding.encode_ordinary(text), dtype=np.int64)
        except ValueError:
            return None
        except BaseException as error:
            if not is_panic(error):
                raise
            return None
        if self._widths[ranks].sum() != (len(text) if text.isascii() else len(text.encode())):
            return None
        ids: npt.NDArray[np.int32] = self._ids[ranks]
        return ids if self._complete or not (ids < 0).any() else None

    def _check(self, clone: Tokenizer, words: list[bytes]) -> None:
        texts = [*_BATTERY, *_vocabulary_probes(words)]
        for text, encoding in zip(texts, clone.encode_batch_fast(texts, add_special_tokens=False), strict=True):
            ids = self.encode(text)
            if ids is not None and ids.tolist() != encoding.ids:
                raise SlowError(f"tiktoken gives other ids for {text[:40]!r}")


def _pattern(definition: Definition) -> str:
    """The one expression that cuts a text as the pre-tokenizer does."""
    parts = definition.parts("pre_tokenizer")
    kinds = [part["type"] for part in parts]
    whole = bool(parts) and parts[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and whole:
        return GPT2_PATTERN
    if kinds == ["Digits", "ByteLevel"] and whole and parts[0]["individual_digits"]:
        return DIGITS_PATTERN
    if kinds == ["Split", "ByteLevel"] and not whole and parts[0]["behavior"] == "Isolated" and not parts[0]["invert"]:
        given: str | None = parts[0]["pattern"].get("Regex")
        if given is not None and _COMMON_SYNTAX.fullmatch(given):
            return given
        raise SlowError("the pre-tokenizer's expression has constructs that the two engines may read differently")
    raise SlowError(f"the pre-tokenizer is not one expression over bytes, got {' + '.join(kinds) or 'none'}")


def _normal_form(definition: Definition) -> str | None:
    """Name of the Unicode normal form that the normaliser makes; None without a normaliser."""
    kinds = [part["type"] for part in definition.parts("normalizer")]
    if not kinds:
        return None
    if len(kinds) == 1 and kinds[0] in _NORMAL_FORMS:
        return str(kinds[0])
    raise SlowError(f"the normaliser is not a Unicode normal form, got {' + '.join(kinds)}")


def _in_form(form: str, text: str) -> bool:
    """Whether a text certainly is in a normal form; Python cannot tell for characters newer than its own tables."""
    if text.isascii():
        return True
    # The stub of the standard library knows the four names only as literals.
    return unicodedata.is_normalized(form, text) and "Cn" not in map(unicodedata.category, set(text))  # type: ignore[arg-type]


def _cached_ranks(
    definition: Definition, clone: Tokenizer, table: TokenTable
) -> tuple[dict[bytes, int], npt.NDArray[np.int32]]:
    """As `_ranks`, the proof for a large vocabulary from the cache on disk.

    Kept are the ids alone, by rank; what they spell, the table says. Where the two do not fit, the proof is made anew.
    """
    if len(definition.model_sections["vocab"]) < _CACHED_FROM_BYTES:
        return _ranks(definition, clone)
    name = f"{definition.fingerprint}-{tokenizers.__version__}-{_LAYOUT}.ranks.npz"
    kept = (cache.load_arrays(name) or {}).get("ids")
    read = None if kept is None else _spelled_ranks(kept, table)
    if kept is not None and read is not None:
        return read, kept
    ranks, ids = _ranks(definition, clone)
    if _spelled_ranks(ids, table) == ranks:
        cache.store_arrays(name, {"ids": ids})
    return ranks, ids


def _spelled_ranks(ids: npt.NDArray[Any], table: TokenTable) -> dict[bytes, int] | None:
    """Rank by bytes of ids by rank; None for ids that are no tokens of text, or not the single bytes first."""
    if ids.dtype != np.int32 or ids.ndim != 1 or len(ids) < 256:
        return None
    known = ids[(np.arange(len(ids)) >= 256) | (ids != -1)]
    if known.min(initial=0) < 0 or known.max(initial=-1) >= len(table):
        return None
    if not np.isin(table.kinds[known], (TokenKind.TEXT, TokenKind.ADDED)).all():
        return None
    single = [bytes([value]) for value in range(256)]
    if any(token_id >= 0 and table.bytes_of([token_id]) != byte for byte, token_id in zip(single, ids.tolist(), strict=False)):
        return None
    spelled, ends = table.bytes_of(ids[256:]), table.ends(ids[256:]).tolist()
    words = [spelled[start:end] for start, end in pairwise([0, *ends])]
    ranks = {token: rank for rank, token in enumerate([*single, *words])}
    return ranks if len(ranks) == len(ids) else None


def _ranks(definition: Definition, clone: Tokenizer) -> tuple[dict[bytes, int], npt.NDArray[np.int32]]:
    """Rank by bytes, the 256 single bytes first, then by order of merging; and the id of each rank, -1 for a byte
    that the vocabulary lacks."""
    if definition.model["type"] != "BPE" or not definition.byte_level or definition.byte_fallback:
        raise SlowError(f"the model is not byte-level BPE, got {definition.model['type']}")
    joined = [left + right for left, right in definition.merges]
    order = {piece: rank for rank, piece in enumerate(dict.fromkeys(joined))}
    ranks = np.fromiter(map(order.__getitem__, joined), np.int64, len(joined))
    if (np.diff(ranks) < 0).any():
        raise SlowError("the merges that make one token are not listed together, so that it has no single rank")
    stand_ins = byte_stand_ins()
    spellable = re.compile(f"[{re.escape(''.join(stand_ins))}]+").fullmatch
    specials = {token.id for token in definition.added_tokens if token.special}
    vocab = {piece: token_id for piece, token_id in definition.vocab.items() if token_id not in specials and spellable(piece)}
    words = _words(clone, [piece for piece in vocab if len(piece) > 1], vocab)
    words.sort(key=lambda piece: order.get(piece, len(order)))
    to_byte = {ord(character): value for character, value in stand_ins.items()}
    keys = [bytes([value]) for value in range(256)] + [word.translate(to_byte).encode("latin-1") for word in words]
    by_byte = sorted(stand_ins, key=stand_ins.__getitem__)
    ids = np.array([vocab.get(piece, -1) for piece in (*by_byte, *words)], dtype=np.int32)
    return dict(zip(keys, range(len(keys)), strict=True)), ids


def _words(clone: Tokenizer, pieces: list[str], vocab: dict[str, int]) -> list[str]:
    """Those pieces that belong into tiktoken's table."""
    model = clone.model
    looks_up = bool(model.ignore_merges)
    model.ignore_merges = False
    made = _made_of_themselves(model, pieces, vocab)
    if looks_up:
        apart = [piece for piece in pieces if piece not in made and len(model.tokenize(piece)) <= 2]
        made.update(pieces)
    model.ignore_merges = looks_up
    # The pieces would fill the cache for good and leave no room for the words of texts.
    model._clear_cache()
    if looks_up and apart:
        raise SlowError(f"tiktoken would merge what is only a token as a whole word, got {apart[0]!r}")
    return [piece for piece in pieces if piece in made]


def _made_of_themselves(model: Model, pieces: list[str], vocab: dict[str, int]) -> set[str]:
    """The pieces that the model's merges lead to from their own characters."""
    alone = Tokenizer(model)
    alone.pre_tokenizer = pre_tokenizers.CharDelimiterSplit("\n")
    rows = [pieces[at : at + 256] for at in range(0, len(pieces), 256)]
    made: set[str] = set()
    for row, encoding in zip(rows, alone.encode_batch_fast(["\n".join(row) for row in rows]), strict=True):
        if encoding.ids == [vocab[piece] for piece in row]:
            made.update(row)
        else:
            made.update(piece for piece in row if [token.id for token in model.tokenize(piece)] == [vocab[piece]])
    return made


def _vocabulary_probes(words: list[bytes]) -> list[str]:
    """What tokens from all over the vocabulary spell, alone and in pairs."""
    readable = [text for word in words[:: max(len(words) // 3000, 1)] if (text := word.decode(errors="ignore"))][:2000]
    return readable + [left + right for left, right in zip(readable, readable[::-7] * 8, strict=False)]
