"""Reads what a hub has recorded, beside the hub or after its end.

Only segment files are read, which are the truth about a hub's records: nothing is locked, written or kept open, a running
hub is not held up, and what a killed hub had not indexed yet is there too.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from exchange.errors import StorageError
from exchange.files import OSFiles
from exchange.index_rows import RecordMeta
from exchange.segment_records import HEADER_BYTES, SegmentRecord, decode_head, decode_stored, head_bytes, stated_bytes
from exchange.segments import Place, segment_name, segment_sizes
from exchange.types import START, AgentName, Cursor, Kind, PromptId, Version
from exchange.wire import StructDecoder

__all__ = ["LoggedRow", "RecordLog"]

# Read at once where only heads are wanted: many small records, or the head of one.
HEADS_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRow:
    """What is known of one record without reading it. stored_at_ns: wall clock. nbytes: of its body and arrays."""

    cursor: Cursor
    kind: Kind
    agent: AgentName
    step: int
    version: Version
    prompt_ids: tuple[PromptId, ...]
    stored_at_ns: int
    nbytes: int
    place: Place


class _Segment(NamedTuple):
    """One file. may_grow: it is the last one, so a record at its end may not be whole."""

    number: int
    nbytes: int
    may_grow: bool


class RecordLog:
    """The records in the directory of a durable hub, as they are when they are asked for.

    Raises StorageError when there is no such directory.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise StorageError(f"no records are kept here, got directory={str(directory)!r}: give the directory of a hub")
        self._directory = directory
        self._files = OSFiles(directory)
        self._metas = msgspec.msgpack.Decoder(RecordMeta)
        self._records: StructDecoder[dict[str, Any]] = StructDecoder(dict[str, Any])

    def rows(
        self,
        *,
        kinds: Collection[Kind] | None = None,
        agents: Collection[AgentName] | None = None,
        prompt_ids: Collection[PromptId] | None = None,
        after: Cursor = START,
        limit: int | None = None,
    ) -> Iterator[LoggedRow]:
        """The records that fit the filters, in the order of their cursors; limit: only so many, the newest.

        A record that is being written, or was when its hub died, is left out. Raises StorageError, behind the rows before
        it, for what is no record.
        """
        wanted = None if prompt_ids is None else frozenset(prompt_ids)

        def fits(row: LoggedRow) -> bool:
            return (
                row.cursor > after
                and (kinds is None or row.kind in kinds)
                and (agents is None or row.agent in agents)
                and (wanted is None or not wanted.isdisjoint(row.prompt_ids))
            )

        segments = self._behind(after)
        if limit is None:
            for segment in segments:
                yield from filter(fits, self._rows(segment))
            return
        newest: deque[LoggedRow] = deque()
        while segments and len(newest) < limit:
            some = deque(filter(fits, self._rows(segments.pop())), maxlen=limit - len(newest))
            newest.extendleft(reversed(some))
        yield from newest

    def read(self, row: LoggedRow) -> dict[str, Any]:
        """A whole record as plain values, its tag under "type"; arrays are numpy.

        Raises StorageError when it is damaged, or its hub has let it go since; WireError for one that its producer wrote
        wrongly.
        """
        found = decode_stored(self._bytes(row.place.segment, row.place.offset, row.place.nbytes))
        if not isinstance(found, SegmentRecord):
            raise _damaged(row.place.segment, row.place.offset, found)
        return self._records.decode(found.body, [memoryview(frame) for frame in found.frames])

    def _behind(self, after: Cursor) -> list[_Segment]:
        """The segments that may hold records behind `after`, oldest first."""
        sizes = segment_sizes(self._files)
        segments = [_Segment(number, size, number == max(sizes)) for number, size in sizes.items()]
        for index in reversed(range(len(segments) if after else 0)):
            first = next(self._rows(segments[index]), None)
            if first is not None and first.cursor <= after:
                return segments[index:]
        return segments

    def _rows(self, segment: _Segment) -> Iterator[LoggedRow]:
        """The records of one segment; none of one that its hub has let go since."""
        try:
            yield from self._scan(segment)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise

    def _scan(self, segment: _Segment) -> Iterator[LoggedRow]:
        number, size = segment.number, segment.nbytes
        window, start = memoryview(b""), 0

        def ahead(offset: int, nbytes: int) -> memoryview:
            nonlocal window, start
            if offset < start or offset + nbytes > start + window.nbytes:
                window, start = self._bytes(number, offset, min(max(nbytes, HEADS_BYTES), size - offset)), offset
            return window[offset - start : offset - start + nbytes]

        offset = 0
        while offset < size:
            header = ahead(offset, HEADER_BYTES)
            nbytes = stated_bytes(header, f"in file={segment_name(number)!r} at offset={offset}")
            cut = header.nbytes < HEADER_BYTES or (isinstance(nbytes, int) and nbytes > size - offset)
            if cut and segment.may_grow:
                return
            if cut or isinstance(nbytes, str):
                raise _damaged(number, offset, nbytes if isinstance(nbytes, str) else "the file ends within it")
            if head_bytes(header) > nbytes:
                raise _damaged(number, offset, f"its parts do not fit into it, got nbytes={nbytes}")
            head = ahead(offset, head_bytes(header))
            if head.nbytes < head_bytes(header):
                return  # its hub has taken it back this very moment
            yield self._row(Place(number, offset, nbytes), head)
            offset += nbytes

    def _bytes(self, segment: int, offset: int, nbytes: int) -> memoryview:
        raw = memoryview(bytearray(nbytes))
        return raw[: self._files.read_into(segment_name(segment), offset, raw)]

    def _row(self, place: Place, raw: memoryview) -> LoggedRow:
        head = decode_head(raw)
        try:
            meta = self._metas.decode(head.meta)
        except msgspec.DecodeError as error:
            raise _damaged(place.segment, place.offset, f"it is of an unknown kind, {error}") from error
        return LoggedRow(
            cursor=head.cursor,
            kind=meta.kind,
            agent=meta.agent,
            step=meta.step,
            version=meta.version,
            prompt_ids=meta.prompt_ids,
            stored_at_ns=meta.stored_at_ns,
            nbytes=head.content_bytes,
            place=place,
        )


def _damaged(segment: int, offset: int, problem: str) -> StorageError:
    return StorageError(
        f"a stored record is damaged: {problem}, in file={segment_name(segment)!r} at offset={offset}: what lies before it "
        f"can be read; restore the file from a copy to read on"
    )
