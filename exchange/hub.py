"""The hub as a state machine: messages and the clock go in, messages come out, no socket and no task.

A record goes through admission, deduplication by (worker, epoch, seq), the store, and then to the gathers that wait for
it. What the hub holds is bounded: records by memory_bytes, what a worker may have unread by credit_bytes, waiting gathers
by a fixed number for each worker.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

from exchange.admission import Admission
from exchange.commits import Commits, Publication
from exchange.config import HubConfig
from exchange.consumers import ConsumerKey, Consumers
from exchange.errors import RefusedError
from exchange.gathers import Gathers
from exchange.lease_group import Group
from exchange.lease_messages import LeaseMessage
from exchange.leases import Leases
from exchange.members import Incarnation, Member, Members
from exchange.messages import (
    Accepted,
    AskStats,
    Bye,
    Cancel,
    Closing,
    Commit,
    Committed,
    Gather,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Publish,
    Refused,
    ToHub,
    Unknown,
    Welcome,
    refused,
)
from exchange.replays import Chunk, Reading
from exchange.router import Router
from exchange.selection import Selector
from exchange.stats import BlobStats, DiskStats, HubStats
from exchange.store import FIRST_CURSOR, MemoryStore, Record
from exchange.types import START, AgentName, Cursor, Kind
from exchange.wire import Buffer, Incoming, Outgoing

__all__ = ["Hub"]

QUARANTINED_FRAMES = 16
QUARANTINED_BYTES = 4096


class Bulk(Protocol):
    """The bulk lane beside a hub; port: as in Welcome."""

    port: int

    def stats(self) -> BlobStats: ...


class Hub:
    """One run's exchange. clock: monotonic seconds; ages, liveness and deadlines are counted on it.

    first_cursor: above every cursor of an earlier hub of the run, so that no reader takes new records for known ones.
    durable: admitted records are queued in `commits` for whoever owns the disk, who then says `committed` or
    `commit_failed`. known, consumers: what an earlier hub of the run wrote down, so that records sent again
    are known, and consumers go on where they were.
    """

    def __init__(
        self,
        config: HubConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        first_cursor: Cursor = FIRST_CURSOR,
        durable: bool = False,
        known: Mapping[AgentName, Incarnation] | None = None,
        consumers: Mapping[ConsumerKey, Cursor] | None = None,
    ) -> None:
        self.config = config
        self._clock = clock
        self._started_at = clock()
        self._store = MemoryStore(memory_bytes=config.memory_bytes, max_age_s=config.max_age_s, first_cursor=first_cursor)
        self._members = Members(
            run_id=config.run_id,
            names=None if config.members is None else frozenset(map(AgentName, config.members)),
            heartbeat_s=config.heartbeat_s,
            window=config.credit_messages,
            known=known,
        )
        selector = Selector(self._store, self._members, config.edges)
        self._admission = Admission(memory_bytes=config.memory_bytes)
        self.commits = Commits(limit_bytes=config.credit_bytes) if durable else None
        self._consumers = Consumers(consumers)
        self._gathers = Gathers(selector, self._consumers, unread_limit_bytes=config.credit_bytes, durable=durable)
        self._leases = Leases(
            self._store, selector, limit_bytes=config.credit_bytes, heartbeat_s=config.heartbeat_s, durable=durable
        )
        self._store.on_drop = self._leases.lose
        self._router = Router(
            self._members,
            config.edges,
            limit_bytes=config.credit_bytes,
            max_record_bytes=min(self._admission.max_record_bytes, config.credit_bytes),
            heartbeat_s=config.heartbeat_s,
        )
        self._last_cursor = Cursor(first_cursor - 1)
        self._bad_frames = self._quarantined = 0
        self._undeliverable = 0
        self._turn = 0
        # Set by whoever runs other lanes beside this hub.
        self.bulk: Bulk | None = None
        self.data_port: int | None = None
        self.disk: DiskStats | None = None
        self.quarantine: deque[tuple[bytes, str]] = deque(maxlen=QUARANTINED_FRAMES)

    def handle(self, peer: bytes, incoming: Incoming[ToHub]) -> list[Outgoing]:
        """What one message causes but for the gathers that it completes, which `answers` has."""
        now = self._clock()
        message, request_id = incoming.message, incoming.request_id
        if isinstance(message, Hello):
            return self._hello(peer, message, request_id, now)
        member = self._members.of(peer)
        if member is None:
            return [Outgoing(peer=peer, message=Unknown(), request_id=request_id)]
        member.heard_at = now
        self._store.expire(now)
        match message:
            case Ping():
                return self._ping(member, message, request_id, now)
            case Bye():
                self._gathers.forget(peer)
                self._members.leave(member)
                self._leases.left(member)
                return [Outgoing(peer=peer, message=Goodbye(), request_id=request_id), *self._router.left(member)]
            case AskStats():
                return [Outgoing(peer=peer, message=self.stats(), request_id=request_id)]
        if member.observer:
            refusal = refused("observer", "an observer may only ask for statistics")
            return [Outgoing(peer=peer, message=refusal, request_id=request_id)]
        match message:
            case Gather():
                return self._gathers.ask(member, message, request_id, now, given_to=self._last_cursor)
            case Commit():
                return self._commit(member, message, request_id)
            case Cancel():
                self._gathers.cancel(peer, message.request)
                self._leases.cancel(peer, message.request)
                return self._router.cancel(member, message.request)
            case Publish():
                return self._publish(member, message, incoming, now)
        if isinstance(message, LeaseMessage):
            return self._after_disk(self._leases.handle(member, message, request_id, now))
        return self._router.handle(member, message, incoming.payload, request_id, now)

    def answers(self) -> list[Outgoing]:
        """Answers to the gathers and leases that messages handled since the last call have completed."""
        now = self._clock()
        return self._gathers.ready(now) + self._after_disk(self._leases.ready(now))

    def tick(self) -> list[Outgoing]:
        """Answers to gathers and requests whose deadline has passed; also lets go what is too old."""
        now = self._clock()
        self._store.expire(now)
        return self._gathers.due(now) + self._router.due(now) + self._after_disk(self._leases.due(now))

    def recall(self, records: Iterable[Record], *, missing_to: Cursor, groups: Iterable[Group] = ()) -> None:
        """Take records of an earlier hub of the run back into memory, in the order of their cursors, and its groups.

        Their producers must be among the `known`. missing_to: up to here records are not among them.
        """
        self._store.recall(records, missing_to=missing_to)
        self._leases.recover(groups)
        for record in self._store:
            self._members[record.agent].raise_newest(record.version)

    def committed(self) -> list[Outgoing]:
        """The group that was taken from `commits` is on disk: readers get it, and who waited for that is answered."""
        assert self.commits is not None
        group = self.commits.written
        self._show(group)
        return [*self.commits.done(self._consumers.tell), *self.commits.leases.done(), *self.answers()]

    def commit_failed(self, reason: str) -> list[Outgoing]:
        """The group could not be written: who waited for it is refused, and readers get the rest, from memory alone."""
        assert self.commits is not None
        group = self.commits.written
        for publication in (each for each in group if each.waiters):
            record, member = publication.record, self._members.of(publication.peer)
            self._members[record.agent].tally.take_back(record.kind, record.encoded.nbytes, "storage")
            if member is not None:
                member.seen.add(publication.seq, refused("storage", reason))
        shown = [each for each in group if not each.waiters]
        for publication in shown:
            self._gathers.unsaved(publication.record.cursor)
        self._show(shown)
        unsaid, instead = self.commits.leases.fail(reason)
        for out in unsaid:
            self._leases.cancel(out.peer, out.request_id)
        return [*self.commits.fail(reason), *instead, *self.answers()]

    def keep_from(self) -> Cursor | None:
        """From here on somebody who is alive still needs records; None when nobody has said so."""
        now = self._clock()
        done_to = self._consumers.lowest(lambda agent: self._members.alive(agent, now))
        needed = (None if done_to is None else Cursor(done_to + 1), self._leases.lowest())
        return min((cursor for cursor in needed if cursor is not None), default=None)

    def next_reading(self) -> Reading | None:
        """What whoever owns the disk is to read now, and then say `replayed` or `replay_failed`; one at a time."""
        leases, gathers = self._leases.reads.next_reading, partial(self._gathers.next_reading, self._clock())
        self._turn = 1 - self._turn
        return leases() or gathers() if self._turn else gathers() or leases()

    def replayed(self, chunk: Chunk) -> list[Outgoing]:
        """What was read, for the gather that waits for it."""
        if self._leases.loaded(chunk):
            return self.answers()
        return self._gathers.replayed(chunk, self._clock())

    def replay_failed(self, reason: str) -> list[Outgoing]:
        """It could not be read."""
        return self.answers() if self._leases.loaded(None) else self._gathers.replay_failed(reason)

    def _show(self, publications: Iterable[Publication]) -> None:
        """Let readers have records: what was answered as durable is never seen before it is, nor twice after a crash."""
        for publication in publications:
            self._store_and_wake(publication.record, self._clock())

    def _store_and_wake(self, record: Record, now: float) -> None:
        self._store.append(record)
        self._gathers.wake(record, now)
        self._leases.wake(record)

    def _after_disk(self, answers: list[Outgoing]) -> list[Outgoing]:
        """Answers about leases, unless they have to wait for what they say to be on disk."""
        return answers if self.commits is None else self.commits.leases.after(self._leases.changes(), answers)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next, on the hub's clock."""
        deadlines = (self._gathers.next_deadline(), self._router.next_deadline(), self._leases.next_deadline())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def bad_frame(self, frames: Sequence[memoryview], error: Exception) -> None:
        """Count a message that could not be read, and keep its beginning with the reason."""
        self._bad_frames += 1
        self._keep_raw(frames, str(error))

    def undeliverable(self, peer: bytes) -> None:
        """An answer could not be handed to the transport: the peer is away, or reads nothing."""
        self._undeliverable += 1
        self._gathers.forget(peer)
        self._router.lost(peer)
        self._members.silence(peer)

    def present(self, peer: bytes) -> bool:
        """Whether a routing id is that of a member, and no observer's; one look-up, so any thread may ask."""
        member = self._members.of(peer)
        return member is not None and not member.observer

    def attended(self) -> bool:
        """Whether any worker is there who has not said Bye."""
        now = self._clock()
        members = map(self._members.of, self._members.peers())
        return any(member is not None and self._members.state(member, now) != "gone" for member in members)

    def close(self) -> list[Outgoing]:
        """A farewell to every worker."""
        self._leases.closing = True
        return [Outgoing(peer=peer, message=Closing()) for peer in self._members.peers()]

    def stats(self) -> HubStats:
        now = self._clock()
        committing = Counter[tuple[AgentName, Kind]]() if self.commits is None else self.commits.counts()
        return HubStats(
            run_id=self.config.run_id,
            uptime_s=now - self._started_at,
            workers=self._members.stats(now),
            cursor=self._store.newest,
            stored=len(self._store),
            stored_bytes=self._store.stored_bytes,
            evicted=self._store.evicted,
            expired=self._store.expired,
            waiting_gathers=len(self._gathers),
            bad_frames=self._bad_frames,
            quarantined=self._quarantined,
            undeliverable=self._undeliverable,
            records=self._store.stats(committing),
            requests=self._router.accounts.stats(),
            open_requests=len(self._router),
            late_replies=self._router.accounts.late_replies,
            groups=self._leases.stats(),
            blobs=BlobStats() if self.bulk is None else self.bulk.stats(),
            recalled=self._store.recalled,
            committing=committing.total(),
            disk=self.disk,
        )

    def _hello(self, peer: bytes, hello: Hello, request_id: int, now: float) -> list[Outgoing]:
        joined = self._members.join(peer, hello, now)
        if isinstance(joined, Refused):
            return [Outgoing(peer=peer, message=joined, request_id=request_id)]
        # Who still wants a gather sends it again; its process may be a new one that does not.
        self._gathers.forget(peer)
        welcome = Welcome(
            epoch=joined.epoch,
            credit_messages=self.config.credit_messages,
            credit_bytes=self.config.credit_bytes,
            max_record_bytes=min(self._admission.max_record_bytes, self.config.credit_bytes),
            heartbeat_s=self.config.heartbeat_s,
            bulk_port=None if self.bulk is None else self.bulk.port,
            data_port=self.data_port,
        )
        self._leases.joined(joined)
        return [Outgoing(peer=peer, message=welcome, request_id=request_id), *self._router.joined(joined, now)]

    def _ping(self, member: Member, ping: Ping, request_id: int, now: float) -> list[Outgoing]:
        progress = (ping.step, ping.version)
        if ping.version is not None and ping.version.epoch == member.epoch:
            member.raise_newest(ping.version)
        if progress != member.progress:
            member.progress, member.progress_at = progress, now
        member.has_received(ping.received_bytes)
        self._leases.read(member)
        return [Outgoing(peer=member.peer, message=Pong(), request_id=request_id), *self._gathers.read(member, now)]

    def _commit(self, member: Member, commit: Commit, request_id: int) -> list[Outgoing]:
        """Move a named consumer of a worker forward, at once or when that is on disk."""
        key = (member.name, commit.consumer)
        answer: Committed | Refused | None = self._consumers.refusal(member.name, commit, self._store.newest)
        if answer is None and self.commits is not None:
            # What goes to the disk next must not be less than a group that is on its way there, or was.
            cursor = max(commit.cursor, self._consumers.of(key), self.commits.told.get(key, START))
            if self.commits.tell(key, cursor, peer=member.peer, waiter=request_id):
                return []
            answer = refused("too_many", f"too many commits of one consumer have no answer, got one more: {commit.consumer!r}")
        message = answer or Committed(cursor=self._consumers.tell(key, commit.cursor))
        return [Outgoing(peer=member.peer, message=message, request_id=request_id)]

    def _publish(self, member: Member, publish: Publish, incoming: Incoming[ToHub], now: float) -> list[Outgoing]:
        tally = member.tally
        tally.published += 1
        if self.commits is not None and self.commits.join(member.peer, publish.seq, incoming.request_id):
            tally.duplicates += 1
            return []
        answer = member.seen.answer(publish.seq)
        if answer is not None:
            tally.duplicates += 1
            return [Outgoing(peer=member.peer, message=answer, request_id=incoming.request_id)]
        answer, record = self._admit(member, publish, incoming.payload, now)
        if record is None:
            return [Outgoing(peer=member.peer, message=answer, request_id=incoming.request_id)]
        member.raise_newest(record.version)
        tally.accepted[record.kind] += 1
        tally.accepted_bytes[record.kind] += record.encoded.nbytes
        accepted = Outgoing(peer=member.peer, message=answer, request_id=incoming.request_id)
        if self.commits is None:
            self._store_and_wake(record, now)
            return [accepted]
        waits = publish.durable or self.commits.behind
        self.commits.add(record, peer=member.peer, seq=publish.seq, waiter=incoming.request_id if waits else None)
        return [] if waits else [accepted]

    def _keep_raw(self, frames: Sequence[Buffer], reason: str) -> None:
        raw = b"".join(bytes(frame[:QUARANTINED_BYTES]) for frame in frames[:2])
        self.quarantine.append((raw[:QUARANTINED_BYTES], reason))

    def _admit(
        self, member: Member, publish: Publish, payload: Sequence[memoryview], now: float
    ) -> tuple[Accepted | Refused, Record | None]:
        cursor = Cursor(self._last_cursor + 1)
        try:
            if publish.durable and self.commits is None:
                raise RefusedError("not_durable", "this hub keeps records in memory alone, got durable=True")
            over_credit = self.commits is not None and self.commits.over_credit(member.peer)
            if over_credit or not member.seen.fits(publish.seq):
                raise RefusedError("window", f"a worker keeps within its credit, got seq={publish.seq} beyond it")
            record = self._admission.admit(member, publish, payload, cursor=cursor, now=now)
        except RefusedError as error:
            member.tally.refused[error.reason] += 1
            refusal = refused(error.reason, error.detail)
            if error.reason in ("malformed", "unsupported"):
                self._quarantined += 1
                self._keep_raw([publish.body, *payload], error.detail)
            if error.reason != "window":
                member.seen.add(publish.seq, refusal)
            return refusal, None
        self._last_cursor = cursor
        accepted = Accepted(seq=publish.seq, cursor=cursor)
        member.seen.add(publish.seq, accepted)
        return accepted, record
