"""The gathers that wait: for rows, for their deadline, or for their worker to read what it was sent.

Also where each named consumer stands, as a gather may begin there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from exchange.members import Member
from exchange.messages import Commit, Committed, Gather, Refused, refused
from exchange.selection import Selection, Selector
from exchange.store import Record
from exchange.types import START, AgentName, Cursor
from exchange.wire import MAX_RECORD_BYTES, Outgoing

__all__ = ["Gathers"]

MAX_WAITING = 16
MAX_CONSUMERS = 64

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
    """Answers gathers at once or later. unread_limit_bytes: of Rows that a worker was sent and has not read."""

    def __init__(self, selector: Selector, *, unread_limit_bytes: int) -> None:
        self._selector = selector
        self._unread_limit_bytes = unread_limit_bytes
        self._waiting: dict[_Key, _Waiting] = {}
        self._woken: dict[_Key, None] = {}
        self._committed: dict[AgentName, dict[str, Cursor]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, member: Member, gather: Gather, request_id: int, now: float) -> list[Outgoing]:
        """The answer to a new gather, or nothing when it has to wait."""
        member.received_bytes = gather.received_bytes
        refusal = self._refusal(member, gather)
        if refusal is not None:
            return [Outgoing(peer=member.peer, message=refusal, request_id=request_id)]
        if gather.consumer is not None and gather.after == START:
            after = self._committed.get(member.name, {}).get(gather.consumer, START)
            gather = msgspec.structs.replace(gather, after=after)
        selection = self._selector.run(member.name, gather, now)
        seen_to = self._selector.start(member.name, gather)
        waiting = _Waiting(
            member=member,
            gather=gather,
            request_id=request_id,
            deadline=now + gather.deadline_s,
            have=selection.matching,
            seen_to=seen_to,
            all_seen=not selection.matching and self._selector.gap_to(member.name, gather, seen_to) == START,
        )
        if gather.deadline_s <= 0 or self._complete(waiting):
            return [self._answer(waiting, selection, now)]
        self._waiting[member.peer, request_id] = waiting
        return []

    def commit(self, member: Member, commit: Commit) -> Committed | Refused:
        """Move a named consumer of a worker forward."""
        consumers = self._committed.setdefault(member.name, {})
        if commit.cursor > self._selector.newest():
            return refused("invalid", f"no record has this cursor yet, got cursor={commit.cursor}")
        if commit.consumer not in consumers and len(consumers) >= MAX_CONSUMERS:
            detail = f"a worker may have {MAX_CONSUMERS} named consumers, got one more: {commit.consumer!r}"
            return refused("too_many", detail)
        consumers[commit.consumer] = max(commit.cursor, consumers.get(commit.consumer, START))
        return Committed(cursor=consumers[commit.consumer])

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

    def forget(self, peer: bytes) -> None:
        for key in [key for key in self._waiting if key[0] == peer]:
            del self._waiting[key]

    def _refusal(self, member: Member, gather: Gather) -> Refused | None:
        if not 0 < gather.max_bytes <= MAX_RECORD_BYTES:
            detail = f"`max_bytes` must be > 0 and <= {MAX_RECORD_BYTES}, got max_bytes={gather.max_bytes}"
            return refused("invalid", detail)
        if sum(waiting.member is member for waiting in self._waiting.values()) >= MAX_WAITING:
            detail = f"a worker may have {MAX_WAITING} gathers waiting, got one more from {member.name!r}"
            return refused("too_many", detail)
        return None

    def _complete(self, waiting: _Waiting) -> bool:
        return waiting.have >= waiting.gather.min_count and self._may_send(waiting.member)

    def _may_send(self, member: Member) -> bool:
        return member.sent_bytes - member.received_bytes <= self._unread_limit_bytes

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
        member = waiting.member
        if self._may_send(member):
            gap_to = START if waiting.all_seen else self._selector.gap_to(member.name, waiting.gather, waiting.seen_to)
            message, payload = self._selector.answer(member, selection, now, gap_to)
            return Outgoing(peer=member.peer, message=message, request_id=waiting.request_id, payload=payload)
        return Outgoing(peer=member.peer, message=self._selector.nothing_yet(waiting.gather), request_id=waiting.request_id)
