"""Text to the ids that a policy would read in the middle of a sequence."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tokenalign.definition import Definition
from tokenalign.errors import TextError


class Encoder:
    """A tokenizer's own clone that encodes completions: text is text, whatever it spells.

    The clone adds no special tokens and no dummy prefix (a completion goes on from a prompt), truncates and pads
    nothing, and turns no part of a text into a special or added token. fingerprint: as in the tokenizer's TokenTable.
    May be used from several threads at once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises TableError for a kind of tokenizer whose tokens do not carry their own bytes."""
        definition = Definition.of(tokenizer)
        self.fingerprint = definition.fingerprint
        self._tokenizer = Tokenizer.from_str(definition.for_continuation())

    def encode(self, text: bytes) -> npt.NDArray[np.int32]:
        """Ids, int32 [T], of a UTF-8 text. What the vocabulary cannot spell is dropped or becomes the unknown token.

        Raises TextError for text that is not valid UTF-8, with the offset, and for text that the tokenizer gives up on.
        """
        try:
            string = text.decode()
        except UnicodeDecodeError as error:
            raise TextError(
                f"text is not valid UTF-8, got byte 0x{text[error.start]:02x} at offset {error.start} of {len(text)}; "
                f"hold back an incomplete last character and replace nothing"
            ) from error
        try:
            encoding = self._tokenizer.encode(string, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception where a piece and the unknown token are missing
            raise TextError(
                f"the tokenizer {self.fingerprint} cannot encode a text of {len(text)} bytes: {error}; "
                f"does its vocabulary have an unknown token?"
            ) from error
        return np.asarray(encoding.ids, dtype=np.int32)
