"""The limits of a hub's storage on disk."""

from __future__ import annotations

from dataclasses import dataclass

from exchange.segments import SEGMENT_BYTES

__all__ = ["DiskSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSettings:
    """Retention in whole segments, oldest first: over max_bytes, or when all of a segment is older than max_age_s.

    What a consumer still needs stays even so, up to hard_bytes. reach: how far a worker's sequence numbers may be ahead of
    its lowest unanswered one (twice the hub's credit_messages). skip_bad: start in spite of damaged records, without them.
    wal_alarm_bytes: of the index's write-ahead log, which only grows so far while some reader keeps it from being emptied.
    """

    segment_bytes: int = SEGMENT_BYTES
    max_bytes: int = 16 << 30
    hard_bytes: int = 32 << 30
    max_age_s: float | None = None
    reach: int = 128
    skip_bad: bool = False
    wal_alarm_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if not 0 < self.segment_bytes <= self.max_bytes <= self.hard_bytes:
            raise ValueError(
                f"0 < segment_bytes <= max_bytes <= hard_bytes must hold, got segment_bytes={self.segment_bytes}, "
                f"max_bytes={self.max_bytes}, hard_bytes={self.hard_bytes}"
            )
        if self.max_age_s is not None and not self.max_age_s > 0:
            raise ValueError(f"`max_age_s` must be > 0 or None, got max_age_s={self.max_age_s!r}")
