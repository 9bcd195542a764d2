"""Append-only segment files of records, each whole or not there.

Files are `00000001.seg` and so on; only the last one is written to. A segment is durable before the next one begins, so a
crash can damage the tail of the last one only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from exchange.arrays import padding
from exchange.errors import StorageError
from exchange.files import Files
from exchange.segment_records import HEADER_BYTES, SegmentRecord, decode_stored, encode_stored, stated_bytes, stored_bytes

__all__ = ["SEGMENT_BYTES", "Place", "SegmentLog", "segment_name", "segment_sizes"]

SEGMENT_BYTES = 64 << 20
WINDOW_BYTES = 1 << 20

_NAME = re.compile(r"(\d{8})\.seg")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a record stands; later records have greater places."""

    segment: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class SegmentLog:
    """The segments of one directory. One thread writes; any thread may read places that were synced.

    segment_bytes: a segment that has reached it gets no further batch. Where segments exist, `scan` comes first.
    truncated_bytes, skipped_bytes, skipped_segments: what scans found to be no whole records.
    """

    def __init__(self, files: Files, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._files = files
        self._segment_bytes = segment_bytes
        self.sizes = segment_sizes(files)
        self._scanned = not self.sizes
        self._synced_bytes = 0
        # Set while the last segment may hold bytes behind its size here.
        self._torn = False
        self._new_name = False
        self._window = ((0, 0), memoryview(b""))
        self.truncated_bytes = self.skipped_bytes = self.skipped_segments = 0

    @property
    def last(self) -> int:
        """Number of the last segment, 0 before the first."""
        return max(self.sizes, default=0)

    def append(self, records: Sequence[SegmentRecord]) -> list[Place]:
        """Write a batch behind everything else, in one write and into one segment; durable after `sync`.

        Raises StorageError, and then nothing of the batch is there.
        """
        if not self._scanned:
            raise StorageError("the segments must be scanned before anything is appended to them")
        encoded = [encode_stored(record) for record in records]
        self._roll()
        segment, offset = self.last, self.sizes[self.last]
        self._mend()
        self._torn = True
        self._files.append(segment_name(segment), [part for parts, _ in encoded for part in parts])
        self._torn = False
        places = []
        for _, nbytes in encoded:
            places.append(Place(segment, offset, nbytes))
            offset += nbytes
        self.sizes[segment] = offset
        return places

    def sync(self) -> None:
        """Make everything appended durable. Raising StorageError, it takes back what was appended since the last sync."""
        if not self.sizes:
            return
        try:
            self._files.sync(segment_name(self.last))
            if self._new_name:
                self._files.sync_directory()
        except StorageError:
            # After a failed sync the system may drop the pages: only bytes that are written anew can still be trusted.
            self.rewind(Place(self.last, self._synced_bytes, 0))
            raise
        self._new_name = False
        self._synced_bytes = self.sizes[self.last]

    def rewind(self, place: Place) -> None:
        """Take back everything in the last segment from `place` on. Never raises: what the disk refuses now is done
        before the next append."""
        self.sizes[place.segment] = place.offset
        self._synced_bytes = min(self._synced_bytes, place.offset)
        self._torn = True
        try:
            self._mend()
        except StorageError:
            return

    def read(self, place: Place) -> SegmentRecord:
        """The record at a place. Raises StorageError when it is not whole there, or cannot be read."""
        found = decode_stored(self._read(place.segment, place.offset, place.nbytes))
        if isinstance(found, str):
            raise _bad(place.segment, place.offset, found)
        return found

    def scan(self, after: Place | None = None, *, skip_bad: bool = False) -> Iterator[tuple[Place, SegmentRecord]]:
        """Every record behind `after`, checked. What is no record at the end of the last segment is cut off.

        Raises StorageError naming file and offset for damage elsewhere; with skip_bad the rest of that segment is left
        out and counted.
        """
        start = (0, 0) if after is None else (after.segment, after.end)
        newest = -1
        for segment, size in sorted(self.sizes.items()):
            offset = start[1] if segment == start[0] else 0
            while segment >= start[0] and offset < size:
                found = self._next(segment, offset, size)
                if isinstance(found, SegmentRecord) and found.cursor <= newest:
                    found = f"cursor={found.cursor} stands behind cursor={newest}"
                if isinstance(found, str):
                    self._end(segment, offset, found, skip_bad=skip_bad)
                    break
                newest = found.cursor
                place = Place(segment, offset, stored_bytes(found))
                yield place, found
                offset = place.end
        self._scanned = True
        self._window = ((0, 0), memoryview(b""))
        self._synced_bytes = self.sizes.get(self.last, 0)

    def drop(self, segment: int) -> None:
        """Remove a segment; never the last one, which says where cursors go on."""
        if segment == self.last:
            raise ValueError(f"the last segment stays, got segment={segment}")
        self.sizes.pop(segment, None)
        self._files.remove(segment_name(segment))
        self._files.sync_directory()

    def _end(self, segment: int, offset: int, problem: str, *, skip_bad: bool) -> None:
        """Deal with the first bad record of a segment."""
        nbytes = self.sizes[segment] - offset
        if segment == self.last:
            self._files.truncate(segment_name(segment), offset)
            self._files.sync(segment_name(segment))
            self.sizes[segment] = offset
            self.truncated_bytes += nbytes
        elif skip_bad:
            self.skipped_bytes += nbytes
            self.skipped_segments += 1
        else:
            raise _bad(segment, offset, problem)

    def _next(self, segment: int, offset: int, size: int) -> SegmentRecord | str:
        """The record that begins here, or what is wrong with it."""
        header = self._ahead(segment, offset, min(HEADER_BYTES, size - offset))
        nbytes = stated_bytes(header, f"in file={segment_name(segment)!r} at offset={offset}")
        if isinstance(nbytes, str):
            return nbytes
        if nbytes > size - offset:
            return f"the record does not end within its file, got nbytes={nbytes}"
        return decode_stored(self._ahead(segment, offset, nbytes))

    def _roll(self) -> None:
        """Begin a new segment where there is none, or the last is full."""
        if self.sizes and self.sizes[self.last] < self._segment_bytes:
            return
        if self.sizes:
            self.sync()
        self.sizes[self.last + 1] = 0
        self._synced_bytes = 0
        self._new_name = True

    def _mend(self) -> None:
        """Cut off what a failed write has left behind."""
        if self._torn:
            self._files.truncate(segment_name(self.last), self.sizes[self.last])
            self._torn = False

    def _ahead(self, segment: int, offset: int, nbytes: int) -> memoryview:
        """Bytes for a scan, which wants what follows next: read in large pieces."""
        start, window = self._window
        at = offset - start[1]
        if segment != start[0] or at < 0 or at + nbytes > window.nbytes:
            window = self._read(segment, offset, max(nbytes, min(WINDOW_BYTES, self.sizes[segment] - offset)))
            self._window, at = ((segment, offset), window), 0
        return window[at : at + nbytes]

    def _read(self, segment: int, offset: int, nbytes: int) -> memoryview:
        """Bytes of a segment in memory that starts at a multiple of 64."""
        room = np.empty(nbytes + 63, np.uint8)
        start = padding(room.__array_interface__["data"][0])
        target = room[start : start + nbytes].data
        count = self._files.read_into(segment_name(segment), offset, target)
        return target[:count].toreadonly()


def segment_name(segment: int) -> str:
    """The file of a segment."""
    return f"{segment:08d}.seg"


def segment_sizes(files: Files) -> dict[int, int]:
    """Bytes of every segment, oldest first."""
    found = ((_NAME.fullmatch(name), size) for name, size in sorted(files.sizes().items()))
    return {int(match[1]): size for match, size in found if match is not None}


def _bad(segment: int, offset: int, problem: str) -> StorageError:
    return StorageError(
        f"a stored record is damaged: {problem}, in file={segment_name(segment)!r} at offset={offset}: restore the file from a "
        f"copy, or open the store with skip_bad to go on without the rest of it"
    )
