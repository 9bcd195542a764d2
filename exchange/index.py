"""The index over the segments: which records there are and where, who published what, and how far consumers are.

SQLite in WAL mode. A commit is one transaction and comes after the segments' own sync, so the index never knows a record
that the segments have not. It is not synced itself: what a power cut takes from the log's end is indexed anew at the next
start, as the segments have it. What stands here alone (consumers' cursors, what retention took) is synced.
"""

from __future__ import annotations

import heapq
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path

import msgspec

from exchange.errors import CorruptIndexError, StorageError
from exchange.files import told
from exchange.index_rows import Change, ConsumerCursor, IndexedRecord, IndexState, SegmentFacts
from exchange.members import Incarnation
from exchange.segments import Place
from exchange.types import AgentName, Cursor, Kind, PromptId, Version

__all__ = ["Index", "open_index"]

SCHEMA_VERSION = 2
BUSY_TIMEOUT_S = 5.0
JOURNAL_LIMIT_BYTES = 64 << 20
MAX_INTEGER = (1 << 63) - 1
# Below the number of parameters that any build of SQLite takes.
PARAMETERS_AT_ONCE = 900
# About 16 MiB: a page that changes with every group is written to the database once for many of them.
CHECKPOINT_PAGES = 4096
# Over all hubs of a run: as many as one hub lets its workers have. Those that were silent for longest go at a start.
CONSUMERS_KEPT = 1 << 14
_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_SCHEMA = f"""
BEGIN;
CREATE TABLE state(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE records(
    cursor INTEGER PRIMARY KEY, kind TEXT NOT NULL, agent TEXT NOT NULL, step INTEGER NOT NULL, epoch INTEGER NOT NULL,
    version INTEGER NOT NULL, stored_at_ns INTEGER NOT NULL, prompt_ids TEXT NOT NULL,
    segment INTEGER NOT NULL, offset INTEGER NOT NULL, nbytes INTEGER NOT NULL);
CREATE INDEX records_kind ON records(kind, cursor);
CREATE TABLE prompts(prompt_id TEXT, kind TEXT, cursor INTEGER, PRIMARY KEY(prompt_id, kind, cursor)) WITHOUT ROWID;
CREATE INDEX prompts_cursor ON prompts(cursor);
CREATE TABLE incarnations(
    agent TEXT PRIMARY KEY, epoch INTEGER NOT NULL, peer BLOB NOT NULL, mark INTEGER NOT NULL, above TEXT NOT NULL
    ) WITHOUT ROWID;
CREATE TABLE consumers(
    agent TEXT, name TEXT, cursor INTEGER NOT NULL, told_at_ns INTEGER NOT NULL, PRIMARY KEY(agent, name)) WITHOUT ROWID;
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
# By itself, as indexes of before there were leases have it not.
_LEASES = """CREATE TABLE IF NOT EXISTS leases(
    name TEXT, cursor INTEGER, row BLOB NOT NULL, PRIMARY KEY(name, cursor)) WITHOUT ROWID"""
_COLUMNS = "cursor, kind, agent, step, epoch, version, stored_at_ns, prompt_ids, segment, offset, nbytes"
_BY_KIND = f"SELECT {_COLUMNS} FROM records WHERE kind = ? AND cursor > ? ORDER BY cursor LIMIT ?"
_BY_PROMPT = f"""SELECT {_COLUMNS} FROM records WHERE cursor IN (
    SELECT DISTINCT cursor FROM prompts WHERE prompt_id IN ({{prompts}}) AND kind IN ({{kinds}}) AND cursor > ?
    ORDER BY cursor LIMIT ?) ORDER BY cursor"""
_LATEST = f"SELECT {_COLUMNS} FROM records WHERE cursor < ? ORDER BY cursor DESC LIMIT ?"
_FORGET_CONSUMERS = """DELETE FROM consumers WHERE (agent, name) IN
    (SELECT agent, name FROM consumers ORDER BY told_at_ns DESC LIMIT -1 OFFSET ?)"""
_FACTS = """SELECT segment, min(cursor), max(cursor), count(*), max(stored_at_ns), max(offset + nbytes)
    FROM records GROUP BY segment ORDER BY segment"""


class Index:
    """One connection that writes, for one thread at a time, and one that reads, in short transactions, for any thread.

    Raises StorageError; CorruptIndexError from the constructor when the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # A connection that is closed while another thread is in it takes the process down.
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._durable = True
        with self._told():
            self._writer = self._connect()
            try:
                self._prepare()
                self._reader = self._connect()
                self._reader.execute("PRAGMA query_only = 1")
            except BaseException:
                self._writer.close()
                raise

    def state(self) -> IndexState:
        """Everything but the records."""
        with self._told(), self._writing:
            counts = dict(self._writer.execute("SELECT name, value FROM state").fetchall())
            incarnations = self._writer.execute("SELECT agent, epoch, peer, mark, above FROM incarnations").fetchall()
            consumers = self._writer.execute("SELECT agent, name, cursor, told_at_ns FROM consumers").fetchall()
            leases = self._writer.execute("SELECT name, cursor, row FROM leases").fetchall()
        return IndexState(
            newest=Cursor(counts.get("newest", 0)),
            dropped_to=Cursor(counts.get("dropped_to", 0)),
            dropped_segment=counts.get("dropped_segment", 0),
            incarnations={
                agent: Incarnation(peer=peer, epoch=epoch, mark=mark, above=frozenset(msgspec.json.decode(above)))
                for agent, epoch, peer, mark, above in incarnations
            },
            consumers={
                (agent, name): ConsumerCursor(cursor=cursor, told_at_ns=at_ns) for agent, name, cursor, at_ns in consumers
            },
            leases={(name, cursor): row for name, cursor, row in leases},
        )

    def facts(self) -> dict[int, SegmentFacts]:
        """The indexed records of every segment, oldest segment first."""
        with self._told(), self._writing:
            return {segment: SegmentFacts(*facts) for segment, *facts in self._writer.execute(_FACTS).fetchall()}

    def commit(self, change: Change) -> None:
        """Store one change, all of it or nothing."""
        records = change.records
        prompts = [(prompt, each.kind, each.cursor) for each in records for prompt in dict.fromkeys(each.prompt_ids)]
        incarnations = [
            (agent, _fit(known.epoch), known.peer, _fit(known.mark), msgspec.json.encode(sorted(known.above)).decode())
            for agent, known in change.incarnations.items()
        ]
        consumers = [(*key, told.cursor, told.told_at_ns) for key, told in change.consumers.items()]
        gone = [key for key, row in change.leases.items() if row is None]
        leases = [(*key, row) for key, row in change.leases.items() if row is not None]
        with self._transaction(durable=bool(consumers or change.leases)) as db:
            db.executemany("DELETE FROM leases WHERE name = ? AND cursor = ?", gone)
            _insert(db, "INSERT OR REPLACE INTO leases", leases)
            _insert(db, f"INSERT INTO records({_COLUMNS})", list(map(_values, records)))
            _insert(db, "INSERT INTO prompts", prompts)
            _insert(db, "INSERT OR REPLACE INTO incarnations", incarnations)
            _insert(db, "INSERT OR REPLACE INTO consumers", consumers)
            if records:
                _raise_state(db, "newest", records[-1].cursor)

    def forget(self, segment: int, to: Cursor) -> None:
        """Leave out every record up to cursor `to`: retention is about to remove this segment and has removed all before."""
        with self._transaction(durable=True) as db:
            db.execute("DELETE FROM prompts WHERE cursor <= ?", (to,))
            db.execute("DELETE FROM records WHERE cursor <= ?", (to,))
            _raise_state(db, "dropped_to", to)
            _raise_state(db, "dropped_segment", segment)

    def forget_behind(self, segment: int, end: int) -> int:
        """Leave out records of a segment that end behind its first `end` bytes, as they are lost; the number of them."""
        with self._transaction(durable=True) as db:
            lost = "SELECT cursor FROM records WHERE segment = ? AND offset + nbytes > ?"
            db.execute(f"DELETE FROM prompts WHERE cursor IN ({lost})", (segment, end))
            return db.execute(f"DELETE FROM records WHERE cursor IN ({lost})", (segment, end)).rowcount

    def select(
        self, kinds: Iterable[Kind], prompt_ids: Iterable[PromptId] | None, after: Cursor, limit: int
    ) -> list[IndexedRecord]:
        """At most `limit` records of these kinds (and on these prompts) behind `after`, in cursor order, each once."""
        wanted = sorted(set(kinds))
        queries: list[tuple[str, tuple[str | int, ...]]]
        if prompt_ids is None:
            # One query for each kind: each then follows its index and stops at the limit.
            queries = [(_BY_KIND, (kind, after, limit)) for kind in wanted]
        else:
            prompts = sorted(set(prompt_ids))
            queries = []
            at_once = PARAMETERS_AT_ONCE - len(wanted)
            for start in range(0, len(prompts), at_once):
                some = prompts[start : start + at_once]
                sql = _BY_PROMPT.format(prompts=_marks(len(some)), kinds=_marks(len(wanted)))
                queries.append((sql, (*some, *wanted, after, limit)))
        with self._told(), self._reading:
            found = [self._reader.execute(sql, asked).fetchall() for sql, asked in queries]
        return [_record(values) for values in islice(dict.fromkeys(heapq.merge(*found)), limit)]

    def latest(self, before: Cursor, limit: int) -> list[IndexedRecord]:
        """At most `limit` records below `before`, of any kind, the newest first."""
        with self._told(), self._reading:
            found = self._reader.execute(_LATEST, (_fit(before), limit)).fetchall()
        return list(map(_record, found))

    def checkpoint(self) -> bool:
        """Move the write-ahead log into the database and empty it; False, at once, when a reader was in the way."""
        with self._told(), self._writing:
            self._writer.execute("PRAGMA busy_timeout = 0")
            try:
                busy, _, _ = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                self._writer.execute(f"PRAGMA busy_timeout = {int(1000 * BUSY_TIMEOUT_S)}")
        return not busy

    def sizes(self) -> tuple[int, int]:
        """Bytes of the database and of its write-ahead log. Raises StorageError when they are gone."""
        wal = self._path.with_name(self._path.name + "-wal")
        with told(self._path):
            return self._path.stat().st_size, wal.stat().st_size if wal.exists() else 0

    def close(self) -> None:
        with self._reading:
            self._reader.close()
        with self._writing:
            self._writer.close()

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        for pragma in (
            *("journal_mode = WAL", "synchronous = FULL"),
            *(f"journal_size_limit = {JOURNAL_LIMIT_BYTES}", f"wal_autocheckpoint = {CHECKPOINT_PAGES}"),
        ):
            db.execute(f"PRAGMA {pragma}")
        return db

    def _prepare(self) -> None:
        """Check the file, and create the tables in a new one."""
        (version,) = self._writer.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise StorageError(
                f"the index was written by a newer version: schema {SCHEMA_VERSION} is known here, got schema={version}, "
                f"path={str(self._path)!r}: use that version, or move the file away to have it rebuilt"
            )
        if 0 < version < SCHEMA_VERSION:
            raise CorruptIndexError(
                f"the index was written by an older version, got schema={version}, path={str(self._path)!r}"
            )
        problems = self._writer.execute("PRAGMA quick_check(1)").fetchall()
        if problems != [("ok",)]:
            raise CorruptIndexError(f"the index is damaged: {problems[0][0]}, got path={str(self._path)!r}")
        if version == 0:
            self._writer.executescript(_SCHEMA)
        self._writer.execute(_FORGET_CONSUMERS, (CONSUMERS_KEPT,))
        self._writer.execute(_LEASES)

    @contextmanager
    def _transaction(self, *, durable: bool) -> Iterator[sqlite3.Connection]:
        """durable: sync it, and with it all before."""
        with self._told(), self._writing:
            if durable != self._durable:
                self._writer.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._durable = durable
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                # A commit that failed for want of space has already been taken back.
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            corrupt = getattr(error, "sqlite_errorcode", 0) & 0xFF in _CORRUPT
            advice = "restart the hub, which rebuilds it" if corrupt else "see that its disk has space and is writable"
            kind = CorruptIndexError if corrupt else StorageError
            raise kind(f"the index failed: {error}, got path={str(self._path)!r}: {advice}") from error


def open_index(path: Path) -> tuple[Index, Path | None]:
    """The index at `path`, new if missing. A damaged one, or one of an older schema, is moved aside
    first; returns where to, else None."""
    try:
        return Index(path), None
    except CorruptIndexError:
        number = 1
        while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
            number += 1
        for suffix in ("-wal", "-shm", ""):
            part = path.with_name(path.name + suffix)
            if part.exists():
                part.rename(aside.with_name(aside.name + suffix))
        return Index(path), aside


def _marks(count: int) -> str:
    return ", ".join("?" * count)


def _insert(db: sqlite3.Connection, into: str, rows: Sequence[Sequence[object]]) -> None:
    """Add rows by few statements: with each the thread lets go of Python's lock, and gets it back as late as others like."""
    if not rows:
        return
    at_once = PARAMETERS_AT_ONCE // len(rows[0])
    row = f"({_marks(len(rows[0]))})"
    for start in range(0, len(rows), at_once):
        some = rows[start : start + at_once]
        db.execute(f"{into} VALUES {', '.join([row] * len(some))}", tuple(chain.from_iterable(some)))


def _fit(number: int) -> int:
    """A number that a worker chose freely, as SQLite can hold it."""
    return number if number < MAX_INTEGER else MAX_INTEGER


def _raise_state(db: sqlite3.Connection, name: str, value: int) -> None:
    sql = "INSERT INTO state VALUES (?, ?) ON CONFLICT(name) DO UPDATE SET value = max(value, excluded.value)"
    db.execute(sql, (name, value))


def _values(record: IndexedRecord) -> tuple[int | str, ...]:
    version, place = record.version, record.place
    return (
        *(record.cursor, record.kind, record.agent, _fit(record.step), _fit(version.epoch), _fit(version.step)),
        *(record.stored_at_ns, msgspec.json.encode(record.prompt_ids).decode()),
        *(place.segment, place.offset, place.nbytes),
    )


def _record(values: tuple[int, Kind, AgentName, int, int, int, int, str, int, int, int]) -> IndexedRecord:
    cursor, kind, agent, step, epoch, version, stored_at_ns, prompt_ids, *place = values
    return IndexedRecord(
        cursor=Cursor(cursor),
        kind=kind,
        agent=agent,
        step=step,
        version=Version(epoch, version),
        stored_at_ns=stored_at_ns,
        prompt_ids=tuple(map(PromptId, msgspec.json.decode(prompt_ids))),
        place=Place(*place),
    )
