"""The gathers that wait: for rows, for their deadline, for the disk, or for their worker to read what it was sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from exchange.consumers import Consumers
from exchange.members import Member
from exchange.messages import Gather, Refused, refused
from exchange.replays import Chunk, Reading, Replay, Replays
from exchange.selection import Selection, Selector
from exchange.store import FIRST_CURSOR, Record
from exchange.types import START, Cursor
from exchange.wire import MAX_RECORD_BYTES, Buffer, Outgoing

__all__ = ["Gathers"]

MAX_WAITING = 16

_Key = tuple[bytes, int]


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """A gather that was not answered yet. have: matching records when last counted.

    seen_to: no row up to here is missing. all_seen: nor is any behind it, as each was looked at when it came and does not fit.
    """

    member: Member
    gather: Gather
    request_id: int
    deadline: float
    have: int
    seen_to: Cursor
    all_seen: bool


class Gathers:
    """Answers gathers at once or later. unread_limit_bytes: of Rows that a worker was sent and has not read.

    consumers: where a gather in the name of one begins. durable: what memory has let go can be read from a disk.
    """

    def __init__(self, selector: Selector, consumers: Consumers, *, unread_limit_bytes: int, durable: bool = False) -> None:
        self._selector = selector
        self._consumers = consumers
        self._unread_limit_bytes = unread_limit_bytes
        self._waiting: dict[_Key, _Waiting] = {}
        self._woken: dict[_Key, None] = {}
        self._replays = Replays()
        self._durable = durable
        # Cursors of records that are in memory alone, as the disk had refused them; and, of those that memory has let go,
        # the first and the last.
        self._unsaved: deque[Cursor] = deque()
        self._lost_unsaved = (START, START)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._replays)

    def ask(self, member: Member, gather: Gather, request_id: int, now: float, *, given_to: Cursor) -> list[Outgoing]:
        """The answer to a new gather, or nothing when it has to wait. given_to: the last cursor that a record has."""
        member.has_received(gather.received_bytes)
        refusal = self._refusal(member, gather)
        if refusal is not None:
            return [Outgoing(peer=member.peer, message=refusal, request_id=request_id)]
        if gather.consumer is not None and gather.after == START:
            gather = msgspec.structs.replace(gather, after=self._consumers.of((member.name, gather.consumer)))
        if gather.after > given_to:
            # Of an earlier hub, whose wall clock was ahead of ours: what is here now comes behind it, and maybe not all.
            gather = msgspec.structs.replace(gather, after=FIRST_CURSOR)
        return self._begin(Replay(member=member, gather=gather, request_id=request_id, deadline=now + gather.deadline_s), now)

    def _begin(self, asked: Replay, now: float) -> list[Outgoing]:
        """Answer a gather from memory, or let it wait there, or for the disk."""
        member, gather = asked.member, asked.gather
        if self._replayed(gather) and gather.after < self._selector.lost_to(member.name, gather):
            self._replays.add(asked)
            return []
        selection = self._selector.run(member.name, gather, now)
        seen_to = self._selector.start(member.name, gather)
        waiting = _Waiting(
            member=member,
            gather=gather,
            request_id=asked.request_id,
            deadline=asked.deadline,
            have=selection.matching,
            seen_to=seen_to,
            all_seen=not selection.matching and self._selector.gap_to(member.name, gather, seen_to) == START,
        )
        if asked.deadline <= now or self._complete(waiting):
            return [self._answer(waiting, selection, now)]
        self._waiting[member.peer, asked.request_id] = waiting
        return []

    def next_reading(self, now: float) -> Reading | None:
        """What is to be read from the disk now; None for nothing, and while something is."""
        replay = self._replays.take(self._may_send)
        if replay is None:
            return None
        name, gather = replay.member.name, replay.gather
        return Reading(matcher=self._selector.matcher(name, gather, now), to=self._selector.lost_to(name, gather))

    def replayed(self, chunk: Chunk, now: float) -> list[Outgoing]:
        """Answer with what was read, or go on where it ended."""
        replay = self._replays.done()
        if replay is None:
            return []
        member, gather = replay.member, replay.gather
        if not self._may_send(member):
            # Answered otherwise meanwhile: what was read is let go, as it may not wait here.
            self._replays.add(replay)
            return []
        replay.lost_to = max(replay.lost_to, chunk.lost_to, self._unsaved_within(gather.after, chunk.cursor))
        matcher = self._selector.matcher(member.name, gather, now)
        selection = self._selector.replayed(matcher, chunk.records, chunk.cursor, chunk.withheld)
        if selection.records or replay.lost_to:
            message, payload = self._selector.answer(member, selection, now, replay.lost_to)
            return [Outgoing(peer=member.peer, message=message, request_id=replay.request_id, payload=payload)]
        member.tally.withheld += chunk.withheld
        replay.gather = msgspec.structs.replace(gather, after=chunk.cursor)
        return self._begin(replay, now)

    def replay_failed(self, reason: str) -> list[Outgoing]:
        """Nothing could be read."""
        replay = self._replays.done()
        if replay is None:
            return []
        return [Outgoing(peer=replay.member.peer, message=refused("storage", reason), request_id=replay.request_id)]

    def unsaved(self, cursor: Cursor) -> None:
        """A record that readers have is in memory alone."""
        self._forget_unsaved()
        self._unsaved.append(cursor)

    def _forget_unsaved(self) -> None:
        """Note which of them memory has let go."""
        while self._unsaved and self._unsaved[0] <= self._selector.evicted_to:
            lost = self._unsaved.popleft()
            self._lost_unsaved = (self._lost_unsaved[0] or lost, lost)

    def _unsaved_within(self, after: Cursor, to: Cursor) -> Cursor:
        """Up to where records that the disk never had may be missing between two cursors, or 0."""
        self._forget_unsaved()
        first, last = self._lost_unsaved
        return min(last, to) if START < after < last and first <= to else START

    def _replayed(self, gather: Gather) -> bool:
        return self._durable and gather.replay

    def wake(self, record: Record, now: float) -> None:
        """Count a new record for the gathers that it fits; `ready` answers those that have enough."""
        for key, waiting in self._waiting.items():
            if self._selector.fits(waiting.member.name, waiting.gather, record, now):
                waiting.have += 1
                if waiting.all_seen:
                    waiting.seen_to, waiting.all_seen = Cursor(record.cursor - 1), False
                if self._complete(waiting):
                    self._woken[key] = None

    def ready(self, now: float) -> list[Outgoing]:
        """Answer what was woken since the last call, so that records that come together are handed over together."""
        if not self._woken:
            return []
        keys, self._woken = self._woken, {}
        return self._recount((key for key in keys if key in self._waiting), now)

    def read(self, member: Member, now: float) -> list[Outgoing]:
        """Answer those gathers that only waited for `member` to read what it was sent."""
        done = [key for key, waiting in self._waiting.items() if waiting.member is member and self._complete(waiting)]
        return self._recount(done, now)

    def due(self, now: float) -> list[Outgoing]:
        """Answer the gathers whose deadline has passed with what there is."""
        keys = [key for key, waiting in self._waiting.items() if waiting.deadline <= now]
        return [self._answer(waiting, self._run(waiting, now), now) for waiting in map(self._waiting.pop, keys)]

    def next_deadline(self) -> float | None:
        return min((waiting.deadline for waiting in self._waiting.values()), default=None)

    def cancel(self, peer: bytes, request_id: int) -> None:
        self._waiting.pop((peer, request_id), None)
        self._replays.cancel(peer, request_id)

    def forget(self, peer: bytes) -> None:
        self._replays.forget(peer)
        for key in [key for key in self._waiting if key[0] == peer]:
            del self._waiting[key]

    def _refusal(self, member: Member, gather: Gather) -> Refused | None:
        if not 0 < gather.max_bytes <= MAX_RECORD_BYTES:
            detail = f"`max_bytes` must be > 0 and <= {MAX_RECORD_BYTES}, got max_bytes={gather.max_bytes}"
            return refused("invalid", detail)
        if sum(waiting.member is member for waiting in self._waiting.values()) + self._replays.of(member) >= MAX_WAITING:
            detail = f"a worker may have {MAX_WAITING} gathers waiting, got one more from {member.name!r}"
            return refused("too_many", detail)
        return None

    def _complete(self, waiting: _Waiting) -> bool:
        return waiting.have >= waiting.gather.min_count and self._may_send(waiting.member)

    def _may_send(self, member: Member) -> bool:
        return member.unread_bytes <= self._unread_limit_bytes

    def _recount(self, keys: Iterable[_Key], now: float) -> list[Outgoing]:
        """Answer gathers that still have enough: meanwhile records may have gone, aged, or fallen behind."""
        answers = []
        for key in keys:
            waiting = self._waiting[key]
            selection = self._run(waiting, now)
            waiting.have = selection.matching
            if self._complete(waiting):
                del self._waiting[key]
                answers.append(self._answer(waiting, selection, now))
        return answers

    def _run(self, waiting: _Waiting, now: float) -> Selection:
        return self._selector.run(waiting.member.name, waiting.gather, now)

    def _answer(self, waiting: _Waiting, selection: Selection, now: float) -> Outgoing:
        member, gather = waiting.member, waiting.gather
        gap_to = START if waiting.all_seen else self._selector.gap_to(member.name, gather, waiting.seen_to)
        payload: Sequence[Buffer] = ()
        if gap_to and self._replayed(gather):
            # Asked for again from there, it is read from the disk.
            message = self._selector.nothing_yet(msgspec.structs.replace(gather, after=waiting.seen_to))
        elif self._may_send(member):
            message, payload = self._selector.answer(member, selection, now, gap_to)
        else:
            message = self._selector.nothing_yet(gather)
        return Outgoing(peer=member.peer, message=message, request_id=waiting.request_id, payload=payload)
