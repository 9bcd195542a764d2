"""A peer's text and token ends, turned into the receiver's ids and their alignment.

Shape legend: A tokens of the source · B tokens of the receiver.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenalign.align import NO_GROUP, Alignment, align
from tokenalign.encoder import Encoder
from tokenalign.errors import AlignmentError, RoleError, TableError, TextError, TooLongError, TranslationError
from tokenalign.residual import Residual
from tokenalign.table import TokenTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Translation:
    """A text in the receiver's tokens.

    ids: int32 [B], the receiver's end-of-sequence token included where the text is finished. ends: int64 [B], byte
    offset behind each token. alignment: source to receiver, None where no source ends were given.
    """

    ids: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int64]
    alignment: Alignment | None
    residual: Residual


class Translator:
    """Turns other tokenizers' texts into the ids of one receiver. May be used from several threads at once."""

    def __init__(self, encoder: Encoder, table: TokenTable, *, eos_id: int | None) -> None:
        """eos_id: the end-of-sequence token that the receiver is trained to end with; None for a receiver without one.

        Raises TableError when encoder and table are of different tokenizers or the table has no such id.
        """
        if encoder.fingerprint != table.fingerprint:
            raise TableError(
                f"encoder and table must be of one tokenizer, got encoder.fingerprint={encoder.fingerprint}, "
                f"table.fingerprint={table.fingerprint}"
            )
        if eos_id is not None and not 0 <= eos_id < len(table):
            raise TableError(f"`eos_id` must be an id of the table of {len(table)} ids, got eos_id={eos_id}")
        self._encoder = encoder
        self._table = table
        self._eos_id = eos_id

    def translate(
        self,
        text: bytes,
        source_ends: npt.ArrayLike | None,
        *,
        finished: bool,
        source_has_eos: bool,
        max_tokens: int,
    ) -> Translation:
        """Encode a text for the receiver and align the two tokenizations.

        source_ends: [A], byte offset behind each source token; with source_has_eos the last is the source's
        end-of-sequence token, of zero width. finished: the text ended by itself, so the receiver's end-of-sequence
        token is appended. A text that is not finished may break off within a character: the longest valid prefix is
        translated, at most 3 bytes are held back and counted, and source tokens that reach into them belong to no
        span.

        Raises TextError for invalid UTF-8, TranslationError where the receiver's tokens do not spell the text,
        TooLongError beyond max_tokens (nothing is ever cut off), RoleError for an end of sequence that cannot be
        mapped, and AlignmentError where source_ends do not cover the text.
        """
        self._check_roles(finished=finished, source_has_eos=source_has_eos)
        content = text if finished else text[: _valid_length(text)]
        content_ids = self._spelled(content)
        ids = np.append(content_ids, np.int32(self._eos_id)) if finished and self._eos_id is not None else content_ids
        if len(ids) > max_tokens:
            raise TooLongError(
                f"a text of {len(text)} bytes takes more of the receiver's tokens than allowed, got {len(ids)} tokens "
                f"with max_tokens={max_tokens}; raise the limit or drop the text"
            )
        ends = self._table.ends(content_ids)
        if finished:
            ends = np.append(ends, ends[-1:] if len(ends) else np.int64(0))
        held = len(text) - len(content)
        if source_ends is None:
            return Translation(ids=ids, ends=ends, alignment=None, residual=Residual(tail_bytes=held))
        alignment = align(source_ends, ends, eos_a=source_has_eos, eos_b=finished, open_end=held > 0)
        if held and alignment.ends_a[-1:].sum() != len(text):
            raise AlignmentError(
                f"`source_ends` must cover the text of {len(text)} bytes, got {alignment.ends_a[-1:].tolist()} as the last"
            )
        residual = Residual(
            n_tokens=len(ids) - (finished and not source_has_eos),
            n_exact=int(alignment.exact_b.sum()),
            n_groups=len(alignment),
            tail_bytes=held,
            tail_tokens=int((alignment.group_a == NO_GROUP).sum()),
        )
        return Translation(ids=ids, ends=ends, alignment=alignment, residual=residual)

    def _check_roles(self, *, finished: bool, source_has_eos: bool) -> None:
        if source_has_eos and not finished:
            raise RoleError("a text with an end-of-sequence token is finished, got finished=False, source_has_eos=True")
        if finished and self._eos_id is None:
            raise RoleError("the receiver has no end-of-sequence token to end a finished text, got eos_id=None")

    def _spelled(self, content: bytes) -> npt.NDArray[np.int32]:
        """The receiver's ids, checked to spell the content byte for byte."""
        ids = self._encoder.encode(content)
        joined = self._table.bytes_of(ids)
        if joined == content:
            return ids
        offset = _common_prefix(content, joined)
        behind = _common_prefix(content[offset:][::-1], joined[offset:][::-1])
        raise TranslationError(
            f"the receiver's tokens do not spell the text, got {joined[offset : offset + 8]!r} for "
            f"{content[offset : offset + 8]!r} at offset {offset} of {len(content)} "
            f"(tokenizer {self._table.fingerprint}); its vocabulary or normaliser cannot keep this text, refuse it",
            offset=offset,
            text_bytes=max(len(content) - offset - behind, 1),
        )


def _valid_length(text: bytes) -> int:
    """Length of the longest valid prefix of a text that may break off within its last character."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            return error.start
        raise TextError(
            f"text is not valid UTF-8, got byte 0x{text[error.start]:02x} at offset {error.start} of {len(text)}; "
            f"only an incomplete last character can be held back"
        ) from error
    return len(text)


def _common_prefix(left: bytes, right: bytes) -> int:
    """Bytes that two strings have in common from the start."""
    same = [a == b for a, b in zip(left, right, strict=False)]
    return same.index(False) if False in same else len(same)
