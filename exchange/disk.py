"""Records on disk: a log of segments, an index over it, and what a hub that starts again needs to know.

A group is written to the last segment and synced, then the index commits it, unsynced unless it tells of consumers; only
then has `commit` returned. At the start the tail that the index does not know is indexed from the segments, and an index
that is missing or damaged is made anew from all of them (cursors of named consumers are then forgotten: they read again
from the beginning).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice, pairwise
from pathlib import Path
from typing import Self

import msgspec

from exchange.commits import Publication
from exchange.consumers import ConsumerKey
from exchange.disk_settings import DiskSettings
from exchange.errors import StorageError
from exchange.files import Files, OSFiles, claim_run, hold_directory
from exchange.index import Index, open_index
from exchange.index_rows import Change, ConsumerCursor, IndexedRecord, RecordMeta, SegmentFacts, saw
from exchange.lease_rows import LeaseRows
from exchange.members import Incarnation
from exchange.replays import Chunk, Reading, read_chunk
from exchange.segment_records import SegmentRecord
from exchange.segments import Place, SegmentLog
from exchange.stats import DiskStats
from exchange.store import Record
from exchange.types import AgentName, Cursor, Kind, PromptId
from exchange.wire import Encoded

__all__ = ["DiskStore"]

_log = logging.getLogger(__name__)

INDEX = "index.sqlite3"
INDEXED_AT_ONCE = 1000


class DiskStore:
    """One run's records on disk. One thread at a time commits, retains and checkpoints; any thread selects and loads.

    newest: highest cursor ever committed, so that none is used twice. dropped_to: retention has come so far.
    incarnations, consumers: as committed. leases: as found. clock: monotonic seconds, as in Record.stored_at.
    wall_ns: read once, to store such times.
    """

    def __init__(
        self,
        files: Files,
        index: Index,
        *,
        run_id: str,
        settings: DiskSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Recovers what is there. Raises StorageError."""
        self._settings = DiskSettings() if settings is None else settings
        self._clock = clock
        # Fixed for this hub's life: a step of the wall clock makes no record older or younger.
        self._wall_minus_clock_s = wall_ns() / 1e9 - clock()
        self._index = index
        self._closing = ExitStack()
        self._decoder = msgspec.msgpack.Decoder(RecordMeta)
        claim_run(files, run_id)
        self._log = SegmentLog(files, self._settings.segment_bytes)
        self._counts = DiskStats()
        self._commits = 0
        self._damaged_reads = 0
        self._wal_is_long = False
        state = index.state()
        self.newest, self.dropped_to = state.newest, state.dropped_to
        self.incarnations, self.consumers = state.incarnations, state.consumers
        self.leases: LeaseRows = state.leases
        self._facts: dict[int, SegmentFacts] = {}
        self._recover(state.dropped_segment)

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        run_id: str,
        settings: DiskSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> Self:
        """The store in a directory, which is created if missing and locked until `close`.

        Raises StorageError when another hub holds it, when it is another run's, and for damage.
        """
        with ExitStack() as closing:
            files = OSFiles(directory)
            closing.callback(files.close)
            closing.callback(os.close, hold_directory(directory))
            index, damaged = open_index(directory / INDEX)
            closing.callback(index.close)
            store = cls(files, index, run_id=run_id, settings=settings, clock=clock, wall_ns=wall_ns)
            store._counts = msgspec.structs.replace(store._counts, damaged_index=None if damaged is None else str(damaged))
            store._closing = closing.pop_all()
            return store

    def close(self) -> None:
        """Let go of the directory. Nothing is in flight any more."""
        self._closing.close()

    def commit(
        self,
        publications: Sequence[Publication],
        consumers: Mapping[ConsumerKey, Cursor] | None = None,
        *,
        leases: LeaseRows | None = None,
    ) -> None:
        """Make records durable, how far named consumers are, and what has changed of leases: all of it, or nothing when it
        raises StorageError.

        Cursors rise from record to record, from above `newest`. Raises ValueError when they do not.
        """
        cursors = [self.newest, *(publication.record.cursor for publication in publications)]
        if any(later <= earlier for earlier, later in pairwise(cursors)):
            raise ValueError(f"cursors must rise from above newest={self.newest}, got cursors={cursors[1:]}")
        metas = [self._meta(publication) for publication in publications]
        places = self._write(publications, metas)
        records = [meta.at(cursor, place) for meta, cursor, place in zip(metas, cursors[1:], places, strict=True)]
        told_at_ns = self._to_wall_ns(self._clock())
        told = {key: ConsumerCursor(cursor=cursor, told_at_ns=told_at_ns) for key, cursor in (consumers or {}).items()}
        try:
            self._index_and_note(records, metas, told, leases)
        except StorageError:
            if places:
                self._log.rewind(places[0])
            raise
        self._commits += 1

    def select(
        self, kinds: Iterable[Kind], prompt_ids: Iterable[PromptId] | None, after: Cursor, limit: int
    ) -> list[IndexedRecord]:
        """At most `limit` records of these kinds (and on these prompts) behind `after`, in cursor order, each once."""
        return self._index.select(kinds, prompt_ids, after, limit)

    def latest(self, nbytes: int) -> list[IndexedRecord]:
        """The newest records that take at most so many bytes together, oldest first."""
        latest: list[IndexedRecord] = []
        total, before = 0, Cursor(self.newest + 1)
        while chunk := self._index.latest(before, INDEXED_AT_ONCE):
            for found in chunk:
                total += found.place.nbytes
                if total > nbytes:
                    return latest[::-1]
                latest.append(found)
            before = chunk[-1].cursor
        return latest[::-1]

    def load(self, found: IndexedRecord) -> Record | None:
        """The record itself, or None when retention has removed it since. Raises StorageError when it is damaged."""
        try:
            stored = self._log.read(found.place)
        except StorageError:
            if found.place.segment not in self._log.sizes:
                return None
            self._damaged_reads += 1
            raise
        if stored.cursor != found.cursor:
            raise StorageError(
                f"index and segments disagree, got cursor={stored.cursor} where cursor={found.cursor} is indexed, at "
                f"{found.place}: restart the hub after moving {INDEX} away"
            )
        return Record(
            cursor=found.cursor,
            kind=found.kind,
            agent=found.agent,
            prompt_ids=found.prompt_ids,
            step=found.step,
            version=found.version,
            encoded=Encoded(body=stored.body, frames=tuple(stored.frames)),
            stored_at=self.stored_at(found),
        )

    def stored_at(self, found: IndexedRecord) -> float:
        """When a record was stored, on the clock of this hub."""
        # A wall clock that was set back between two hubs must not make a record come from the future.
        return min(found.stored_at_ns / 1e9 - self._wall_minus_clock_s, self._clock())

    def read(self, reading: Reading) -> Chunk:
        """Read for one gather; see read_chunk. One thread at a time."""
        return read_chunk(self, reading)

    def retain(self, keep_from: Cursor | None = None) -> None:
        """Remove the oldest segments that are over the limits. keep_from: from here on somebody still needs records."""
        max_age_s = self._settings.max_age_s
        oldest_ns = None if max_age_s is None else self._to_wall_ns(self._clock() - max_age_s)
        for segment in sorted(self._log.sizes):
            facts = self._facts.get(segment)
            nbytes = sum(self._log.sizes.values())
            old = facts is not None and oldest_ns is not None and facts.newest_at_ns < oldest_ns
            if segment >= max(self._facts, default=0) or not (old or nbytes > self._settings.max_bytes):
                return
            needed = facts is not None and keep_from is not None and facts.last >= keep_from
            if needed and nbytes <= self._settings.hard_bytes:
                return
            self._drop(segment, facts, forced=needed)

    def upkeep(self, keep_from: Cursor | None, *, idle: bool) -> DiskStats:
        """What is to be done from time to time between commits: retention and, when idle, a checkpoint; tells of an index
        whose log grows. Raises StorageError."""
        self.retain(keep_from)
        if idle:
            self.checkpoint()
        _, wal_bytes = self._index.sizes()
        limit = self._settings.wal_alarm_bytes
        if wal_bytes > limit and not self._wal_is_long:
            self._counts = msgspec.structs.replace(self._counts, wal_alarms=self._counts.wal_alarms + 1)
            _log.warning(
                "the log of the exchange's index grows, got wal_bytes=%d over %d: some reader keeps the index open, end it",
                *(wal_bytes, limit),
            )
        self._wal_is_long = wal_bytes > limit
        return self.stats()

    def checkpoint(self) -> bool:
        """Empty the index's write-ahead log, best when nothing else is to do; False when a reader was in the way."""
        return self._index.checkpoint()

    def stats(self) -> DiskStats:
        """What there is and what was found; from any thread."""
        index_bytes, wal_bytes = self._index.sizes()
        # Copied in one step each: another thread may be committing.
        sizes, facts = tuple(self._log.sizes.values()), tuple(self._facts.values())
        return msgspec.structs.replace(
            self._counts,
            commits=self._commits,
            nbytes=sum(sizes),
            segments=len(sizes),
            records=sum(each.records for each in facts),
            index_bytes=index_bytes,
            wal_bytes=wal_bytes,
            damaged_reads=self._damaged_reads,
        )

    def _to_wall_ns(self, seconds: float) -> int:
        return int((seconds + self._wall_minus_clock_s) * 1e9)

    def _meta(self, publication: Publication) -> RecordMeta:
        record = publication.record
        return RecordMeta(
            kind=record.kind,
            agent=record.agent,
            step=record.step,
            version=record.version,
            prompt_ids=record.prompt_ids,
            stored_at_ns=self._to_wall_ns(record.stored_at),
            peer=publication.peer,
            seq=publication.seq,
        )

    def _write(self, publications: Sequence[Publication], metas: Sequence[RecordMeta]) -> list[Place]:
        """Append to the log and sync it."""
        if not publications:
            return []
        stored = []
        for publication, meta in zip(publications, metas, strict=True):
            encoded = publication.record.encoded
            stored.append(
                SegmentRecord(
                    cursor=publication.record.cursor,
                    meta=msgspec.msgpack.encode(meta),
                    body=encoded.body,
                    frames=encoded.frames,
                )
            )
        places = self._log.append(stored)
        self._log.sync()
        return places

    def _index_and_note(
        self,
        records: Sequence[IndexedRecord],
        metas: Sequence[RecordMeta],
        told: Mapping[ConsumerKey, ConsumerCursor],
        leases: LeaseRows | None = None,
    ) -> None:
        """Commit to the index, then take the change over here."""
        incarnations: dict[AgentName, Incarnation] = {}
        for meta in metas:
            known = incarnations.get(meta.agent, self.incarnations.get(meta.agent))
            incarnations[meta.agent] = saw(known, meta, reach=self._settings.reach)
        self._index.commit(Change(records=records, incarnations=incarnations, consumers=told, leases=leases or {}))
        for record in records:
            segment = record.place.segment
            self._facts[segment] = _with(self._facts.get(segment), record)
            self.newest = record.cursor
        self.incarnations.update(incarnations)
        self.consumers.update(told)

    def _drop(self, segment: int, facts: SegmentFacts | None, *, forced: bool) -> None:
        """Forget a segment and remove it; one that a crash leaves behind is removed at the next start."""
        if facts is not None:
            # First, so that a reader that misses a record finds it told. If the index then fails, a gap is told for nothing.
            self.dropped_to = facts.last
            self._index.forget(segment, facts.last)
        self._facts.pop(segment, None)
        self._counts = msgspec.structs.replace(
            self._counts,
            dropped_records=self._counts.dropped_records + (0 if facts is None else facts.records),
            dropped_segments=self._counts.dropped_segments + 1,
            forced_segments=self._counts.forced_segments + forced,
        )
        self._log.drop(segment)

    def _recover(self, dropped_segment: int) -> None:
        """Bring index and segments into line."""
        for segment in sorted(self._log.sizes):
            if segment <= dropped_segment and segment != self._log.last:
                self._log.drop(segment)
        self._facts, lost = self._index.facts(), 0
        for segment, facts in self._facts.items():
            size = self._log.sizes.get(segment, 0)
            lost += self._index.forget_behind(segment, size) if facts.end > size else 0
        if lost:
            self._facts = self._index.facts()
        last = max(self._facts, default=None)
        after = None if last is None else Place(last, self._facts[last].end, 0)
        reindexed = 0
        found = self._read_metas(self._log.scan(after, skip_bad=self._settings.skip_bad))
        while chunk := list(islice(found, INDEXED_AT_ONCE)):
            self._index_and_note([record for record, _ in chunk], [meta for _, meta in chunk], {})
            reindexed += len(chunk)
        oldest = min(self._facts, default=0)
        if oldest > 1:
            self.dropped_to = max(self.dropped_to, Cursor(self._facts[oldest].first - 1))
        self._counts = msgspec.structs.replace(
            self._counts,
            reindexed=reindexed,
            lost=lost,
            truncated_bytes=self._log.truncated_bytes,
            skipped_bytes=self._log.skipped_bytes,
        )

    def _read_metas(self, scan: Iterator[tuple[Place, SegmentRecord]]) -> Iterator[tuple[IndexedRecord, RecordMeta]]:
        for place, stored in scan:
            if stored.cursor <= self.newest:
                raise StorageError(
                    f"index and segments disagree, got cursor={stored.cursor} behind newest={self.newest} in "
                    f"segment={place.segment} at offset={place.offset}: move {INDEX} away to have it made anew"
                )
            try:
                meta = self._decoder.decode(stored.meta)
            except msgspec.DecodeError as error:
                raise StorageError(
                    f"a stored record is of an unknown kind: {error}, got segment={place.segment}, offset={place.offset}: "
                    f"use the version that wrote it"
                ) from error
            yield meta.at(stored.cursor, place), meta


def _with(facts: SegmentFacts | None, record: IndexedRecord) -> SegmentFacts:
    """The facts of a segment after one more record."""
    cursor, at_ns, end = record.cursor, record.stored_at_ns, record.place.end
    if facts is None:
        return SegmentFacts(cursor, cursor, 1, at_ns, end)
    return SegmentFacts(facts.first, cursor, facts.records + 1, max(facts.newest_at_ns, at_ns), end)
