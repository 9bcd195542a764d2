"""Who takes part: names, incarnations, liveness, progress, and which records of each were seen.

An incarnation is one routing id. A name may come back under a new one when the old has left or is gone; its epoch then
rises by one and messages of the old incarnation are refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from exchange.keys import holder_of
from exchange.messages import Accepted, Hello, Refused, refused
from exchange.stats import MemberState, Tally, WorkerStats
from exchange.types import AgentName, Cursor, Version

__all__ = ["Incarnation", "Member", "Members", "SeenRecords"]

SUSPECT_HEARTBEATS = 2
GONE_HEARTBEATS = 3
MAX_MEMBERS = 256
NO_CURSOR = Cursor(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """What a hub's disk knows of a worker's last incarnation: every sequence number up to `mark`, and those in `above`, are
    on it."""

    peer: bytes
    epoch: int
    mark: int
    above: frozenset[int] = frozenset()


class SeenRecords:
    """The sequence numbers that one incarnation has used: everything up to a mark, and a bounded set above it.

    The answers to the last `window` records are kept, so that a resent record gets its first answer again.
    """

    def __init__(self, window: int, first_seq: int, known: Incarnation | None = None) -> None:
        self._mark = first_seq - 1 if known is None else max(known.mark, first_seq - 1)
        self._above: set[int] = set() if known is None else {seq for seq in known.above if seq > self._mark}
        self._window = window
        self._answers: OrderedDict[int, Accepted | Refused] = OrderedDict()

    def fits(self, seq: int) -> bool:
        """False for a number so far ahead that it would have to be remembered outside of the window."""
        return 0 < seq <= self._mark + 2 * self._window

    def answer(self, seq: int) -> Accepted | Refused | None:
        """The answer to a record that was seen before, None for a new one."""
        if seq in self._answers:
            first = self._answers[seq]
            return first if isinstance(first, Refused) else Accepted(seq=seq, cursor=first.cursor, duplicate=True)
        if seq <= self._mark or seq in self._above:
            return Accepted(seq=seq, cursor=NO_CURSOR, duplicate=True)
        return None

    def add(self, seq: int, answer: Accepted | Refused) -> None:
        self._answers[seq] = answer
        if len(self._answers) > 2 * self._window:
            self._answers.popitem(last=False)
        self._above.add(seq)
        while self._mark + 1 in self._above:
            self._mark += 1
            self._above.remove(self._mark)


@dataclass(slots=True, kw_only=True)
class Member:
    """One name, with its present incarnation. sent_bytes, received_bytes: of Rows payloads since its WELCOME."""

    name: AgentName
    peer: bytes
    epoch: int
    observer: bool
    heard_at: float
    seen: SeenRecords
    left: bool = False
    progress: tuple[int | None, Version | None] = (None, None)
    progress_at: float | None = None
    newest: Version | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    tally: Tally = field(default_factory=Tally)

    @property
    def unread_bytes(self) -> int:
        """What it was sent and has not said to have received."""
        return self.sent_bytes - self.received_bytes

    def has_received(self, nbytes: int) -> None:
        """Take what it says to have received: at most what it was sent, and never less than before, as lanes overtake each
        other."""
        self.received_bytes = max(self.received_bytes, min(nbytes, self.sent_bytes))

    def raise_newest(self, version: Version) -> None:
        """Take a version as the newest known one if it is newer."""
        if self.newest is None or version > self.newest:
            self.newest = version

    def lag(self, version: Version) -> int | None:
        """Versions from `version` to the newest known one; None across epochs, where steps cannot be compared."""
        if self.newest is None or self.newest.epoch != version.epoch:
            return None
        return self.newest.step - version.step


class Members:
    """All members of a run by name and by routing id. heartbeat_s: how often each of them promises a sign of life."""

    def __init__(
        self,
        *,
        run_id: str,
        names: frozenset[AgentName] | None,
        heartbeat_s: float,
        window: int,
        known: Mapping[AgentName, Incarnation] | None = None,
    ) -> None:
        """known: the last incarnations that an earlier hub of the run wrote down; they have left, until they come back."""
        self._run_id = run_id
        self._names = names
        self._heartbeat_s = heartbeat_s
        self._window = window
        self._by_name: dict[AgentName, Member] = {}
        self._by_peer: dict[bytes, Member] = {}
        for name, incarnation in (known or {}).items():
            self._by_name[name] = Member(
                name=name,
                peer=incarnation.peer,
                epoch=incarnation.epoch,
                observer=False,
                heard_at=0.0,
                seen=SeenRecords(window, 1, incarnation),
                left=True,
            )

    def __getitem__(self, name: AgentName) -> Member:
        return self._by_name[name]

    def of(self, peer: bytes) -> Member | None:
        """The member whose present incarnation has this routing id."""
        return self._by_peer.get(peer)

    def peers(self) -> tuple[bytes, ...]:
        return tuple(self._by_peer)

    def join(self, peer: bytes, hello: Hello, now: float) -> Member | Refused:
        """Take a worker in, or say why not. The same incarnation may join again and keeps its epoch."""
        refusal = self._refusal(peer, hello, now)
        if refusal is not None:
            return refusal
        member = self._by_name.get(hello.name)
        if member is None:
            member = Member(
                name=hello.name,
                peer=peer,
                epoch=hello.epoch or 0,
                observer=hello.observer,
                heard_at=now,
                seen=SeenRecords(self._window, hello.first_seq),
            )
            self._by_name[hello.name] = member
        elif member.peer != peer:
            self._by_peer.pop(member.peer, None)
            member.peer = peer
            # One that an earlier hub had welcomed keeps the epoch that its records carry.
            member.epoch = max(member.epoch + 1, hello.epoch or 0)
            member.observer = hello.observer
            member.seen = SeenRecords(self._window, hello.first_seq)
        member.heard_at, member.left = now, False
        member.sent_bytes = member.received_bytes = 0
        self._by_peer[peer] = member
        return member

    def _refusal(self, peer: bytes, hello: Hello, now: float) -> Refused | None:
        holder = holder_of(peer)
        if holder is not None and hello.name != holder.name:
            return refused(
                "not_yours", f"this key is that of {holder.name!r}, got name={hello.name!r}: use the key of that name"
            )
        if holder is not None and hello.observer != holder.observer:
            detail = f"the key of {holder.name!r} was made with observer={holder.observer}, got observer={hello.observer}"
            return refused("role", detail)
        if hello.run_id != self._run_id:
            detail = f"this hub serves run {self._run_id!r}, got run_id={hello.run_id!r}: is an older run still alive?"
            return refused("run_id", detail)
        if self._names is not None and not hello.observer and hello.name not in self._names:
            detail = f"the members of this run are {', '.join(sorted(self._names))}, got name={hello.name!r}"
            return refused("unknown_member", detail)
        member = self._by_name.get(hello.name)
        if member is not None and hello.observer and not member.observer:
            detail = f"an observer takes no worker's name, also when that has left, got name={hello.name!r}: choose another"
            return refused("duplicate_name", detail)
        if member is not None and member.peer != peer and self.state(member, now) in ("live", "suspect"):
            detail = (
                f"a worker of this name is alive, got name={hello.name!r}: choose another name, or wait "
                f"{GONE_HEARTBEATS * self._heartbeat_s:g} s after it died"
            )
            return refused("duplicate_name", detail)
        if member is None and len(self._by_name) >= MAX_MEMBERS:
            return refused("full", f"a hub has at most {MAX_MEMBERS} members, got one more: {hello.name!r}")
        if self._by_peer.get(peer, member) is not member:
            return refused("duplicate_name", f"one routing id cannot have two names, got {hello.name!r}")
        return None

    def leave(self, member: Member) -> None:
        member.left = True
        self._by_peer.pop(member.peer, None)
        if member.observer:
            del self._by_name[member.name]

    def silence(self, peer: bytes) -> None:
        """Take a member as gone until it is heard again: the transport cannot reach it."""
        member = self._by_peer.get(peer)
        if member is not None:
            member.heard_at -= GONE_HEARTBEATS * self._heartbeat_s

    def state(self, member: Member, now: float) -> MemberState:
        if member.left:
            return "left"
        silent_heartbeats = (now - member.heard_at) / self._heartbeat_s
        if silent_heartbeats >= GONE_HEARTBEATS:
            return "gone"
        return "suspect" if silent_heartbeats >= SUSPECT_HEARTBEATS else "live"

    def alive(self, name: AgentName, now: float) -> bool:
        """Whether a worker of this name is there, or may be."""
        member = self._by_name.get(name)
        return member is not None and self.state(member, now) in ("live", "suspect")

    def newest(self) -> dict[AgentName, Version]:
        return {name: member.newest for name, member in self._by_name.items() if member.newest is not None}

    def stats(self, now: float) -> dict[AgentName, WorkerStats]:
        return {name: self._stats(member, now) for name, member in self._by_name.items() if not member.observer}

    def _stats(self, member: Member, now: float) -> WorkerStats:
        tally = member.tally
        return WorkerStats(
            state=self.state(member, now),
            epoch=member.epoch,
            step=member.progress[0],
            version=member.newest,
            silent_s=now - member.heard_at,
            since_progress_s=None if member.progress_at is None else now - member.progress_at,
            published=tally.published,
            accepted=dict(tally.accepted),
            accepted_bytes=dict(tally.accepted_bytes),
            refused=dict(tally.refused),
            duplicates=tally.duplicates,
            delivered={teacher: dict(kinds) for teacher, kinds in tally.delivered.items()},
            delivered_bytes=tally.delivered_bytes,
            withheld=tally.withheld,
        )
