"""Leases: a group of workers shares a stream of records, each of which is to be done once.

A lease holds a few records for one worker. It ends for each of them by the worker's word (done, failed, given back), and
for all that are left when its time is over, or its worker has left, is gone or was started anew. What was not done is
handed out again, and given up after so many deliveries; these are counted here, before the hand-out, so that a record that
brings every worker down comes to an end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from exchange.lease_group import Group, Held
from exchange.lease_messages import MAX_HELD, AskDeadLetters, DeadLetters, Lease, Leased, Release, Renew
from exchange.lease_reads import LeaseReads
from exchange.members import GONE_HEARTBEATS, Member
from exchange.messages import Refused, Settled, refused
from exchange.replays import Chunk
from exchange.selection import Selector
from exchange.stats import GroupStats
from exchange.store import MemoryStore, Record
from exchange.types import AgentName, Cursor, Kind
from exchange.wire import MAX_RECORD_BYTES, Outgoing

__all__ = ["Leases"]

MAX_GROUPS = 64
MAX_WAITING = 16
# What became of so many leases is remembered, for a word that comes again after a break, or too late.
REMEMBERED = 4096

_Key = tuple[AgentName, int]
K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True, kw_only=True)
class _Open:
    """A lease with the records of it that are not settled. peer: the incarnation that holds it."""

    group: Group
    member: Member
    peer: bytes
    request_id: int
    lease_s: float
    expires_at: float
    held: dict[Cursor, Held]


@dataclass(slots=True, kw_only=True)
class _Asked:
    """A request for a lease that was not answered yet. unreadable: the disk has failed while it waited."""

    group: Group
    member: Member
    lease: Lease
    request_id: int
    deadline: float
    unreadable: bool = False


class Leases:
    """All groups of a hub. limit_bytes: of what one worker may hold, and of what it may have unread."""

    def __init__(
        self, store: MemoryStore, selector: Selector, *, limit_bytes: int, heartbeat_s: float, durable: bool = False
    ) -> None:
        self._store = store
        self._selector = selector
        self._limit_bytes = limit_bytes
        self._gone_after_s = GONE_HEARTBEATS * heartbeat_s
        self._groups: dict[str, Group] = {}
        self._open: dict[_Key, _Open] = {}
        self._waiting: dict[_Key, _Asked] = {}
        self._said: OrderedDict[tuple[AgentName, Release], None] = OrderedDict()
        self._ended: OrderedDict[_Key, str] = OrderedDict()
        self._durable = durable
        self.reads = LeaseReads(store)
        # The hub has said farewell: its workers leave because of it.
        self.closing = False
        # Something has changed for those who wait. looked_at: when they were last looked at.
        self._woken = False
        self._looked_at = float("-inf")

    def handle(
        self, member: Member, message: Lease | Renew | Release | AskDeadLetters, request_id: int, now: float
    ) -> list[Outgoing]:
        """The answer to one message, but for leases, which `ready` or `due` will give."""
        match message:
            case Lease():
                return self._ask(member, message, request_id, now)
            case Renew():
                answer: Settled | DeadLetters | Refused = self._renew(member, message, now)
            case Release():
                answer = self._release(member, message, now)
            case AskDeadLetters():
                answer = self._dead_letters(message)
        return [Outgoing(peer=member.peer, message=answer, request_id=request_id)]

    def _ask(self, member: Member, lease: Lease, request_id: int, now: float) -> list[Outgoing]:
        """Have a request wait, in place of an earlier one for the same lease. One whose lease is open is answered again."""
        member.has_received(lease.received_bytes)
        self._expire(now)
        mine = self._open.get((member.name, lease.id))
        if mine is not None:
            mine.request_id = request_id
            return [self._leased(mine, now)]
        group = self._group(lease)
        if isinstance(group, Group) and sum(asked.member is member for asked in self._waiting.values()) >= MAX_WAITING:
            group = refused("too_many", f"a worker may wait for {MAX_WAITING} leases, got one more from {member.name!r}")
        if isinstance(group, Refused):
            return [Outgoing(peer=member.peer, message=group, request_id=request_id)]
        self._waiting[member.name, lease.id] = _Asked(
            group=group, member=member, lease=lease, request_id=request_id, deadline=now + lease.deadline_s
        )
        self._woken = True
        return []

    def _renew(self, member: Member, renew: Renew, now: float) -> Settled | Refused:
        """Begin a lease's time again."""
        self._expire(now)
        lease = self._open.get((member.name, renew.lease))
        if lease is None:
            return self._lost((member.name, renew.lease))
        lease.expires_at = now + lease.lease_s
        return Settled()

    def _release(self, member: Member, release: Release, now: float) -> Settled | Refused:
        """Take a worker's word for what became of records that it holds; a word that comes again changes nothing."""
        if (member.name, release) in self._said:
            return Settled()
        self._expire(now)
        key, cursors = (member.name, release.lease), set(release.cursors)
        lease = self._open.get(key)
        if lease is None or lease.group.name != release.group or not cursors <= lease.held.keys():
            return self._lost(key)
        for cursor in sorted(cursors):
            del lease.held[cursor]
            match release.outcome:
                case "done":
                    lease.group.done(cursor)
                case "failed":
                    lease.group.fail(cursor, member.name, "failed", release.detail)
                case "returned":
                    lease.group.give_back(cursor)
                case "unsupported":
                    lease.group.cannot_read(cursor, member.name, now)
        if not lease.held:
            self._close(key, "every record of it was settled")
        _remember(self._said, (member.name, release), None)
        self._woken = True
        return Settled()

    def cancel(self, peer: bytes, request_id: int) -> None:
        """The worker waits no longer; a lease that it was sent meanwhile is given back."""
        for key, asked in tuple(self._waiting.items()):
            if (asked.member.peer, asked.request_id) == (peer, request_id):
                del self._waiting[key]
        unseen = [key for key, lease in self._open.items() if (lease.peer, lease.request_id) == (peer, request_id)]
        self._give_back(unseen, "its request was cancelled")

    def wake(self, record: Record) -> None:
        """A new record can be handed out."""
        for group in self._groups.values():
            self._woken |= group.offer(record)

    def lose(self, record: Record) -> None:
        """The store lets a record go; a disk has it still."""
        for group in self._groups.values() if not self._durable else ():
            group.lose(record)

    def joined(self, member: Member) -> None:
        """A worker said Hello: what another process of it held has ended. Who still waits sends its request again."""
        self._forget(member)
        self._end(
            (key for key, lease in self._open.items() if lease.member is member and lease.peer != member.peer), "restarted"
        )
        for group in self._groups.values():
            group.started_anew(member.name)

    def left(self, member: Member) -> None:
        """A worker said Bye: what it holds has failed, unless it is the hub that ends."""
        self._forget(member)
        mine = [key for key, lease in self._open.items() if lease.member is member]
        if self.closing:
            self._give_back(mine, "the hub ended")
        else:
            self._end(mine, "left")

    def read(self, member: Member) -> None:
        """A worker has read what it was sent, or is heard again, and may be sent more."""
        self._woken |= any(asked.member is member for asked in self._waiting.values())

    def ready(self, now: float) -> list[Outgoing]:
        """Answer the requests for which there is something since the last call, in the order in which they came."""
        if not self._woken:
            return []
        self._woken, self._looked_at = False, now
        answers = []
        for key, asked in list(self._waiting.items()):
            answer = self._hand_out(asked, now)
            if answer is None and asked.deadline <= now and not self._being_read(asked):
                nothing = Leased(rows=(), deliveries=())
                answer = Outgoing(peer=asked.member.peer, message=nothing, request_id=asked.request_id)
            if answer is not None:
                del self._waiting[key]
                answers.append(answer)
        return answers

    def due(self, now: float) -> list[Outgoing]:
        """End the leases whose time is over or whose worker is gone, and answer the requests whose deadline has passed."""
        self._expire(now)
        self._woken = bool(self._waiting)
        return self.ready(now)

    def next_deadline(self) -> float | None:
        ends = (min(lease.expires_at, lease.member.heard_at + self._gone_after_s) for lease in self._open.values())
        waits = (
            min(asked.deadline, asked.group.again_at(asked.member.name, self._looked_at))
            for asked in self._waiting.values()
            if not self._being_read(asked)
        )
        return min((*ends, *waits), default=None)

    def changes(self) -> dict[tuple[str, int], bytes | None]:
        """What has changed since the last call and is to be on disk before anybody is told."""
        return {key: row for group in self._groups.values() for key, row in group.changes().items()}

    def recover(self, groups: Iterable[Group]) -> None:
        """Go on with the groups of an earlier hub."""
        self._groups.update((group.name, group) for group in groups)

    def lowest(self) -> Cursor | None:
        """From here on the disk is to keep records: they were handed out and are not settled."""
        return min((low for group in self._groups.values() if (low := group.lowest()) is not None), default=None)

    def loaded(self, chunk: Chunk | None) -> bool:
        """Go on with what was read from the disk, None for nothing; False when it was not read for a lease."""
        group = self.reads.loaded(chunk)
        self._woken |= group is not None
        for asked in self._waiting.values() if chunk is None else ():
            asked.unreadable |= asked.group is group
        return group is not None

    def _being_read(self, asked: _Asked) -> bool:
        """Whether the disk may have something for a request, which is answered after that even if it is late."""
        return not asked.unreadable and self.reads.pending(asked.group)

    def _dead_letters(self, ask: AskDeadLetters) -> DeadLetters | Refused:
        """What a group has given up."""
        group = self._groups.get(ask.group)
        if group is None:
            return refused("unknown_group", f"no worker has asked for a lease of this group, got group={ask.group!r}")
        return DeadLetters(letters=tuple(group.letters), dead=group.stats().dead)

    def stats(self) -> dict[str, GroupStats]:
        return {name: group.stats() for name, group in self._groups.items()}

    def _group(self, lease: Lease) -> Group | Refused:
        """The group that a request is for, made by its first one."""
        if lease.max_bytes > MAX_RECORD_BYTES or lease.count > MAX_HELD:
            limits = f"`max_bytes` <= {MAX_RECORD_BYTES} and `count` <= {MAX_HELD}"
            return refused("invalid", f"a lease has {limits}, got max_bytes={lease.max_bytes}, count={lease.count}")
        group = self._groups.get(lease.group)
        if group is None:
            if len(self._groups) >= MAX_GROUPS:
                return refused("too_many", f"a hub has at most {MAX_GROUPS} groups, got one more: {lease.group!r}")
            group = Group(
                lease.group,
                lease.kinds,
                lease.agents,
                limit_bytes=self._limit_bytes,
                settled_to=self._store.lost_to(lambda agent, kind: True),
                durable=self._durable,
            )
            self._groups[group.name] = group
            for record in self._store:
                group.offer(record)
        if group.differs(lease):
            return refused(
                "other_filter",
                f"the group {group.name!r} shares {_share(group.kinds, group.agents)} since its first lease, got "
                f"{_share(lease.kinds, lease.agents)}: ask for the same, or under another group's name",
            )
        return group

    def _hand_out(self, asked: _Asked, now: float) -> Outgoing | None:
        """Lease records to who asked, if it may have some now."""
        member, lease, group = asked.member, asked.lease, asked.group
        if member.unread_bytes > self._limit_bytes or now >= member.heard_at + self._gone_after_s:
            return None
        held = [each for one in self._open.values() if one.member is member for each in one.held.values()]
        room, room_bytes = MAX_HELD - len(held), self._limit_bytes - sum(each.record.encoded.nbytes for each in held)
        if room < 1 or room_bytes < 1:
            return None

        def allowed(agent: AgentName, kind: Kind) -> bool:
            mine = group.agents is None and agent == member.name
            return not mine and self._selector.may(member.name, agent, kind)

        limits = min(lease.count, room), min(lease.max_bytes, room_bytes)
        taken = group.take(member.name, *limits, allowed=allowed, fetch=self.reads.get, now=now)
        if not asked.unreadable:
            self.reads.want(group)
        if not taken:
            return None
        opened = self._open[member.name, lease.id] = _Open(
            group=group,
            member=member,
            peer=member.peer,
            request_id=asked.request_id,
            lease_s=lease.lease_s,
            expires_at=now + lease.lease_s,
            held=taken,
        )
        return self._leased(opened, now)

    def _leased(self, lease: _Open, now: float) -> Outgoing:
        rows, payload = self._selector.deliver(lease.member, [held.record for held in lease.held.values()], now)
        message = Leased(rows=rows, deliveries=tuple(held.deliveries for held in lease.held.values()))
        return Outgoing(peer=lease.peer, message=message, request_id=lease.request_id, payload=payload)

    def _expire(self, now: float) -> None:
        """End what has come to its end by the clock."""
        self._end((key for key, lease in self._open.items() if lease.expires_at <= now), "expired")
        self._end((key for key, lease in self._open.items() if lease.member.heard_at + self._gone_after_s <= now), "gone")

    def _end(self, keys: Iterable[_Key], reason: str) -> None:
        """End leases against their worker's will: their records have failed a delivery."""
        for lease in [self._close(key, reason) for key in tuple(keys)]:
            for cursor in lease.held:
                lease.group.fail(cursor, lease.member.name, reason)

    def _give_back(self, keys: Iterable[_Key], reason: str) -> None:
        """End leases that do not count."""
        for lease in [self._close(key, reason) for key in tuple(keys)]:
            for cursor in lease.held:
                lease.group.give_back(cursor)

    def _close(self, key: _Key, reason: str) -> _Open:
        _remember(self._ended, key, reason)
        self._woken = True
        return self._open.pop(key)

    def _forget(self, member: Member) -> None:
        for key in [key for key, asked in self._waiting.items() if asked.member is member]:
            del self._waiting[key]

    def _lost(self, key: _Key) -> Refused:
        why = self._ended.get(key, "it is not known here: the hub was started anew")
        return refused("lease_lost", f"{key[0]!r} does not hold these records any more ({why}): another worker may have them")


def _share(kinds: Iterable[Kind], agents: Iterable[AgentName] | None) -> str:
    return f"kinds={sorted(kinds)} of agents={None if agents is None else sorted(agents)}"


def _remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    memory[key] = value
    if len(memory) > REMEMBERED:
        memory.popitem(last=False)
