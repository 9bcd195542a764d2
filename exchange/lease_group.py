"""One group's share of the stream: which records wait, which are out, which have come back, what became of the rest.

Records wait in lines by producer and kind, as these two decide whom a record may reach. A line is taken from its front, so
where it was last taken from, and the few records that are out or have come back, say all of its past.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from exchange.lease_messages import DeadLetter, Lease
from exchange.lease_rows import GROUP, LETTERS, StoredGroup, StoredHeld, StoredLetters, encode_row
from exchange.selection import ROW_HEADER_BYTES
from exchange.stats import GroupStats
from exchange.store import Record
from exchange.types import START, AgentName, Cursor, Kind
from exchange.wire import MAX_BODY_BYTES

__all__ = ["MAX_DELIVERIES", "Group", "Held", "Missing"]

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
Fetch = Callable[[Cursor], Record | None]


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


class Missing(NamedTuple):
    """A record in line that memory has let go."""

    agent: AgentName
    kind: Kind
    cursor: Cursor


class Group:
    """The records of some kinds (and producers), each of which is to be done once by any worker.

    matching = done + leased + waiting + dead + lost holds at all times. lost: let go by the store before anybody took it.
    """

    def __init__(
        self,
        name: str,
        kinds: Collection[Kind],
        agents: Collection[AgentName] | None,
        *,
        limit_bytes: int,
        settled_to: Cursor = START,
        durable: bool = False,
    ) -> None:
        """settled_to: no record up to here is of this group. durable: note what has changed, for `changes`."""
        self.name = name
        self.kinds = frozenset(kinds)
        self.agents = None if agents is None else frozenset(agents)
        self.letters: deque[DeadLetter] = deque(maxlen=MAX_DEAD_LETTERS)
        self._limit_bytes = limit_bytes
        self._lines: defaultdict[_Line, deque[Cursor]] = defaultdict(deque)
        self._leased: dict[Cursor, Held] = {}
        self._returned: dict[Cursor, Held] = {}
        self._matching = self._done = self._dead = self._lost = self._deliveries = 0
        self._taken: dict[_Line, Cursor] = {}
        self._newest = settled_to
        self._durable = durable
        # Where the last `take` ended, as the record is not in memory.
        self.missing: Missing | None = None
        self._changed: set[int] = {GROUP} if durable else set()

    def differs(self, lease: Lease) -> bool:
        """Whether a request describes another share than this."""
        return self.kinds != set(lease.kinds) or self.agents != (None if lease.agents is None else set(lease.agents))

    def offer(self, record: Record) -> bool:
        """Put a new record in line if it belongs to this group."""
        if record.kind not in self.kinds or (self.agents is not None and record.agent not in self.agents):
            return False
        self.wait(record.agent, record.kind, record.cursor)
        return True

    def wait(self, agent: AgentName, kind: Kind, cursor: Cursor) -> None:
        """Put one of this group's records in line, unless it was taken from there before."""
        self._newest = cursor
        if cursor > self._taken.get((agent, kind), START):
            self._matching += 1
            self._lines[agent, kind].append(cursor)

    def lose(self, record: Record) -> None:
        """The store has let its oldest record go; who holds it has it still."""
        line = self._lines.get((record.agent, record.kind))
        if line and line[0] == record.cursor:
            self._lose_first(record.agent, record.kind)

    def take(
        self, worker: AgentName, count: int, max_bytes: int, *, allowed: Allowed, fetch: Fetch, now: float
    ) -> dict[Cursor, Held]:
        """Hand out up to `count` records: what has come back first, then by cursor. max_bytes: of more than one."""
        self.missing = None
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
                self._leave_line(held.record.agent, held.record.kind)
            self._note(cursor)
            held.deliveries += 1
            self._deliveries += 1
            self._leased[cursor] = held
        return taken

    def done(self, cursor: Cursor) -> None:
        """A record that is out is settled, for good."""
        del self._leased[cursor]
        self._note(cursor)
        self._done += 1

    def give_back(self, cursor: Cursor) -> None:
        """A record that is out comes back as if it had not been handed out."""
        held = self._returned[cursor] = self._leased.pop(cursor)
        self._note(cursor)
        held.deliveries -= 1

    def cannot_read(self, cursor: Cursor, worker: AgentName, now: float) -> None:
        """As give_back; this worker is offered the record again only after a while."""
        self.give_back(cursor)
        unreadable = self._returned[cursor].unreadable
        retry_s = min(2 * unreadable[worker].retry_s, MAX_RETRY_S) if worker in unreadable else RETRY_S
        unreadable[worker] = _Unreadable(retry_s=retry_s, again_at=now + retry_s)

    def fail(self, cursor: Cursor, worker: AgentName, reason: str, detail: str = "") -> None:
        """A delivery has failed: the record is delivered again, or given up after so many."""
        self.come_back(cursor, self._leased.pop(cursor), worker, reason, detail)

    def come_back(self, cursor: Cursor, held: Held, worker: AgentName, reason: str, detail: str = "") -> None:
        """A record of this group is in nobody's hands after a delivery that failed."""
        if held.deliveries < MAX_DELIVERIES:
            self._returned[cursor] = held
            return
        self._note(cursor, LETTERS)
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

    def again_at(self, worker: AgentName, after: float) -> float:
        """When, behind `after`, this worker is next offered a record that it could not read."""
        waits = (held.unreadable[worker].again_at for held in self._returned.values() if worker in held.unreadable)
        return min((again_at for again_at in waits if again_at > after), default=float("inf"))

    def looked(self, missing: Missing, to: Cursor, found: Collection[Cursor]) -> None:
        """From the missing record of a line to `to` there are these records and no others."""
        line = self._lines[missing.agent, missing.kind]
        there = [cursor for cursor in line if not missing.cursor <= cursor <= to or cursor in found]
        if len(there) < len(line):
            self._note()
            self._lost += len(line) - len(there)
            self._lines[missing.agent, missing.kind] = deque(there)

    def recover(self, stored: StoredGroup, letters: Iterable[DeadLetter]) -> None:
        """Go on where the group of an earlier hub ended; its records are to be given to `wait` and `recover_held`."""
        self._done, self._dead, self._lost, self._deliveries = stored.done, stored.dead, stored.lost, stored.deliveries
        self._matching = stored.done + stored.dead + stored.lost
        self._taken = {(agent, kind): cursor for agent, kind, cursor in stored.taken}
        self.letters.extend(letters)

    def recover_held(self, cursor: Cursor, record: Record | None, deliveries: int) -> None:
        """A record that was handed out comes again, if there is still one and it has not failed too often."""
        self._matching += 1
        self._note(cursor)
        if record is None:
            self._lost += 1
        else:
            self.come_back(cursor, Held(record=record, deliveries=deliveries), AgentName(""), "interrupted")

    def changes(self) -> dict[tuple[str, int], bytes | None]:
        """What has changed since the last call, whole, for the disk."""
        changed, self._changed = self._changed, set()
        return {(self.name, key): self._row(key) for key in changed}

    def lowest(self) -> Cursor | None:
        """The first record that was handed out and is not settled."""
        return min((*self._leased, *self._returned), default=None)

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
        lines = [
            zip(line, repeat(agent), repeat(kind), strict=False)
            for (agent, kind), line in self._lines.items()
            if kind not in useless and allowed(agent, kind)
        ]
        for cursor, agent, kind in heapq.merge(*lines):
            record = fetch(cursor)
            if record is None:
                self.missing = Missing(agent, kind, cursor)
                return
            yield cursor, Held(record=record)

    def _leave_line(self, agent: AgentName, kind: Kind) -> None:
        self._taken[agent, kind] = self._lines[agent, kind].popleft()

    def _lose_first(self, agent: AgentName, kind: Kind) -> None:
        self._leave_line(agent, kind)
        self._note()
        self._lost += 1

    def _row(self, key: int) -> bytes | None:
        if key == LETTERS:
            return encode_row(StoredLetters(letters=tuple(self.letters)))
        if key != GROUP:
            held = self._leased.get(Cursor(key)) or self._returned.get(Cursor(key))
            return None if held is None else encode_row(StoredHeld(kind=held.record.kind, deliveries=held.deliveries))
        stats = self.stats()
        first = min((line[0] for line in self._lines.values() if line), default=Cursor(self._newest + 1))
        return encode_row(
            StoredGroup(
                kinds=stats.kinds,
                agents=stats.agents,
                done=stats.done,
                dead=stats.dead,
                lost=stats.lost,
                deliveries=stats.deliveries,
                taken=tuple((agent, kind, cursor) for (agent, kind), cursor in self._taken.items()),
                settled_to=Cursor(first - 1),
            )
        )

    def _note(self, *keys: int) -> None:
        if self._durable:
            self._changed.update((GROUP, *keys))

    def _useless(self, worker: AgentName) -> set[Kind]:
        """Kinds of which this worker has given back so much as unreadable that it gets no more for now."""
        counts, sizes = Counter[Kind](), Counter[Kind]()
        for held in self._returned.values():
            if worker in held.unreadable:
                counts[held.record.kind] += 1
                sizes[held.record.kind] += held.record.encoded.nbytes
        return {kind for kind in counts if counts[kind] >= MAX_UNREADABLE or sizes[kind] > self._limit_bytes}
