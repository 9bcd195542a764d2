"""The limits of a hub's storage on disk, and what is counted there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from exchange.segments import SEGMENT_BYTES

__all__ = ["DiskSettings", "DiskStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSettings:
    """Retention in whole segments, oldest first: over max_bytes, or when all of a segment is older than max_age_s.

    What a consumer still needs stays even so, up to hard_bytes. reach: how far a worker's sequence numbers may be ahead of
    its lowest unanswered one (twice the hub's credit_messages). skip_bad: start in spite of damaged records, without them.
    """

    segment_bytes: int = SEGMENT_BYTES
    max_bytes: int = 16 << 30
    hard_bytes: int = 32 << 30
    max_age_s: float | None = None
    reach: int = 128
    skip_bad: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.segment_bytes <= self.max_bytes <= self.hard_bytes:
            raise ValueError(
                f"0 < segment_bytes <= max_bytes <= hard_bytes must hold, got segment_bytes={self.segment_bytes}, "
                f"max_bytes={self.max_bytes}, hard_bytes={self.hard_bytes}"
            )
        if self.max_age_s is not None and not self.max_age_s > 0:
            raise ValueError(f"`max_age_s` must be > 0 or None, got max_age_s={self.max_age_s!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStats:
    """What is stored, and since the start: dropped_* by retention, of them forced_segments although still needed.

    Found at the start: reindexed records that the index had not known, truncated_bytes of a write that a crash cut off,
    skipped_bytes of damaged segments, lost records that the index knew and no segment has. damaged_index: moved there.
    damaged_reads: of records that readers had to go on without.
    """

    nbytes: int = 0
    segments: int = 0
    records: int = 0
    index_bytes: int = 0
    wal_bytes: int = 0
    dropped_records: int = 0
    dropped_segments: int = 0
    forced_segments: int = 0
    reindexed: int = 0
    truncated_bytes: int = 0
    skipped_bytes: int = 0
    lost: int = 0
    damaged_reads: int = 0
    damaged_index: Path | None = None
