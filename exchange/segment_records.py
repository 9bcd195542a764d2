"""One stored record as bytes.

header     fixed 40 bytes, little-endian: magic, format u16, checksum kind u16, checksum u32 of everything behind
           itself, frames u32, meta bytes u32, body bytes u32, record bytes u64, cursor u64
lengths    u64 for every frame
meta, body, and every frame at a multiple of 64; the record ends at one
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from exchange.arrays import padding
from exchange.errors import StorageError
from exchange.types import Cursor
from exchange.wire import MAX_FRAMES, Buffer

__all__ = [
    "HEADER_BYTES",
    "SegmentRecord",
    "StoredHead",
    "decode_head",
    "decode_stored",
    "encode_stored",
    "head_bytes",
    "stated_bytes",
    "stored_bytes",
]

MAGIC = b"MRLS"
FORMAT = 1

_HEADER = struct.Struct("<4sHHIIIIQQ")
_CHECKED_FROM = 12
HEADER_BYTES = _HEADER.size

Checksum = Callable[[Buffer, int], int]
_ZLIB, _CRC32C = 0, 1
_CHECKSUMS: dict[int, Checksum] = {_ZLIB: zlib.crc32}
try:
    from crc32c import crc32c
except ImportError:
    _KIND = _ZLIB
else:
    # In hardware, eight times as fast as zlib's.
    _CHECKSUMS[_CRC32C] = crc32c
    _KIND = _CRC32C


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRecord:
    """What is stored of one record. Read from disk, the frames are read-only and start at multiples of 64 in memory."""

    cursor: Cursor
    meta: bytes
    body: bytes
    frames: Sequence[Buffer]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredHead:
    """What the beginning of a stored record tells of it, unchecked. content_bytes: of its body and frames."""

    cursor: Cursor
    meta: bytes
    content_bytes: int


def encode_stored(record: SegmentRecord) -> tuple[list[Buffer], int]:
    """Buffers of one record, and their bytes together; frames are not copied."""
    lengths = [len(frame) if isinstance(frame, bytes) else frame.nbytes for frame in record.frames]
    count, meta_bytes, body_bytes = len(lengths), len(record.meta), len(record.body)
    inner = b"".join((struct.pack(f"<{count}Q", *lengths), record.meta, record.body))
    gap = padding(_HEADER.size + len(inner))
    nbytes = _HEADER.size + len(inner) + gap
    tail: list[Buffer] = []
    for frame, length in zip(record.frames, lengths, strict=True):
        tail.append(frame)
        if more := padding(length):
            tail.append(bytes(more))
        nbytes += length + more
    checked = _HEADER.pack(MAGIC, FORMAT, _KIND, 0, count, meta_bytes, body_bytes, nbytes, record.cursor)[_CHECKED_FROM:]
    checksum = _checksum(_KIND, [checked + inner + bytes(gap), *tail])
    head = _HEADER.pack(MAGIC, FORMAT, _KIND, checksum, count, meta_bytes, body_bytes, nbytes, record.cursor)
    return [head + inner + bytes(gap), *tail], nbytes


def stored_bytes(record: SegmentRecord) -> int:
    """Size of a record as stored."""
    head_bytes = _HEADER.size + 8 * len(record.frames) + len(record.meta) + len(record.body)
    lengths = [head_bytes, *(memoryview(frame).nbytes for frame in record.frames)]
    return sum(length + padding(length) for length in lengths)


def stated_bytes(header: memoryview, where: str) -> int | str:
    """Size of the record that begins with these 40 bytes, or what is wrong with them.

    Raises StorageError for a record that this program cannot read although it may be whole. where: for its text.
    """
    if header.nbytes < HEADER_BYTES:
        return "the file ends within a header"
    magic, form, kind, _, _, _, _, nbytes, _ = _HEADER.unpack(header)
    if magic != MAGIC:
        return f"no record begins here, got magic={magic!r}"
    if form != FORMAT or kind not in _CHECKSUMS:
        raise StorageError(
            f"this program reads records of format {FORMAT} with checksum kinds {sorted(_CHECKSUMS)}, got format={form}, "
            f"kind={kind}, {where}: use the version that wrote them; kind 1 needs the package crc32c"
        )
    return nbytes if nbytes >= HEADER_BYTES else f"a record is larger than its header, got nbytes={nbytes}"


def head_bytes(header: memoryview) -> int:
    """Bytes from the beginning of a record to the end of its meta; header: as `stated_bytes` has found it to be one."""
    _, _, _, _, count, meta_bytes, _, _, _ = _HEADER.unpack_from(header)
    nbytes: int = _HEADER.size + 8 * count + meta_bytes
    return nbytes


def decode_head(raw: memoryview) -> StoredHead:
    """The head of the record that begins with these bytes, which are its first `head_bytes` at least."""
    _, _, _, _, count, meta_bytes, body_bytes, _, cursor = _HEADER.unpack_from(raw)
    meta_at = _HEADER.size + 8 * count
    lengths = struct.unpack_from(f"<{count}Q", raw, _HEADER.size)
    meta = bytes(raw[meta_at : meta_at + meta_bytes])
    return StoredHead(cursor=Cursor(cursor), meta=meta, content_bytes=body_bytes + sum(lengths))


def decode_stored(raw: memoryview) -> SegmentRecord | str:
    """The record that these bytes are, exactly, or what is wrong with them."""
    if raw.nbytes < _HEADER.size:
        return f"the file ends within a record, got {raw.nbytes} bytes"
    magic, form, kind, checksum, count, meta_bytes, body_bytes, nbytes, cursor = _HEADER.unpack_from(raw)
    if magic != MAGIC or form != FORMAT or kind not in _CHECKSUMS or nbytes != raw.nbytes:
        return f"no record of {raw.nbytes} bytes begins here, got magic={magic!r}, format={form}, nbytes={nbytes}"
    if _checksum(kind, [raw[_CHECKED_FROM:]]) != checksum:
        return f"its checksum does not match, got cursor={cursor}"
    meta_at = _HEADER.size + 8 * count
    body_at = meta_at + meta_bytes
    ends = [body_at + body_bytes]
    if count > MAX_FRAMES or ends[0] > nbytes:
        return f"its parts do not fit into it, got frames={count}, meta={meta_bytes}, body={body_bytes}"
    for length in struct.unpack_from(f"<{count}Q", raw, _HEADER.size):
        ends.append(ends[-1] + padding(ends[-1]) + length)
    if ends[-1] + padding(ends[-1]) != nbytes:
        return f"its frames do not fill it, got end={ends[-1]}, nbytes={nbytes}"
    return SegmentRecord(
        cursor=Cursor(cursor),
        meta=bytes(raw[meta_at:body_at]),
        body=bytes(raw[body_at : ends[0]]),
        frames=tuple(raw[before + padding(before) : end] for before, end in pairwise(ends)),
    )


def _checksum(kind: int, buffers: Sequence[Buffer]) -> int:
    value = 0
    for buffer in buffers:
        value = _CHECKSUMS[kind](buffer, value)
    return value
