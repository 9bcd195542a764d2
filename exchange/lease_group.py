"""One group's share of the stream: which records wait, which are out, which have come back, what became of the rest.

Records wait in lines by producer and kind, as these two decide whom a record may reach. A line is taken from its front, so
where it was last taken from, and the few records that are out or have come back, say all of its past.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from exchange.lease_messages import DeadLetter, Lease
from exchange.selection import ROW_HEADER_BYTES
from exchange.stats import GroupStats
from exchange.store import Record
from exchange.types import AgentName, Cursor, Kind
from exchange.wire import MAX_BODY_BYTES

__all__ = ["MAX_DELIVERIES", "Group", "Held"]

MAX_DELIVERIES = 5
# From this delivery on a record is handed out alone, so that one that brings its worker down takes no other with it.
ALONE_FROM = 3
MAX_DEAD_LETTERS = 128
MAX_LETTER_CHARS = 200
# A worker that cannot read so many records of a kind gets no new ones of it until others have taken those.
MAX_UNREADABLE = 64
# A worker that cannot read a record is offered it again after this time, which doubles each time.
RETRY_S = 1.0
MAX_RETRY_S = 60.0

_Line = tuple[AgentName, Kind]
Allowed = Callable[[AgentName, Kind], bool]
Fetch = Callable[[Cursor], Record]


@dataclass(slots=True, kw_only=True)
class _Unreadable:
    """A worker does not know a record's type. again_at: when it is offered the record again."""

    retry_s: float
    again_at: float


@dataclass(slots=True, kw_only=True)
class Held:
    """A record that was handed out and is not settled; kept here also when the store lets it go.

    deliveries: those that count. unreadable: for whom.
    """

    record: Record
    deliveries: int = 0
    unreadable: dict[AgentName, _Unreadable] = field(default_factory=dict)


class Group:
    """The records of some kinds (and producers), each of which is to be done once by any worker.

    matching = done + leased + waiting + dead + lost holds at all times. lost: let go by the store before anybody took it.
    """

    def __init__(self, name: str, kinds: Collection[Kind], agents: Collection[AgentName] | None, *, limit_bytes: int) -> None:
        self.name = name
        self.kinds = frozenset(kinds)
        self.agents = None if agents is None else frozenset(agents)
        self.letters: deque[DeadLetter] = deque(maxlen=MAX_DEAD_LETTERS)
        self._limit_bytes = limit_bytes
        self._lines: defaultdict[_Line, deque[Cursor]] = defaultdict(deque)
        self._leased: dict[Cursor, Held] = {}
        self._returned: dict[Cursor, Held] = {}
        self._matching = self._done = self._dead = self._lost = self._deliveries = 0

    def differs(self, lease: Lease) -> bool:
        """Whether a request describes another share than this."""
        return self.kinds != set(lease.kinds) or self.agents != (None if lease.agents is None else set(lease.agents))

    def offer(self, record: Record) -> bool:
        """Put a new record in line if it belongs to this group."""
        if record.kind not in self.kinds or (self.agents is not None and record.agent not in self.agents):
            return False
        self._matching += 1
        self._lines[record.agent, record.kind].append(record.cursor)
        return True

    def lose(self, record: Record) -> None:
        """The store has let its oldest record go; who holds it has it still."""
        line = self._lines.get((record.agent, record.kind))
        if line and line[0] == record.cursor:
            line.popleft()
            self._lost += 1

    def take(
        self, worker: AgentName, count: int, max_bytes: int, *, allowed: Allowed, fetch: Fetch, now: float
    ) -> dict[Cursor, Held]:
        """Hand out up to `count` records: what has come back first, then by cursor. max_bytes: of more than one."""
        taken: dict[Cursor, Held] = {}
        nbytes = header_bytes = 0
        for cursor, held in self._candidates(worker, allowed, fetch, now):
            alone = held.deliveries + 1 >= ALONE_FROM
            nbytes += held.record.encoded.nbytes
            header_bytes += len(held.record.encoded.body) + ROW_HEADER_BYTES
            if taken and (alone or nbytes > max_bytes or header_bytes > MAX_BODY_BYTES):
                break
            taken[cursor] = held
            if alone or len(taken) >= count:
                break
        for cursor, held in taken.items():
            if self._returned.pop(cursor, None) is None:
                self._lines[held.record.agent, held.record.kind].popleft()
            held.deliveries += 1
            self._deliveries += 1
            self._leased[cursor] = held
        return taken

    def done(self, cursor: Cursor) -> None:
        """A record that is out is settled, for good."""
        del self._leased[cursor]
        self._done += 1

    def give_back(self, cursor: Cursor) -> None:
        """A record that is out comes back as if it had not been handed out."""
        held = self._returned[cursor] = self._leased.pop(cursor)
        held.deliveries -= 1

    def cannot_read(self, cursor: Cursor, worker: AgentName, now: float) -> None:
        """As give_back; this worker is offered the record again only after a while."""
        self.give_back(cursor)
        unreadable = self._returned[cursor].unreadable
        retry_s = min(2 * unreadable[worker].retry_s, MAX_RETRY_S) if worker in unreadable else RETRY_S
        unreadable[worker] = _Unreadable(retry_s=retry_s, again_at=now + retry_s)

    def fail(self, cursor: Cursor, worker: AgentName, reason: str, detail: str = "") -> None:
        """A delivery has failed: the record is delivered again, or given up after so many."""
        held = self._leased.pop(cursor)
        if held.deliveries < MAX_DELIVERIES:
            self._returned[cursor] = held
            return
        self._dead += 1
        self.letters.append(
            DeadLetter(
                cursor=cursor,
                kind=held.record.kind,
                agent=held.record.agent,
                deliveries=held.deliveries,
                reason=reason,
                detail=detail if len(detail) <= MAX_LETTER_CHARS else detail[:MAX_LETTER_CHARS] + "…",
                worker=worker,
            )
        )

    def started_anew(self, worker: AgentName) -> None:
        """A new process of this worker may read what the old one could not."""
        for held in self._returned.values():
            held.unreadable.pop(worker, None)

    def again_at(self, worker: AgentName) -> float:
        """When this worker is next offered a record that it could not read."""
        waits = (held.unreadable[worker].again_at for held in self._returned.values() if worker in held.unreadable)
        return min(waits, default=float("inf"))

    def stats(self) -> GroupStats:
        return GroupStats(
            kinds=tuple(sorted(self.kinds)),
            agents=None if self.agents is None else tuple(sorted(self.agents)),
            matching=self._matching,
            done=self._done,
            leased=len(self._leased),
            waiting=len(self._returned) + sum(map(len, self._lines.values())),
            dead=self._dead,
            lost=self._lost,
            deliveries=self._deliveries,
        )

    def _candidates(self, worker: AgentName, allowed: Allowed, fetch: Fetch, now: float) -> Iterator[tuple[Cursor, Held]]:
        for cursor, held in sorted(self._returned.items(), key=lambda item: item[0]):
            unreadable = held.unreadable.get(worker)
            if allowed(held.record.agent, held.record.kind) and (unreadable is None or unreadable.again_at <= now):
                yield cursor, held
        useless = self._useless(worker)
        lines = (line for (agent, kind), line in self._lines.items() if kind not in useless and allowed(agent, kind))
        for cursor in heapq.merge(*lines):
            yield cursor, Held(record=fetch(cursor))

    def _useless(self, worker: AgentName) -> set[Kind]:
        """Kinds of which this worker has given back so much as unreadable that it gets no more for now."""
        counts, sizes = Counter[Kind](), Counter[Kind]()
        for held in self._returned.values():
            if worker in held.unreadable:
                counts[held.record.kind] += 1
                sizes[held.record.kind] += held.record.encoded.nbytes
        return {kind for kind in counts if counts[kind] >= MAX_UNREADABLE or sizes[kind] > self._limit_bytes}
