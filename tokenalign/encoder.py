"""Texts to the ids that a policy would read in the middle of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tokenalign.definition import Definition
from tokenalign.errors import TableError, TextError
from tokenalign.fast_bpe import FastBpe, SlowError
from tokenalign.foreign import foreign
from tokenalign.spelling import Spelled, Speller
from tokenalign.table import TokenTable


class Encoder:
    """A tokenizer's own clone that encodes completions: text is text, whatever it spells.

    The clone adds no special tokens and no dummy prefix (a completion goes on from a prompt), truncates and pads
    nothing, and turns no part of a text into a special or added token. table: what the ids spell. fingerprint: of
    the tokenizer's definition, as in its table. slow_reason: None where tiktoken encodes (two to ten times faster, the
    same ids), else why it does not. May be used from several threads at once.
    """

    table: TokenTable
    fingerprint: str
    slow_reason: str | None

    def __init__(self, tokenizer: Tokenizer, *, table: TokenTable | None = None, fast: bool = True) -> None:
        """table: of the same tokenizer, made anew where None. fast: try tiktoken.

        Raises TableError for a kind of tokenizer whose tokens do not carry their own bytes and for a table of another
        tokenizer.
        """
        if not isinstance(tokenizer, Tokenizer):
            raise TableError(
                f"an encoder needs a `tokenizers.Tokenizer`, got {type(tokenizer).__name__}; open_tokenizer reads it"
            )
        definition = Definition.of(tokenizer)
        self.fingerprint = definition.fingerprint
        self.table = TokenTable.from_tokenizer(tokenizer) if table is None else table
        if self.table.fingerprint != self.fingerprint:
            raise TableError(
                f"encoder and table must be of one tokenizer, got tokenizer.fingerprint={self.fingerprint}, "
                f"table.fingerprint={self.table.fingerprint}"
            )
        self._clone = Tokenizer.from_str(definition.for_continuation())
        # Without special tokens it would only trim spaces off the offsets.
        self._clone.post_processor = None
        self._fast: FastBpe | None = None
        self.slow_reason = None if fast else "switched off by fast=False"
        if fast:
            try:
                self._fast = FastBpe(definition, self._clone, self.table)
            except SlowError as error:
                self.slow_reason = str(error)
        self._speller = Speller(self._clone, self.table, metaspace=definition.metaspace)

    def encode(self, text: bytes) -> npt.NDArray[np.int32]:
        """Ids, int32 [T], of a UTF-8 text. What the vocabulary cannot spell is dropped or becomes the unknown token.

        Raises TextError for text that is not valid UTF-8, with the offset, and for text that the tokenizer gives up on.
        """
        return self._ids(text)

    def encode_batch(self, texts: Sequence[bytes], *, threads: int = 1) -> list[npt.NDArray[np.int32]]:
        """The ids of each text as `encode` gives them, with so many texts in work at once. Raises as `encode` does."""
        if threads == 1 or len(texts) < 2:
            return [self._ids(text) for text in texts]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(self._ids, texts))

    def spell(self, texts: Sequence[bytes], *, threads: int = 1) -> Spelled:
        """The tokens of each text with their ends in it, and what they do not spell.

        Raises as `encode` does, and TableError where the table is narrower than the vocabulary and lacks an id.
        """
        return self.locate(texts, self.encode_batch(texts, threads=threads))

    def locate(self, texts: Sequence[bytes], ids: Sequence[npt.NDArray[np.int32]]) -> Spelled:
        """`spell` for texts whose ids `encode` has given."""
        return self._speller.spell(texts, ids)

    def _ids(self, text: bytes) -> npt.NDArray[np.int32]:
        if not isinstance(text, bytes):
            raise TextError(f"a text is UTF-8 bytes, got {type(text).__name__}; use text.encode()")
        try:
            string = text.decode()
        except UnicodeDecodeError as error:
            raise TextError(
                f"text is not valid UTF-8, got byte 0x{text[error.start]:02x} at offset {error.start} of {len(text)}; "
                f"hold back an incomplete last character and replace nothing"
            ) from error
        ids = self._fast.encode(string) if self._fast else None
        if ids is not None:
            return ids
        what = f"the tokenizer {self.fingerprint} cannot encode a text of {len(text)} bytes (is there an unknown token?)"
        with foreign(TextError, what):
            # A batch of one: without character offsets, and on one thread whatever the library's own settings.
            (encoding,) = self._clone.encode_batch_fast([string], add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.int32)
