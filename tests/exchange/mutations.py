"""Messages of every type, and what bad luck or malice may make of them. Everything is drawn from the given generator."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any, get_args

import msgspec
import msgspec.inspect as shape

from exchange.testing import a_rollout_group, a_success, rewards_of, step_prompts
from exchange.types import AnyExperience
from exchange.wire import MAJOR, Buffer, encode_message, encode_record

Frames = list[bytes]

FIXED = struct.Struct("<4s4HIQQIxxxx")
# Of each kind of field of the fixed head: magic, major, minor, flags, payload frames, header bytes, payload bytes, id, crc.
WIDTHS = (None, 16, 16, 16, 16, 32, 64, 64, 32)
# An array reference of one dimension, as msgpack has it: dtype, ndim, frame, offset, bytes, length.
REFERENCE, LIE = b"\xc7\x1f\x01", struct.Struct("<4sBHQQQ")
LIMITS = (0, 0xFF, 0xFFFF, 2**64 - 1, 2**64 - 1, 2**64 - 1)
SPANS = (0, 1, 2, 4, 8, 9, 31, 64, 65535, 2**31, 2**62, 2**63, 2**64 - 4, 2**64 - 1)
INTS = (0, 1, 2, 7, 63, 64, 65, 255, 4096, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -(2**31), -(2**63))
FLOATS = (0.0, 0.001, 1.0, -1.0, 1e18, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "alpha", "beta", "rewards", "rollouts", "r", "judges", "\0", "a" * 64, "f" * 64, "é" * 64, "x" * 5000, "../up")
BYTES = (b"", b"\0", b"\x80", b"\xc1", b"\x91" * 100, b"\xdd\xff\xff\xff\xff", bytes(1000))
SANE_SHARE = 0.7


def types_in(union: Any) -> list[type[msgspec.Struct]]:
    return list(get_args(union))


def a_message(rng: Random, kind: type[msgspec.Struct], *, hostile: float = 0.3) -> msgspec.Struct:
    """A message of this type whose fields have the right types; hostile: how often a value is one that nobody sends."""
    try:
        return msgspec.convert(_of(rng, _described(kind), hostile) | {"type": kind.__struct_config__.tag}, kind)
    except msgspec.ValidationError:
        return a_message(rng, kind, hostile=hostile / 2)


_described = cache(shape.type_info)


def _of(rng: Random, kind: shape.Type, hostile: float) -> Any:
    bad = rng.random() < hostile
    match kind:
        case shape.IntType():
            return rng.choice(INTS) if bad else rng.randrange(1, 64)
        case shape.FloatType():
            return rng.choice(FLOATS) if bad else rng.random()
        case shape.StrType():
            return rng.choice(TEXTS) if bad else rng.choice(("alpha", "r", "rewards", "f" * 64))
        case shape.BytesType():
            return rng.choice(BYTES) if bad else a_record(rng)[0]
        case shape.BoolType():
            return rng.random() < 0.5
        case shape.NoneType():
            return None
        case shape.LiteralType():
            return rng.choice(kind.values)
        case shape.VarTupleType() | shape.FrozenSetType():
            return [_of(rng, kind.item_type, hostile) for _ in range(rng.randrange(4))]
        case shape.DictType():
            return {_of(rng, kind.key_type, hostile): _of(rng, kind.value_type, hostile) for _ in range(rng.randrange(3))}
        case shape.UnionType():
            return _of(rng, rng.choice(kind.types), hostile)
        case shape.StructType():
            fields = {field.encode_name: _of(rng, field.type, hostile) for field in kind.fields}
            # A blob's, which is nothing else.
            return fields | {"id": "f" * 64} if isinstance(fields.get("id"), str) else fields
    raise TypeError(f"no value of {kind} is known here: teach this function")


def any_value(rng: Random, depth: int = 0) -> Any:
    """Whatever msgpack can say."""
    choices: list[Callable[[], Any]] = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.choice(INTS),
        lambda: rng.choice(FLOATS),
        lambda: rng.choice(TEXTS),
        lambda: rng.choice(BYTES),
        lambda: msgspec.msgpack.Ext(rng.choice((-128, -1, 0, 1, 2, 127)), rng.randbytes(rng.choice((0, 1, 23, 31, 87)))),
    ]
    if depth < 3:
        choices += [
            lambda: [any_value(rng, depth + 1) for _ in range(rng.randrange(4))],
            lambda: {rng.choice(TEXTS): any_value(rng, depth + 1) for _ in range(rng.randrange(4))},
        ]
    return rng.choice(choices)()


def a_record(rng: Random) -> Frames:
    """Body and frames of a record of a shipped kind, whole."""
    return list(rng.choice(_RECORDS))


def _records() -> list[Frames]:
    records: list[AnyExperience] = [
        a_rollout_group("alpha", 1, "p", completions=2),
        a_success("alpha", 1, "p"),
        rewards_of("alpha", 1, "p"),
        step_prompts("alpha", 1, "p", "q"),
    ]
    return [[record.body, *map(bytes, record.frames)] for record in map(encode_record, records)]


_RECORDS = _records()


def sealed(header: bytes, payload: Sequence[bytes] = (), request_id: int = 1) -> Frames:
    """A message whose fixed head is true, whatever its header is."""
    nbytes = sum(map(len, payload))
    fixed = FIXED.pack(b"MRLX", MAJOR, 0, 0, len(payload), len(header), nbytes, request_id, zlib.crc32(header))
    return [fixed + header, *payload]


def a_multipart(rng: Random, union: Any) -> Frames:
    """One valid message with a payload that may fit it."""
    payload: Sequence[Buffer] = a_record(rng)[1:] if rng.random() < SANE_SHARE else ()
    return list(map(bytes, encode_message(a_message(rng, rng.choice(types_in(union))), rng.choice(INTS[:15]), payload)))


def mutated(rng: Random, union: Any) -> Frames:
    """One valid multipart after one to three mutations."""
    frames = a_multipart(rng, union)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        frames = rng.choice(MUTATIONS)(rng, union, frames)
    return frames


def flipped(rng: Random, raw: bytes) -> bytes:
    """One to eight bits are others."""
    changed = bytearray(raw)
    for _ in range(rng.randrange(1, 9) if raw else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng: Random, raw: bytes) -> bytes:
    return raw[: rng.randrange(len(raw) + 1)]


def with_a_lying_reference(rng: Random, body: bytes) -> bytes:
    """A record's body in which one array reference says something else: which array, where, how large, of what."""
    places = [at for at in range(len(body)) if body.startswith(REFERENCE, at)]
    if not places:
        return flipped(rng, body)
    at = rng.choice(places) + len(REFERENCE)
    fields: list[Any] = list(LIE.unpack_from(body, at))
    index = rng.randrange(len(fields))
    fields[index] = rng.choice(SPANS) & LIMITS[index] if index else rng.choice((b"f4", b"f8", b"u1", b"O", b"\xff" * 4))
    return body[:at] + LIE.pack(*fields) + body[at + LIE.size :]


def _flip(rng: Random, union: Any, frames: Frames) -> Frames:
    return _in_one(rng, frames, lambda raw: flipped(rng, raw))


def _cut(rng: Random, union: Any, frames: Frames) -> Frames:
    return _in_one(rng, frames, lambda raw: cut(rng, raw))


def _noise(rng: Random, union: Any, frames: Frames) -> Frames:
    return _in_one(rng, frames, lambda raw: rng.randbytes(rng.choice((0, 1, 39, 40, 41, 300))))


def _spliced(rng: Random, union: Any, frames: Frames) -> Frames:
    other = a_multipart(rng, union)[0]
    return [cut(rng, frames[0]) + other[rng.randrange(len(other) + 1) :], *frames[1:]]


def _behind_each_other(rng: Random, union: Any, frames: Frames) -> Frames:
    other = a_multipart(rng, union)
    return [frames[0] + other[0], *frames[1:], *other[1:]]


def _shuffled(rng: Random, union: Any, frames: Frames) -> Frames:
    mixed = [*frames, *rng.choice((frames, frames[:1], [b""], []))]
    rng.shuffle(mixed)
    return mixed[: rng.randrange(1, len(mixed) + 1)]


def _wrong_number(rng: Random, union: Any, frames: Frames) -> Frames:
    if len(frames[0]) < FIXED.size:
        return frames
    fields = list(FIXED.unpack_from(frames[0]))
    index = rng.randrange(len(fields))
    width = WIDTHS[index]
    if width is None:
        fields[index] = rng.randbytes(4)
    else:
        fields[index] = (rng.choice(INTS) + rng.choice((0, fields[index]))) & ((1 << width) - 1)
    return [FIXED.pack(*fields) + frames[0][FIXED.size :], *frames[1:]]


def _resealed(rng: Random, union: Any, frames: Frames) -> Frames:
    header = frames[0][FIXED.size :]
    return sealed(rng.choice((flipped, cut))(rng, header), frames[1:], rng.choice(INTS[:15]))


def _deep(rng: Random, union: Any, frames: Frames) -> Frames:
    opener = rng.choice((b"\x91", b"\x81\xa1x", b"\xdc\x00\x01", b"\xdf\x00\x00\x00\x01\xc0"))
    return sealed(frames[0][FIXED.size :][: rng.choice((0, 8))] + opener * rng.choice((31, 32, 33, 600, 5000)), frames[1:])


def _bomb(rng: Random, union: Any, frames: Frames) -> Frames:
    bomb = rng.choice(
        (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdd\0\0\x40\0" + b"\x90" * 0x4000)
    )
    tag = rng.choice(types_in(union)).__struct_config__.tag
    return sealed(b"\x82\xa4type" + msgspec.msgpack.encode(tag) + b"\xa5kinds" + bomb, frames[1:])


def _wrong_types(rng: Random, union: Any, frames: Frames) -> Frames:
    kind = rng.choice(types_in(union))
    fields = {field.encode_name: any_value(rng) for field in msgspec.structs.fields(kind) if rng.random() < 0.9}
    tag = kind.__struct_config__.tag if rng.random() < 0.9 else any_value(rng)
    return sealed(msgspec.msgpack.encode({"type": tag} | fields), frames[1:], rng.choice(INTS[:15]))


def _one_wrong_type(rng: Random, union: Any, frames: Frames) -> Frames:
    message = a_message(rng, rng.choice(types_in(union)))
    fields = msgspec.to_builtins(message, builtin_types=(bytes, float))
    fields[rng.choice(list(fields))] = any_value(rng)
    return sealed(msgspec.msgpack.encode(fields), frames[1:], rng.choice(INTS[:15]))


def _of_strange_content(rng: Random, union: Any, frames: Frames) -> Frames:
    return list(map(bytes, encode_message(a_message(rng, rng.choice(types_in(union)), hostile=0.5), 1, frames[1:])))


def _in_one(rng: Random, frames: Frames, change: Callable[[bytes], bytes]) -> Frames:
    index = rng.choice((0, 0, rng.randrange(len(frames))))
    return [change(frame) if at == index else frame for at, frame in enumerate(frames)]


MUTATIONS: list[Callable[[Random, Any, Frames], Frames]] = [
    _flip,
    _cut,
    _noise,
    _spliced,
    _behind_each_other,
    _shuffled,
    _wrong_number,
    _resealed,
    _deep,
    _bomb,
    _wrong_types,
    _one_wrong_type,
    _of_strange_content,
]
