"""The settings of a hub."""

from __future__ import annotations

import msgspec

__all__ = ["Edges", "HubConfig"]

Edges = frozenset[tuple[str, str, str]]


class HubConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A hub. run_id: workers of another are refused. members: names that may join, None for any. edges: allowed (learner,
    teacher, kind), for requests (asker, server, kind), None for all; experience of the kind "prompts" always crosses.

    memory_bytes: records kept, each with 750 bytes more than its own and 360 for every prompt id; the oldest go first.
    credit_*: what a worker may have published without an answer, and (bytes) been sent and not read. heartbeat_s: how often
    workers give a sign of life; gone after three that are missing. max_age_s: records older than this go; None keeps them.
    disk_bytes: of records in the hub's directory, where it has one; the oldest go first, in whole segments. blob_bytes: of
    blobs, on disk in any case; the least recently used go first.
    """

    run_id: str
    members: frozenset[str] | None = None
    edges: Edges | None = None
    memory_bytes: int = 256 << 20
    credit_messages: int = 64
    credit_bytes: int = 64 << 20
    heartbeat_s: float = 2.0
    max_age_s: float | None = None
    disk_bytes: int = 16 << 30
    blob_bytes: int = 16 << 30

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "credit_messages", "credit_bytes", "heartbeat_s", "disk_bytes", "blob_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be > 0, got {name}={getattr(self, name)!r}")
        if self.max_age_s is not None and not self.max_age_s > 0:
            raise ValueError(f"`max_age_s` must be > 0 or None, got max_age_s={self.max_age_s!r}")
