"""Messages and records as frames.

    head       fixed 40 bytes, little-endian: magic, protocol major u16, minor u16, flags u16, payload frames u16,
               header bytes u32, payload bytes u64, request id u64, crc32 of the header u32, 4 reserved;
               then the header: one message of exchange/messages.py in msgpack
    payload    frames: arrays (exchange/arrays.py)

A multipart of the transport holds one message or several: frame 0 has their heads, one behind the other, and the payloads
follow in the same order.

Sizes, checksum and nesting are checked before anything is decoded, and decoding is typed. A minor version only adds
fields with defaults; a major one is refused.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Generic, TypeVar

import msgspec

from exchange.arrays import ArrayReader, ArrayWriter
from exchange.depth import check_depth
from exchange.errors import ProtocolError, RecordTooLargeError, WireError
from exchange.messages import ToHub, ToWorker
from exchange.types import AnyExperience, kind_of_tag

__all__ = [
    "JOINED_BYTES",
    "MAJOR",
    "MAX_BODY_BYTES",
    "MAX_HEADER_BYTES",
    "MAX_RECORD_BYTES",
    "Buffer",
    "Encoded",
    "Incoming",
    "MessageDecoder",
    "Outgoing",
    "RecordDecoder",
    "StructDecoder",
    "encode_message",
    "encode_record",
    "grouped",
    "hub_decoder",
    "join",
    "joined",
    "kind_of_tag",
    "messages_in",
    "tag_of",
    "worker_decoder",
]

MAGIC = b"MRLX"
MAJOR, MINOR = 2, 0
MAX_HEADER_BYTES = 256 << 10
MAX_RECORD_BYTES = 64 << 20
# A body must fit into the header of an answer, beside what else stands there.
MAX_BODY_BYTES = 192 << 10
MAX_PAYLOAD_BYTES = 2 * MAX_RECORD_BYTES
# An answer of the largest size has fewer, as small records share a frame.
MAX_FRAMES = 8192
# A multipart that has reached one of these gets no further message; so it has at most JOINED_FRAMES messages, and a reader
# looks for no more. Every multipart may cost a change of process, which between nine of them is most of what small records
# cost. (Measured, 8 agents and a hub on two cores, records of 27 KB: 256 KiB took 1.3 times the CPU time of 1 MiB.)
JOINED_BYTES = 1 << 20
JOINED_FRAMES = 512
MAX_HEADS_BYTES = JOINED_BYTES + MAX_HEADER_BYTES + (4 << 10)

_FIXED = struct.Struct("<4s4HIQQIxxxx")
_encoder = msgspec.msgpack.Encoder()

Buffer = bytes | memoryview
M = TypeVar("M")


class Incoming(msgspec.Struct, Generic[M], frozen=True, kw_only=True):
    """One decoded message with the frames of its payload."""

    message: M
    request_id: int
    payload: tuple[memoryview, ...]


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the hub to one peer; request_id: of what it answers."""

    peer: bytes
    message: ToWorker
    request_id: int = 0
    payload: Sequence[Buffer] = ()


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """One record: its msgpack body, and the frames that its array references point into."""

    body: bytes
    frames: tuple[Buffer, ...]

    @property
    def nbytes(self) -> int:
        return len(self.body) + sum(map(len, self.frames))


def encode_message(message: msgspec.Struct, request_id: int = 0, payload: Sequence[Buffer] = ()) -> list[Buffer]:
    """Frames of one message. Raises RecordTooLargeError when the header is over 256 KiB, or for 8192 frames and more."""
    header = _encoder.encode(message)
    if len(header) > MAX_HEADER_BYTES:
        raise RecordTooLargeError(
            f"the header of a message must have at most {MAX_HEADER_BYTES} bytes, got {len(header)} for "
            f"{type(message).__name__}: send fewer prompt ids, or shorter prompts"
        )
    if len(payload) > MAX_FRAMES:
        raise RecordTooLargeError(f"a message has at most {MAX_FRAMES} frames, got {len(payload)} for {type(message).__name__}")
    nbytes = sum(map(len, payload))
    fixed = _FIXED.pack(MAGIC, MAJOR, MINOR, 0, len(payload), len(header), nbytes, request_id, zlib.crc32(header))
    return [fixed + header, *payload]


def joined(messages: Sequence[Sequence[Buffer]]) -> Iterator[Sequence[Buffer]]:
    """The frames of many messages as few multiparts, in their order."""
    return map(join, grouped(messages))


def grouped(messages: Sequence[Sequence[Buffer]]) -> Iterator[Sequence[Sequence[Buffer]]]:
    """The messages that go into each multipart."""
    start = nbytes = count = 0
    for end, frames in enumerate(messages, 1):
        nbytes += sum(map(len, frames))
        count += len(frames)
        if nbytes >= JOINED_BYTES or count >= JOINED_FRAMES or end == len(messages):
            yield messages[start:end]
            start, nbytes, count = end, 0, 0


def join(messages: Sequence[Sequence[Buffer]]) -> Sequence[Buffer]:
    """One multipart of messages that are not joined yet."""
    if len(messages) == 1:
        return messages[0]
    return [b"".join([frames[0] for frames in messages]), *chain.from_iterable(frames[1:] for frames in messages)]


def messages_in(multipart: Sequence[memoryview]) -> Iterator[Sequence[memoryview]]:
    """The frames of each message; what is behind a head that is none, or behind more messages than anybody joins, is left in
    one piece, for the decoder to refuse."""
    heads, at, index, count = multipart[0], 0, 1, 0
    while at < heads.nbytes or index < len(multipart) or not at:
        end, behind = heads.nbytes, len(multipart)
        count += 1
        if count <= JOINED_FRAMES and _FIXED.size <= end - at and end <= MAX_HEADS_BYTES:
            magic, _, _, _, frames, header_len, _, _, _ = _FIXED.unpack_from(heads, at)
            if magic == MAGIC:
                end, behind = at + _FIXED.size + header_len, index + frames
        yield (heads[at:end], *multipart[index:behind])
        if at == end:
            return
        at, index = end, behind


class MessageDecoder(Generic[M]):
    """Turns frames into one message of the union it was made for. Raises WireError for anything else."""

    def __init__(self, union: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def decode(self, frames: Sequence[memoryview]) -> Incoming[M]:
        head = frames[0] if frames else memoryview(b"")
        if head.nbytes < _FIXED.size:
            raise WireError(f"a message starts with {_FIXED.size} bytes and a header, got {head.nbytes} bytes")
        magic, major, minor, _, count, header_len, payload_len, request_id, crc = _FIXED.unpack_from(head)
        if magic != MAGIC:
            raise WireError(f"not a message of this protocol, got magic={magic!r}")
        if major != MAJOR:
            raise ProtocolError(f"protocol {MAJOR}.{MINOR} is spoken here, got {major}.{minor}")
        payload = tuple(frames[1:])
        if count != len(payload) or count > MAX_FRAMES or header_len != head.nbytes - _FIXED.size:
            raise WireError(f"frames do not match the fixed header, got {len(payload)} payload frames for {count}")
        if header_len > MAX_HEADER_BYTES or payload_len > MAX_PAYLOAD_BYTES:
            raise WireError(f"message too large, got header={header_len} bytes, payload={payload_len} bytes")
        if payload_len != sum(map(len, payload)):
            raise WireError(f"payload does not have its stated size, got payload={payload_len} bytes")
        header = bytes(head[_FIXED.size :])
        if zlib.crc32(header) != crc:
            raise WireError(f"checksum of the header does not match, got crc={crc}")
        check_depth(header)
        try:
            message = self._decoder.decode(header)
        except Exception as error:  # foreign bytes: RecursionError, MemoryError and the like are no msgspec errors
            raise WireError(f"header cannot be decoded: {error}") from error
        return Incoming(message=message, request_id=request_id, payload=payload)


def hub_decoder() -> MessageDecoder[ToHub]:
    """Decoder of what workers send."""
    return MessageDecoder(ToHub)


def worker_decoder() -> MessageDecoder[ToWorker]:
    """Decoder of what the hub sends."""
    return MessageDecoder(ToWorker)


def encode_record(experience: msgspec.Struct) -> Encoded:
    """The record of one struct; its arrays' bytes are copied, so the caller may write into them at once.

    Raises RecordTooLargeError when what is not in arrays (prompt texts, ids) is over 192 KiB.
    """
    writer = ArrayWriter()
    body = msgspec.msgpack.Encoder(enc_hook=writer.hook).encode(experience)
    if len(body) > MAX_BODY_BYTES:
        raise RecordTooLargeError(
            f"a record has at most {MAX_BODY_BYTES} bytes beside its arrays, got {len(body)} in a "
            f"{type(experience).__name__}: shorten the prompt"
        )
    return Encoded(body=body, frames=writer.frames())


class StructDecoder(Generic[M]):
    """Turns records into structs of one union. One decode at a time: not for several threads."""

    def __init__(self, union: object) -> None:
        self._arrays = ArrayReader()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(
            union, ext_hook=self._arrays.ext_hook, dec_hook=self._arrays.dec_hook
        )

    def decode(self, body: bytes, frames: Sequence[memoryview]) -> M:
        """The struct. Raises WireError for anything that is not one of the union, whole and consistent."""
        check_depth(body)
        self._arrays.attach(frames)
        try:
            return self._decoder.decode(body)
        except Exception as error:  # foreign bytes, as above
            raise WireError(f"record cannot be decoded: {error}") from error
        finally:
            self._arrays.attach(())


class RecordDecoder(StructDecoder[AnyExperience]):
    """Turns records of the package's own kinds into experience."""

    def __init__(self) -> None:
        super().__init__(AnyExperience)


def tag_of(body: bytes) -> str | None:
    """The tag of an encoded struct, None when it has none or is no struct."""
    try:
        check_depth(body)
        return _tags.decode(body).type
    except Exception:  # foreign bytes, as above
        return None


class _Tag(msgspec.Struct):
    type: str


_tags = msgspec.msgpack.Decoder(_Tag)
