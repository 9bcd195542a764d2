"""What the hub counts."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from exchange.types import AgentName, Cursor, Kind, Version

__all__ = [
    "AskerStats",
    "BlobStats",
    "DiskStats",
    "GroupStats",
    "HubStats",
    "MemberState",
    "PairStats",
    "PairTally",
    "RecordStats",
    "Tally",
    "WorkerStats",
]

MemberState = Literal["live", "suspect", "gone", "left"]


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, over all its incarnations. published = accepted + refused + duplicates.

    accepted, accepted_bytes: by kind. refused: by reason. delivered: rows it was given, by producer and kind.
    withheld: rows that matched its requests and that no edge allows. version: newest known; step: last progress told.
    *_s: seconds since, by the hub's clock; None before the first.
    """

    state: MemberState
    epoch: int
    step: int | None
    version: Version | None
    silent_s: float
    since_progress_s: float | None
    published: int
    accepted: dict[Kind, int]
    accepted_bytes: dict[Kind, int]
    refused: dict[str, int]
    duplicates: int
    delivered: dict[AgentName, dict[Kind, int]]
    delivered_bytes: int
    withheld: int


class RecordStats(msgspec.Struct, frozen=True, kw_only=True):
    """One producer's records of one kind: accepted + recalled = stored + evicted (for room) + expired (for age) + committing.

    stored: in memory. recalled: taken back from disk at the hub's start. committing: on their way to the disk.
    """

    stored: int
    evicted: int
    expired: int
    recalled: int = 0
    committing: int = 0


class DiskStats(msgspec.Struct, frozen=True, kw_only=True):
    """What is on disk, and since the start: commits of groups of records; dropped_* by retention, of them forced_segments
    although still needed; wal_alarms: how often the index's log has grown over its limit, as a reader kept it.

    Found at the start: reindexed records that the index had not known, truncated_bytes of a write that a crash cut off,
    skipped_bytes of damaged segments, lost records that the index knew and no segment has; damaged_index: moved there.
    damaged_reads: of records that readers had to go on without.
    """

    nbytes: int = 0
    segments: int = 0
    records: int = 0
    commits: int = 0
    index_bytes: int = 0
    wal_bytes: int = 0
    wal_alarms: int = 0
    dropped_records: int = 0
    dropped_segments: int = 0
    forced_segments: int = 0
    reindexed: int = 0
    truncated_bytes: int = 0
    skipped_bytes: int = 0
    lost: int = 0
    damaged_reads: int = 0
    damaged_index: str | None = None


class PairStats(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one kind from one worker to another. asked = answered + unanswered + those that are open.

    unanswered: by reason: "failed", "deadline", "gone", "cancelled" and the like. *_tokens: as the two tell it.
    """

    asked: int
    answered: int
    unanswered: dict[str, int]
    asked_bytes: int
    served_bytes: int
    asked_tokens: int
    served_tokens: int


class AskerStats(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's requests. pairs: by the asked worker and kind. refused: by reason, what never reached a worker."""

    pairs: dict[AgentName, dict[str, PairStats]]
    refused: dict[str, int]
    duplicates: int


class GroupStats(msgspec.Struct, frozen=True, kw_only=True):
    """A group that leases records. matching = done + leased + waiting + dead + lost.

    matching: records of its kinds and agents (None: all), since its first lease or in the hub then. waiting: to be handed
    out, for the first time or again. dead: given up after too many deliveries. lost: let go by the hub before anybody had
    them. deliveries: how often a record was handed out.
    """

    kinds: tuple[Kind, ...]
    agents: tuple[AgentName, ...] | None
    matching: int
    done: int
    leased: int
    waiting: int
    dead: int
    lost: int
    deliveries: int


class BlobStats(msgspec.Struct, frozen=True, kw_only=True):
    """The bulk lane. blobs, stored_bytes: whole ones. uploads, downloads: that came to their end, with the bytes moved for
    them and for others. evicted: let go for room. refused: by reason. bad_frames: messages that could not be read."""

    blobs: int = 0
    stored_bytes: int = 0
    uploads: int = 0
    uploaded_bytes: int = 0
    downloads: int = 0
    downloaded_bytes: int = 0
    evicted: int = 0
    refused: dict[str, int] = {}
    bad_frames: int = 0


class HubStats(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="stats"):
    """The hub. accepted + recalled records = stored + evicted (for room) + expired (for age) + committing, over all workers.

    recalled, committing: as in RecordStats. disk: None for a hub in memory, else up to a second old.
    bad_frames: messages that could not be read. quarantined: records refused as malformed or unsupported; the last of both are
    kept raw in the hub. undeliverable: answers to peers that left or do not read.
    records: by producer and kind; their sums are the totals. requests: by asker. late_replies: came when it was over.
    groups: of workers that lease, by name.
    """

    run_id: str
    uptime_s: float
    workers: dict[AgentName, WorkerStats]
    cursor: Cursor
    stored: int
    stored_bytes: int
    evicted: int
    expired: int
    waiting_gathers: int
    bad_frames: int
    undeliverable: int
    records: dict[AgentName, dict[Kind, RecordStats]] = {}
    requests: dict[AgentName, AskerStats] = {}
    open_requests: int = 0
    late_replies: int = 0
    quarantined: int = 0
    groups: dict[str, GroupStats] = {}
    blobs: BlobStats = BlobStats()
    recalled: int = 0
    committing: int = 0
    disk: DiskStats | None = None


@dataclass(slots=True)
class Tally:
    """The running counts behind WorkerStats."""

    published: int = 0
    duplicates: int = 0
    withheld: int = 0
    delivered_bytes: int = 0
    accepted: Counter[Kind] = field(default_factory=Counter)
    accepted_bytes: Counter[Kind] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    delivered: defaultdict[AgentName, Counter[Kind]] = field(default_factory=lambda: defaultdict(Counter))

    def take_back(self, kind: Kind, nbytes: int, reason: str) -> None:
        """A record that was counted as accepted is refused after all."""
        self.accepted[kind] -= 1
        self.accepted_bytes[kind] -= nbytes
        self.refused[reason] += 1


@dataclass(slots=True)
class PairTally:
    """The running counts behind PairStats."""

    asked: int = 0
    answered: int = 0
    unanswered: Counter[str] = field(default_factory=Counter)
    asked_bytes: int = 0
    served_bytes: int = 0
    asked_tokens: int = 0
    served_tokens: int = 0
