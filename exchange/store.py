"""The hub's memory of records: append, select by cursor, let the oldest go for room or age.

Cursors count appended records from 1, so that one number serves live tail and replay. An index by kind and one by kind and
prompt hold the same records in the same order; as only the oldest ever go, each index loses them from its front.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from exchange.stats import RecordStats
from exchange.types import START, AgentName, Cursor, Kind, PromptId, Version
from exchange.wire import Encoded

__all__ = ["MemoryStore", "Record"]

# What a record costs beside its bytes, and each prompt id of it (measured: struct, index entries, dictionary slots).
OVERHEAD_BYTES = 750
PROMPT_BYTES = 360
FIRST_CURSOR = Cursor(1)

_Key = tuple[Kind, PromptId | None]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One admitted record. stored_at: seconds on the hub's clock."""

    cursor: Cursor
    kind: Kind
    agent: AgentName
    prompt_ids: tuple[PromptId, ...]
    step: int
    version: Version
    encoded: Encoded
    stored_at: float

    @property
    def cost_bytes(self) -> int:
        return self.encoded.nbytes + OVERHEAD_BYTES + PROMPT_BYTES * len(self.prompt_ids)


class _Line:
    """Cursors in order, appended behind and dropped in front."""

    __slots__ = ("_cursors", "_head")

    def __init__(self) -> None:
        self._cursors: list[Cursor] = []
        self._head = 0

    def append(self, cursor: Cursor) -> None:
        self._cursors.append(cursor)

    def drop_first(self) -> bool:
        """Drop the first cursor; True when none is left."""
        self._head += 1
        if 2 * self._head >= len(self._cursors):
            del self._cursors[: self._head]
            self._head = 0
        return not self._cursors

    def behind(self, after: Cursor) -> Iterator[Cursor]:
        start = bisect_right(self._cursors, after, lo=self._head)
        return (self._cursors[index] for index in range(start, len(self._cursors)))


@dataclass(slots=True)
class _Share:
    """What one producer's records of one kind came to. lost_to: cursor of the last that went."""

    stored: int = 0
    evicted: int = 0
    expired: int = 0
    recalled: int = 0
    lost_to: Cursor = START


class MemoryStore:
    """Records within `memory_bytes`; the oldest go first. Counts what it let go. on_drop: is told of each such record."""

    def __init__(self, *, memory_bytes: int, max_age_s: float | None, first_cursor: Cursor = FIRST_CURSOR) -> None:
        self._memory_bytes = memory_bytes
        self._max_age_s = max_age_s
        self._records: OrderedDict[Cursor, Record] = OrderedDict()
        self._lines: dict[_Key, _Line] = {}
        self.stored_bytes = 0
        self.newest = self._before = Cursor(first_cursor - 1)
        self.on_drop: Callable[[Record], None] = lambda record: None
        self._shares: defaultdict[tuple[AgentName, Kind], _Share] = defaultdict(_Share)
        self.evicted_to = Cursor(0)
        self.evicted = 0
        self.expired = 0
        self.recalled = 0

    def __len__(self) -> int:
        return len(self._records)

    def append(self, record: Record) -> None:
        """Store a record whose cursor is `newest + 1`, then make room."""
        self.newest = record.cursor
        self._records[record.cursor] = record
        self.stored_bytes += record.cost_bytes
        self._shares[record.agent, record.kind].stored += 1
        for key in _keys(record):
            self._lines.setdefault(key, _Line()).append(record.cursor)
        while self.stored_bytes > self._memory_bytes:
            self._drop_oldest().evicted += 1
            self.evicted += 1

    def expire(self, now: float) -> None:
        """Let go what is older than the age limit."""
        while self._max_age_s is not None and self._records and now - self._oldest.stored_at > self._max_age_s:
            self._drop_oldest().expired += 1
            self.expired += 1

    def select(self, kinds: Iterable[Kind], prompt_ids: Iterable[PromptId] | None, after: Cursor) -> Iterable[Record]:
        """Records of these kinds (and on these prompts) behind `after`, in cursor order, each once."""
        prompts: Iterable[PromptId | None] = (None,) if prompt_ids is None else prompt_ids
        there = [kind for kind in kinds if (kind, None) in self._lines]
        lines = [self._lines[key] for kind in there for prompt in prompts if (key := (kind, prompt)) in self._lines]
        if len(lines) == 1:
            return map(self._records.__getitem__, lines[0].behind(after))
        found = {cursor for line in lines for cursor in line.behind(after)}
        return map(self._records.__getitem__, sorted(found))

    def get(self, cursor: Cursor) -> Record | None:
        """The record at this cursor, if it is here."""
        return self._records.get(cursor)

    def __iter__(self) -> Iterator[Record]:
        return iter(tuple(self._records.values()))

    def recall(self, records: Iterable[Record], *, missing_to: Cursor) -> None:
        """Take back records of an earlier hub, in the order of their cursors, all below the first of this one; up to
        missing_to some are not among them."""
        newest = self.newest
        for record in records:
            self.append(record)
            self._shares[record.agent, record.kind].recalled += 1
            self.recalled += 1
        self.newest, self._before = newest, missing_to

    def lost_to(self, wanted: Callable[[AgentName, Kind], bool]) -> Cursor:
        """Up to where records of the wanted producers and kinds may be missing: let go, or of an earlier hub."""
        lost = (share.lost_to for (agent, kind), share in self._shares.items() if wanted(agent, kind))
        return max(self._before, *lost, START)

    def stats(self, committing: Counter[tuple[AgentName, Kind]]) -> dict[AgentName, dict[Kind, RecordStats]]:
        """What became of the records of each producer and kind. committing: those that come here once they are on disk."""
        stats: defaultdict[AgentName, dict[Kind, RecordStats]] = defaultdict(dict)
        for agent, kind in {**self._shares, **committing}:
            share = self._shares.get((agent, kind), _Share())
            stats[agent][kind] = RecordStats(
                stored=share.stored,
                evicted=share.evicted,
                expired=share.expired,
                recalled=share.recalled,
                committing=committing[agent, kind],
            )
        return dict(stats)

    @property
    def _oldest(self) -> Record:
        return next(iter(self._records.values()))

    def _drop_oldest(self) -> _Share:
        _, record = self._records.popitem(last=False)
        self.stored_bytes -= record.cost_bytes
        share = self._shares[record.agent, record.kind]
        share.stored -= 1
        self.evicted_to = share.lost_to = record.cursor
        for key in _keys(record):
            if self._lines[key].drop_first():
                del self._lines[key]
        self.on_drop(record)
        return share


def _keys(record: Record) -> list[_Key]:
    return [(record.kind, None), *((record.kind, prompt) for prompt in dict.fromkeys(record.prompt_ids))]
