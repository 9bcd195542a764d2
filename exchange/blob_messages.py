"""The messages of the bulk lane between a worker and the hub. The framing is that of exchange/wire.py.

    worker      hub
    Offer  ->   Held | Taken | Refused    a blob that could be sent: it is there already, or from where on to send it
    Put    ->   Taken | Held | Refused    one piece; Held once the last one is in and the whole is verified
    Get    ->   Piece | Refused           one piece of a blob that is there, or comes within wait_s
    Doubt  ->   Held | Refused            its bytes were not those of its name: the hub looks, and drops it if that is so
           <-   Taken, request id 0       still verifying

Every question is about an offset and may be asked again after a break: the worker drives both directions, with a few pieces
in flight, and the hub remembers nothing of who reads what beyond what keeps a blob from being let go meanwhile.
"""

from __future__ import annotations

from exchange.message_base import Wire
from exchange.messages import Refused
from exchange.types import check_blob_id

__all__ = ["BULK_CREDIT", "PIECE_BYTES", "BulkToHub", "BulkToWorker", "Doubt", "Get", "Held", "Offer", "Piece", "Put", "Taken"]

PIECE_BYTES = 4 << 20
# Pieces that one worker has on the way, both directions together.
BULK_CREDIT = 8


class _OfBlob(Wire, frozen=True, kw_only=True):
    id: str

    def __post_init__(self) -> None:
        check_blob_id(self.id)


class Offer(_OfBlob, frozen=True, kw_only=True, tag="offer"):
    """Worker to hub, before any piece. Example: Offer(id="af13…", nbytes=134217728)."""

    nbytes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nbytes < 0:
            raise ValueError(f"`nbytes` must be >= 0, got nbytes={self.nbytes}")


class Put(_OfBlob, frozen=True, kw_only=True, tag="put"):
    """Worker to hub, one payload frame: the bytes from `offset` on. crc: their crc32c. Example: Put(id="af13…", offset=0,
    crc=3735928559)."""

    offset: int
    crc: int


class Get(_OfBlob, frozen=True, kw_only=True, tag="get"):
    """Worker to hub: the bytes from `offset` on, at most `nbytes` (0: only whether it is there); waits up to wait_s for a
    blob that is not there. Example: Get(id="af13…", offset=4194304, nbytes=4194304)."""

    offset: int
    nbytes: int
    wait_s: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.offset < 0 or not 0 <= self.nbytes <= PIECE_BYTES or not 0 <= self.wait_s <= MAX_WAIT_S:
            raise ValueError(
                f"a piece has `offset` >= 0, `nbytes` <= {PIECE_BYTES} and `wait_s` <= {MAX_WAIT_S:g}, got "
                f"offset={self.offset}, nbytes={self.nbytes}, wait_s={self.wait_s}"
            )


class Doubt(_OfBlob, frozen=True, kw_only=True, tag="doubt"):
    """Worker to hub, when what it got has not the checksums or the name that it should have. Example: Doubt(id="af13…")."""


class Held(Wire, frozen=True, kw_only=True, tag="held"):
    """Hub to worker: the blob is there, whole and verified."""


class Taken(Wire, frozen=True, kw_only=True, tag="taken"):
    """Hub to worker: everything before `end` is there, go on from it. Example: Taken(end=4194304)."""

    end: int


class Piece(Wire, frozen=True, kw_only=True, tag="piece"):
    """Hub to worker, one payload frame. nbytes: of the whole blob; crc: crc32c of the frame.

    file: where a worker on the same machine can read the rest by itself, told with the first piece; None elsewhere.
    Example: Piece(nbytes=134217728, crc=3735928559, file="/proc/4711/fd/12").
    """

    nbytes: int
    crc: int
    file: str | None = None


MAX_WAIT_S = 3600.0

BulkToHub = Offer | Put | Get | Doubt
BulkToWorker = Held | Taken | Piece | Refused
