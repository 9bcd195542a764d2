"""The messages about leases: how a group of workers shares a stream of records (exchange/leases.py)."""

from __future__ import annotations

from typing import Literal

import msgspec

from exchange.message_base import MAX_DETAIL_CHARS, RowHeader, Wire, check_kinds, check_name
from exchange.types import AgentName, Cursor, Kind

__all__ = [
    "MAX_HELD",
    "MAX_LEASE_S",
    "AskDeadLetters",
    "DeadLetter",
    "DeadLetters",
    "Lease",
    "LeaseMessage",
    "Leased",
    "Outcome",
    "Release",
    "Renew",
]

MAX_LEASE_S = 86400.0
# Records that one worker may hold, in all groups; their bytes are bounded by its credit.
MAX_HELD = 256

# What a worker says of a record that it holds: settled; to be tried again; never looked at; of a type unknown to it.
Outcome = Literal["done", "failed", "returned", "unsupported"]


class Lease(Wire, frozen=True, kw_only=True, tag="lease"):
    """Ask for up to `count` records of the group's stream, as soon as there is one, or none at the deadline.

    id: random; with the worker's name it stands for the lease, so that a Lease that is sent again is joined to the first.
    group, kinds, agents: the first Lease of a group says which records it shares; agents: producers, None means all (but
    nobody gets what it published itself). lease_s: how long it holds without a Renew, on the hub's clock. max_bytes: of
    the answer, but at least one record. received_bytes: as in Gather.
    Example: Lease(id=4711, group="judges", kinds=frozenset({"rollouts"}), count=4, lease_s=30.0, deadline_s=10.0).
    """

    id: int
    group: str
    kinds: frozenset[Kind]
    lease_s: float
    agents: frozenset[AgentName] | None = None
    count: int = 1
    deadline_s: float = 0.0
    max_bytes: int = 8 << 20
    received_bytes: int = 0

    def __post_init__(self) -> None:
        check_name("group", self.group)
        check_kinds(self.kinds)
        if not 0 < self.lease_s <= MAX_LEASE_S:
            raise ValueError(f"`lease_s` must be > 0 and <= {MAX_LEASE_S:g} seconds, a day, got lease_s={self.lease_s}")
        if not 0 <= self.deadline_s <= MAX_LEASE_S:
            raise ValueError(f"`deadline_s` must be >= 0 and <= {MAX_LEASE_S:g} seconds, got deadline_s={self.deadline_s}")
        if self.count < 1 or self.max_bytes < 1:
            raise ValueError(f"`count` and `max_bytes` must be >= 1, got count={self.count}, max_bytes={self.max_bytes}")


class Leased(Wire, frozen=True, kw_only=True, tag="leased"):
    """Answer to Lease: records that no other worker of the group gets while this one holds them.

    rows: none when the deadline came first. deliveries: of each, how often it was handed out, this time included.
    """

    rows: tuple[RowHeader, ...]
    deliveries: tuple[int, ...]


class Renew(Wire, frozen=True, kw_only=True, tag="renew"):
    """The worker is still at what it holds of a lease: its time begins again. Sent by the loop that does the work.

    Refused with "lease_lost" when the lease has ended. Example: Renew(lease=4711).
    """

    lease: int


class Release(Wire, frozen=True, kw_only=True, tag="release"):
    """What became of records of a lease. detail: why, where it says "failed" or "unsupported".

    Refused with "lease_lost" when the lease had ended before.
    Example: Release(group="judges", lease=4711, cursors=(17,), outcome="failed", detail="ValueError: no such tokenizer").
    """

    group: str
    lease: int
    cursors: tuple[Cursor, ...]
    outcome: Outcome
    detail: str = ""

    def __post_init__(self) -> None:
        # The hub remembers what it was told. The character more is that of a text that was cut.
        if len(self.cursors) > MAX_HELD or len(self.detail) > MAX_DETAIL_CHARS + 1:
            raise ValueError(
                f"a word has at most {MAX_HELD} `cursors` and {MAX_DETAIL_CHARS} characters of `detail`, got "
                f"{len(self.cursors)} and {len(self.detail)}"
            )


class AskDeadLetters(Wire, frozen=True, kw_only=True, tag="ask_dead_letters"):
    """Ask which records of a group failed for good."""

    group: str


LeaseMessage = Lease | Renew | Release | AskDeadLetters


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A record that a group has given up after so many deliveries; it stays where it was, for a gather or the disk's log.

    reason: how the last delivery ended: "failed" by its worker's own word, with the detail, "expired", "gone" (the worker
    gave no sign of life), "left", "restarted" (the worker was started anew), "interrupted" (the hub was).
    worker: who had it last.
    """

    cursor: Cursor
    kind: Kind
    agent: AgentName
    deliveries: int
    reason: str
    detail: str
    worker: AgentName


class DeadLetters(Wire, frozen=True, kw_only=True, tag="dead_letters"):
    """Answer to AskDeadLetters. letters: the latest, oldest first. dead: how many there were in all."""

    letters: tuple[DeadLetter, ...]
    dead: int
