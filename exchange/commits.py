"""Publications, and cursors of consumers, on their way to the disk. They are committed in groups; who asks for it is
answered after that.

The hub puts in what it has admitted; whoever owns the disk takes a group, writes it outside of the event loop, and says how
it went. One group is on its way at a time, so that the order on disk is the order of cursors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from exchange.consumers import ConsumerKey
from exchange.lease_commits import LeaseCommits
from exchange.messages import Accepted, Committed, Refused, refused
from exchange.store import Record
from exchange.types import AgentName, Cursor, Kind
from exchange.wire import Outgoing

__all__ = ["Commits", "Publication"]

# Unanswered messages about one consumer: it has one cursor, so there is no use in more.
MAX_TELLING = 16


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """One admitted record that is not on disk yet. peer: the incarnation that sent it, under this seq.

    waiters: request ids that are answered when it is.
    """

    record: Record
    peer: bytes
    seq: int
    waiters: list[int] = []


@dataclass(slots=True)
class _Told:
    """How far a consumer is. waiters: who is answered when that is on disk."""

    cursor: Cursor
    waiters: list[tuple[bytes, int]] = field(default_factory=list)


_Answer = Callable[[Publication], Accepted | Refused]


class Commits:
    """What waits for the disk. limit_bytes: above it nobody is answered before the disk has caught up."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: dict[tuple[bytes, int], Publication] = {}
        self._written: dict[tuple[bytes, int], Publication] = {}
        self._telling: dict[ConsumerKey, _Told] = {}
        self._told: dict[ConsumerKey, _Told] = {}
        self.leases = LeaseCommits()
        self._bytes_of: Counter[bytes] = Counter()
        self.waiting_bytes = 0
        self.committed = 0
        self.failed = 0

    def __len__(self) -> int:
        """Publications, consumers and changes of leases that no group has taken yet."""
        return len(self._waiting) + len(self._telling) + len(self.leases)

    @property
    def told(self) -> Mapping[ConsumerKey, Cursor]:
        """How far consumers are, by the group that is on its way to the disk."""
        return {key: told.cursor for key, told in self._told.items()}

    def counts(self) -> Counter[tuple[AgentName, Kind]]:
        """Records that are not on disk yet, by producer and kind."""
        publications = (*self._waiting.values(), *self._written.values())
        return Counter((each.record.agent, each.record.kind) for each in publications)

    @property
    def written(self) -> Sequence[Publication]:
        """The group that is on its way to the disk."""
        return tuple(self._written.values())

    @property
    def behind(self) -> bool:
        """The disk is so far behind that answers wait for it."""
        return self.waiting_bytes > self._limit_bytes

    def over_credit(self, peer: bytes) -> bool:
        """Whether a worker has more waiting than one that keeps to its credit: as much unanswered behind what was."""
        return self._bytes_of[peer] > 2 * self._limit_bytes

    def add(self, record: Record, *, peer: bytes, seq: int, waiter: int | None) -> None:
        """Queue a record; `waiter` is the request to answer when it is on disk."""
        publication = Publication(record=record, peer=peer, seq=seq, waiters=[] if waiter is None else [waiter])
        self._waiting[peer, seq] = publication
        self._bytes_of[peer] += record.encoded.nbytes
        self.waiting_bytes += record.encoded.nbytes

    def join(self, peer: bytes, seq: int, waiter: int) -> bool:
        """Have another request for a queued record answered with it; False where it is not queued."""
        publication = self._waiting.get((peer, seq)) or self._written.get((peer, seq))
        if publication is not None:
            publication.waiters.append(waiter)
        return publication is not None

    def tell(self, key: ConsumerKey, cursor: Cursor, *, peer: bytes, waiter: int) -> bool:
        """Queue how far a consumer is, never less than it was; False when too many wait for that already."""
        told = self._telling.setdefault(key, _Told(cursor))
        told.cursor = max(told.cursor, cursor)
        if len(told.waiters) < MAX_TELLING:
            told.waiters.append((peer, waiter))
            return True
        return False

    def take(self) -> Sequence[Publication]:
        """The next group, in the order of cursors, with `told`; none while one is on its way."""
        if self._written or self._told or self.leases.rows:
            return ()
        self.leases.take()
        self._written, self._waiting = self._waiting, {}
        self._told, self._telling = self._telling, {}
        return tuple(self._written.values())

    def done(self, tell: Callable[[ConsumerKey, Cursor], Cursor]) -> list[Outgoing]:
        """The group is on disk: the answers that waited for it. tell: moves a consumer forward."""
        self.committed += len(self._written)
        told, self._told = self._told, {}
        answers = [
            Outgoing(peer=peer, message=Committed(cursor=cursor), request_id=waiter)
            for cursor, waiters in [(tell(key, each.cursor), each.waiters) for key, each in told.items()]
            for peer, waiter in waiters
        ]
        return answers + self._answer(lambda each: Accepted(seq=each.seq, cursor=each.record.cursor))

    def fail(self, reason: str) -> list[Outgoing]:
        """The group could not be written: who waited for it is refused, the others' records stay in memory alone."""
        self.failed += len(self._written)
        told, self._told = self._told, {}
        refusal = refused("storage", reason)
        waiters = [waiter for each in told.values() for waiter in each.waiters]
        answers = [Outgoing(peer=peer, message=refusal, request_id=waiter) for peer, waiter in waiters]
        return answers + self._answer(lambda publication: refusal)

    def _answer(self, message: _Answer) -> list[Outgoing]:
        group, self._written = self._written.values(), {}
        for publication in group:
            self._bytes_of[publication.peer] -= publication.record.encoded.nbytes
            self.waiting_bytes -= publication.record.encoded.nbytes
        self._bytes_of = +self._bytes_of
        return [
            Outgoing(peer=publication.peer, message=message(publication), request_id=waiter)
            for publication in group
            for waiter in publication.waiters
        ]
