"""Where the tokens of a text end in it, also where they do not spell its very bytes.

The running sum of token widths is exact as long as tokens spell the text. Where a normaliser rewrote it or the
vocabulary lacks something, the library's character offsets propose cuts and bytes decide: what lies between two cuts is
either the very bytes of its tokens, or becomes them by the normaliser, or is lost. Cuts that leave something else
between them are given up, so that a wrong offset makes a stretch longer and never a cut wrong.

Shape legend: N texts · T tokens of all texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import AnyStr

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tokenalign.definition import SPACE_MARK
from tokenalign.errors import TextError
from tokenalign.foreign import foreign
from tokenalign.table import TokenTable
from tokenalign.words import Words


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spelled:
    """Many texts in the tokens of one tokenizer, one after the other.

    ids: int32 [T]. ends: int64 [T], byte offset behind each token in the original text, counted from the start of its
    own text; they never fall and the last of a text is its length. cu: int64 [N+1], where each text's tokens begin.
    changed_mask: bool [T], the token lies in a stretch whose tokens do not spell its very bytes; of such a stretch the
    last token covers all and the others nothing, since no cut between them is known. changed_bytes: int64 [N], bytes
    of text that the tokenizer's normaliser rewrote. lost_bytes: int64 [N], bytes for which no token stands (dropped, or
    an unknown token); all of a text without tokens.
    """

    ids: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int64]
    cu: npt.NDArray[np.int64]
    changed_mask: npt.NDArray[np.bool_]
    changed_bytes: npt.NDArray[np.int64]
    lost_bytes: npt.NDArray[np.int64]

    def text(self, number: int) -> Spelled:
        """One of the texts."""
        own, one = slice(*self.cu[number : number + 2]), slice(number, number + 1)
        return Spelled(
            ids=self.ids[own],
            ends=self.ends[own],
            cu=self.cu[number : number + 2] - self.cu[number],
            changed_mask=self.changed_mask[own],
            changed_bytes=self.changed_bytes[one],
            lost_bytes=self.lost_bytes[one],
        )

    @classmethod
    def join(cls, parts: Sequence[Spelled]) -> Spelled:
        """The texts of all parts, one after the other."""
        counts = [np.diff(part.cu) for part in parts]
        return cls(
            ids=np.concatenate([np.empty(0, np.int32), *(part.ids for part in parts)]),
            ends=np.concatenate([np.empty(0, np.int64), *(part.ends for part in parts)]),
            cu=np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([np.empty(0, np.int64), *counts]))]),
            changed_mask=np.concatenate([np.empty(0, np.bool_), *(part.changed_mask for part in parts)]),
            changed_bytes=np.concatenate([np.empty(0, np.int64), *(part.changed_bytes for part in parts)]),
            lost_bytes=np.concatenate([np.empty(0, np.int64), *(part.lost_bytes for part in parts)]),
        )

    def without(self, refused: npt.NDArray[np.bool_]) -> Spelled:
        """The texts [N] that are refused left empty."""
        counts = np.diff(self.cu)
        kept = ~np.repeat(refused, counts)
        return Spelled(
            ids=self.ids[kept],
            ends=self.ends[kept],
            cu=np.concatenate([np.zeros(1, np.int64), np.cumsum(np.where(refused, 0, counts))]),
            changed_mask=self.changed_mask[kept],
            changed_bytes=np.where(refused, 0, self.changed_bytes),
            lost_bytes=np.where(refused, 0, self.lost_bytes),
        )


class Speller:
    """Finds token ends for the encodings of one tokenizer. May be used from several threads at once."""

    def __init__(self, clone: Tokenizer, table: TokenTable, *, metaspace: bool) -> None:
        """clone: gives the ids that `spell` is handed, and their untrimmed offsets. metaspace: its pieces write a space
        as U+2581."""
        self._clone = clone
        self._normaliser = clone.normalizer
        self._table = table
        self._metaspace = metaspace
        self._words = Words(table)

    def spell(self, texts: Sequence[bytes], ids_N: Sequence[npt.NDArray[np.int32]]) -> Spelled:
        """The texts with their ids [T_i] as one ragged batch. Raises TableError for ids that the table lacks."""
        counts_N = np.fromiter(map(len, ids_N), np.int64, len(ids_N))
        cu = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts_N)])
        ids = np.concatenate([np.zeros(0, np.int32), *ids_N])
        through = np.concatenate([np.zeros(1, np.int64), self._table.ends(ids)])
        base_N = through[cu[:-1]]
        ends = through[1:] - np.repeat(base_N, counts_N)
        changed_mask = np.zeros(len(ids), np.bool_)
        changed_bytes, lost_bytes = np.zeros((2, len(texts)), np.int64)
        lengths_N = np.fromiter(map(len, texts), np.int64, len(texts))
        if (through[cu[1:]] - base_N != lengths_N).any() or not self._words.spelled(b"".join(texts), ids, through):
            joined = self._table.bytes_of(ids)
            for n, text in enumerate(texts):
                tokens = slice(cu[n], cu[n + 1])
                spelled = joined[through[cu[n]] : through[cu[n + 1]]]
                if spelled != text:
                    changed_bytes[n], lost_bytes[n] = self._mend(text, spelled, ids[tokens], ends[tokens], changed_mask[tokens])
        return Spelled(ids=ids, ends=ends, cu=cu, changed_mask=changed_mask, changed_bytes=changed_bytes, lost_bytes=lost_bytes)

    def _mend(
        self,
        text: bytes,
        spelled: bytes,
        ids: npt.NDArray[np.int32],
        ends: npt.NDArray[np.int64],
        changed_mask: npt.NDArray[np.bool_],
    ) -> tuple[int, int]:
        """Correct, in place, the ends [T_i] and the mask [T_i] of a text that its tokens do not spell; changed and lost
        bytes."""
        if not len(ids):
            return 0, len(text)
        reading = Reading(
            text=text,
            spelled=spelled,
            through=[0, *ends.tolist()],
            normalised=self._normalised,
            complete=self._normalised(text) == spelled,
        )
        changed = lost = 0
        for stretch in reading.stretches(self._proposed_cuts(text, ids)):
            tokens = slice(stretch.first, stretch.last)
            ends[tokens] += stretch.start - reading.through[stretch.first]
            piece, own = reading.both(stretch)
            if piece == own:
                continue
            ends[tokens] = stretch.start
            ends[stretch.last - 1] = stretch.end
            changed_mask[tokens] = True
            wanted = self._normalised(piece)
            missing = min(max(len(_differing(wanted, own)), wanted != own), len(piece))
            rewritten = len(_differing(piece.decode(), wanted.decode()).encode())
            lost += missing
            changed += min(max(rewritten, wanted != piece), len(piece) - missing)
        return changed, lost

    def _normalised(self, text: bytes) -> bytes:
        """What the tokens of a text spell if none is missing."""
        string = text.decode()
        if self._normaliser is not None:
            with foreign(TextError, f"the normaliser fails on a text of {len(text)} bytes"):
                string = self._normaliser.normalize_str(string)
        return (string.replace(SPACE_MARK, " ") if self._metaspace else string).encode()

    def _proposed_cuts(self, text: bytes, ids: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
        """Token index and byte offset of each place that the library's character offsets call a token border.

        A character between two tokens (the accent behind a composed letter) is counted to the first.
        """
        with foreign(TextError, f"the tokenizer gives no offsets for a text of {len(text)} bytes"):
            encoding = self._clone.encode(text.decode(), add_special_tokens=False)
        inner: list[tuple[int, int]] = []
        if len(encoding.ids) == len(ids) > 1:
            starts = np.flatnonzero(np.frombuffer(text, np.uint8) & 0xC0 != 0x80)
            byte_at = np.append(starts, len(text))
            offsets = np.array(encoding.offsets, np.int64)
            begun = np.minimum.accumulate(offsets[:0:-1, 0])[::-1]
            inner = list(enumerate(byte_at[begun].tolist(), start=1))
        return [(0, 0), *inner, (len(ids), len(text))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Tokens first to last (exclusive) and the bytes start to end that they stand for. explained: the tokens spell these
    bytes or their normalised form. begun: they spell the beginning of it."""

    first: int
    last: int
    start: int
    end: int
    explained: bool
    begun: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One text and what its tokens spell together. through: [T_i+1], where in that each token starts. complete: the
    tokens spell the normalised text."""

    text: bytes
    spelled: bytes
    through: list[int]
    normalised: Callable[[bytes], bytes]
    complete: bool

    def both(self, stretch: Stretch) -> tuple[bytes, bytes]:
        """The bytes of a stretch, and those of its tokens."""
        own = self.spelled[self.through[stretch.first] : self.through[stretch.last]]
        return self.text[stretch.start : stretch.end], own

    def stretches(self, cuts: list[tuple[int, int]]) -> list[Stretch]:
        """The text between those proposed cuts that bytes bear out.

        Neighbours that are not explained are taken together, unless each lacks nothing but its tail. In a
        complete text an unexplained stretch has a wrong border and grows until it is explained, as any does that holds
        no text at all.
        """
        found: list[Stretch] = []
        proposed = [self._judged(first, last, start, end) for (first, start), (last, end) in pairwise(cuts)]
        for explained, run in groupby(proposed, lambda stretch: stretch.explained):
            members = list(run)
            apart = explained or all(stretch.begun for stretch in members)
            found += members if apart else [self._joined(members)]
        at, reach = 0, 1
        while at < len(found):
            stretch = found[at]
            if len(found) == 1 or stretch.explained or (not self.complete and stretch.start < stretch.end):
                at, reach = at + 1, 1
                continue
            grown = slice(max(at - reach, 0), at + reach + 1)
            found[grown] = [self._joined(found[grown])]
            at, reach = grown.start, 2 * reach
        return [part for stretch in found for part in self._trimmed(stretch)]

    def _joined(self, run: list[Stretch]) -> Stretch:
        return self._judged(run[0].first, run[-1].last, run[0].start, run[-1].end)

    def _judged(self, first: int, last: int, start: int, end: int) -> Stretch:
        own = self.spelled[self.through[first] : self.through[last]]
        piece = self.text[start:end]
        wanted = piece if piece == own else self.normalised(piece)
        begun = own != b"" and wanted.startswith(own)
        return Stretch(first=first, last=last, start=start, end=end, explained=wanted == own, begun=begun)

    def _trimmed(self, stretch: Stretch) -> list[Stretch]:
        """A stretch without the whole tokens at its head and tail that spell the very bytes, and these."""
        piece, own = self.both(stretch)
        if piece == own or stretch.last - stretch.first == 1:
            return [stretch]
        head, tail = stretch.first, stretch.last
        start, end = stretch.start, stretch.end
        while tail - head > 1 and start + (width := self._width(head)) < end and width and self._same(head, start):
            head, start = head + 1, start + width
        while (
            tail - head > 1 and start < end - (width := self._width(tail - 1)) and width and self._same(tail - 1, end - width)
        ):
            tail, end = tail - 1, end - width
        while head > stretch.first and self._inside_character(start):
            head -= 1
            start -= self._width(head)
        while tail < stretch.last and self._inside_character(end):
            end += self._width(tail)
            tail += 1
        parts = [(stretch.first, head, stretch.start, start), (head, tail, start, end), (tail, stretch.last, end, stretch.end)]
        return [self._judged(*part) for part in parts if part[0] < part[1]]

    def _width(self, token: int) -> int:
        return self.through[token + 1] - self.through[token]

    def _same(self, token: int, start: int) -> bool:
        own = self.spelled[self.through[token] : self.through[token + 1]]
        return self.text.startswith(own, start)

    def _inside_character(self, offset: int) -> bool:
        return offset < len(self.text) and self.text[offset] & 0xC0 == 0x80


def _differing(before: AnyStr, after: AnyStr) -> AnyStr:
    """What of `before` is between that which the two have in common at the start and at the end."""
    head = _common(before, after)
    return before[head : len(before) - _common(before[head:][::-1], after[head:][::-1])]


def _common(left: AnyStr, right: AnyStr) -> int:
    """Characters or bytes that two strings have in common from the start."""
    same = [a == b for a, b in zip(left, right, strict=False)]
    return same.index(False) if False in same else len(same)
