"""Gathers whose rows the hub's memory no longer has: they are read from the disk, a piece at a time.

As with commits, the hub says what is to be read, whoever owns the disk reads it outside of the event loop, and what it
found comes back. One reading is on its way at a time, which bounds what the hub holds beside its memory; members take turns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from exchange.errors import StorageError
from exchange.index_rows import IndexedRecord
from exchange.matching import Matcher
from exchange.members import Member
from exchange.messages import Gather
from exchange.selection import ROW_HEADER_BYTES
from exchange.store import Record
from exchange.types import START, Cursor, Kind, PromptId
from exchange.wire import MAX_BODY_BYTES

__all__ = ["Chunk", "Readable", "Reading", "Replay", "Replays", "load_or_log", "read_chunk"]

_log = logging.getLogger(__name__)

# What one reading may look at and load, so that the next member's turn comes soon.
INDEXED_A_TURN = 500
BYTES_A_TURN = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The records behind the gather's `after` that it gets, up to cursor `to`; behind it memory has all."""

    matcher: Matcher
    to: Cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What a reading found. cursor: everything up to here was looked at. withheld: matched, and no edge allows it.

    lost_to: up to here records that were asked for may be missing, 0 for none.
    """

    records: tuple[Record, ...]
    cursor: Cursor
    withheld: int
    lost_to: Cursor


class Readable(Protocol):
    """A store of records that any thread may read."""

    @property
    def dropped_to(self) -> Cursor:
        """Retention has removed records up to here."""
        ...

    def select(
        self, kinds: Iterable[Kind], prompt_ids: Iterable[PromptId] | None, after: Cursor, limit: int
    ) -> list[IndexedRecord]:
        """At most `limit` records behind `after`, in cursor order."""
        ...

    def stored_at(self, found: IndexedRecord) -> float:
        """When a record was stored, on the hub's clock."""
        ...

    def load(self, found: IndexedRecord) -> Record | None:
        """A record, None when it is gone by now. Raises StorageError when it is damaged."""
        ...


def read_chunk(store: Readable, reading: Reading) -> Chunk:
    """Read once. What is damaged, or goes meanwhile, is left out and told. Raises StorageError when the index fails."""
    matcher, gather = reading.matcher, reading.matcher.gather
    records: list[Record] = []
    payload_bytes = header_bytes = withheld = 0
    found = store.select(gather.kinds, gather.prompt_ids, gather.after, INDEXED_A_TURN)
    # Looked up behind the selection: what was removed before it is counted here. A reader from the start has no place yet.
    lost_to = store.dropped_to if START < gather.after < store.dropped_to else START
    looked_to = gather.after
    for each in found:
        if each.cursor > reading.to:
            looked_to = reading.to
            break
        if matcher.matches(each.agent, each.step, each.version, store.stored_at(each)):
            if not matcher.allowed(each.agent, each.kind):
                withheld += 1
            elif records and payload_bytes + each.place.nbytes > min(gather.max_bytes, BYTES_A_TURN):
                break
            elif (record := load_or_log(store, each)) is None:
                lost_to = each.cursor
            else:
                header_bytes += len(record.encoded.body) + ROW_HEADER_BYTES
                if records and header_bytes > MAX_BODY_BYTES:
                    break
                payload_bytes += record.encoded.nbytes
                records.append(record)
        looked_to = each.cursor
    else:
        looked_to = looked_to if len(found) == INDEXED_A_TURN else reading.to
    return Chunk(records=tuple(records), cursor=looked_to, withheld=withheld, lost_to=lost_to)


def load_or_log(store: Readable, found: IndexedRecord) -> Record | None:
    """A record, or None when it is gone or damaged."""
    try:
        return store.load(found)
    except StorageError as error:
        _log.error("a reader goes on without a record: %s", error)
        return None


@dataclass(slots=True, kw_only=True)
class Replay:
    """A gather that waits for the disk. lost_to: as found so far."""

    member: Member
    gather: Gather
    request_id: int
    deadline: float
    lost_to: Cursor = START


class Replays:
    """What is to be read, and what is on its way. Bounded by the gathers that a worker may have waiting."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[bytes, int], Replay] = {}
        self._reading: Replay | None = None
        self._turns: dict[bytes, int] = {}
        self._turn = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def of(self, member: Member) -> int:
        """How many a worker has."""
        return sum(replay.member is member for replay in self._waiting.values())

    def add(self, replay: Replay) -> None:
        self._waiting[replay.member.peer, replay.request_id] = replay

    def cancel(self, peer: bytes, request_id: int) -> None:
        self._waiting.pop((peer, request_id), None)

    def forget(self, peer: bytes) -> None:
        for key in [key for key in self._waiting if key[0] == peer]:
            del self._waiting[key]

    def take(self, ready: Callable[[Member], bool]) -> Replay | None:
        """The next to read, of the ready member who has waited longest; None while one is on its way."""
        if self._reading is not None:
            return None
        if not self._waiting:
            # Turns only count among those who wait; and so no peer that is long gone stays here.
            self._turns.clear()
        replays = [replay for replay in self._waiting.values() if ready(replay.member)]
        if not replays:
            return None
        self._reading = min(replays, key=lambda replay: self._turns.get(replay.member.peer, 0))
        self._turn += 1
        self._turns[self._reading.member.peer] = self._turn
        return self._reading

    def done(self) -> Replay | None:
        """The one that was read, now in nobody's hands; None when it is no longer wanted, or was asked for anew."""
        replay, self._reading = self._reading, None
        if replay is None or self._waiting.get(key := (replay.member.peer, replay.request_id)) is not replay:
            return None
        return self._waiting.pop(key)
