"""Frames: what is whole is decoded, what is not never reaches a handler."""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from exchange.depth import MAX_DEPTH, check_depth
from exchange.errors import ProtocolError, RecordTooLargeError, WireError
from exchange.messages import Gather, Hello, Publish, Rows, ToHub, ToWorker
from exchange.testing import a_rollout_group, a_success, rewards_of, step_prompts
from exchange.types import AgentName, AnyExperience, Message, PromptId, RolloutGroup, VerifiedSuccesses
from exchange.wire import (
    MAJOR,
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    RecordDecoder,
    encode_message,
    encode_record,
    hub_decoder,
    joined,
    messages_in,
)

GOLDEN = Path(__file__).parents[1] / "golden"
KINDS: dict[str, Callable[[], AnyExperience]] = {
    "prompts-1": lambda: step_prompts("alpha", 3, "4f0c", "77aa"),
    "rewards-1": lambda: rewards_of("alpha", 3, "4f0c", [1.0, 0.0, 0.5]),
    "successes-1": lambda: a_success("alpha", 3, "4f0c", "cbä"),
    "rollouts-1": lambda: a_rollout_group("alpha", 3, "4f0c", completions=2, tokens=3),
}


def views(frames: Sequence[bytes | memoryview]) -> list[memoryview]:
    return [memoryview(frame) for frame in frames]


def same(left: AnyExperience, right: AnyExperience) -> bool:
    pairs = [(getattr(left, name), getattr(right, name)) for name in right.__struct_fields__]
    return type(left) is type(right) and all(
        np.array_equal(a, b, equal_nan=True) and a.dtype == b.dtype if isinstance(a, np.ndarray) else a == b for a, b in pairs
    )


def framed(header: bytes, *, magic: bytes = b"MRLX", major: int = MAJOR, crc: int | None = None) -> list[memoryview]:
    checksum = zlib.crc32(header) if crc is None else crc
    fixed = struct.pack("<4s4HIQQIxxxx", magic, major, 0, 0, 0, len(header), 0, 1, checksum)
    return [memoryview(fixed + header)]


def nested(depth: int) -> bytes:
    return b"\x81\xa1x" + b"\x91" * depth + b"\xc0"


@pytest.mark.parametrize("name", KINDS)
def test_golden_files_decode_for_ever(name: str) -> None:
    """tests/golden/*.bin hold one record of each stored kind: body length u32, body, frame 0.

    A new schema version gets a new file; those of old versions stay. To write one (KINDS, GOLDEN from this module):
    record = encode_record(KINDS[name]()); (GOLDEN / f"{name}.bin").write_bytes(
        struct.pack("<I", len(record.body)) + record.body + b"".join(record.frames))
    """
    raw = (GOLDEN / f"{name}.bin").read_bytes()
    (length,) = struct.unpack_from("<I", raw)
    body, frame = raw[4 : 4 + length], memoryview(raw)[4 + length :]
    assert same(RecordDecoder().decode(body, [frame]), KINDS[name]())
    record = encode_record(KINDS[name]())
    assert (record.body, b"".join(record.frames)) == (body, bytes(frame))


def test_a_reader_ignores_fields_that_it_does_not_know() -> None:
    record = encode_record(step_prompts("alpha", 1, "p"))
    fields = msgspec.msgpack.decode(record.body) | {"added_later": [1, {"x": 2}]}
    got = RecordDecoder().decode(msgspec.msgpack.encode(fields), ())
    assert same(got, step_prompts("alpha", 1, "p"))


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [memoryview(b"GET / HTTP/1.1\r\n\r\n")],
        framed(b"\x80", magic=b"HTTP"),
        framed(b"\x80", crc=7),
        [framed(b"\x80")[0][:20]],
        [*framed(b"\x80"), memoryview(b"one frame more")],
        framed(b"\x00" * (MAX_HEADER_BYTES + 1)),
        framed(b"\x80\x04\x95 not a pickle either"),
        framed(msgspec.msgpack.encode({"type": "no such message"})),
        framed(msgspec.msgpack.encode({"type": "publish", "seq": "one", "body": b""})),
        framed(b"\xdd\xff\xff\xff\xff"),
        framed(nested(5_000)),
    ],
    ids=["empty", "http", "magic", "crc", "short", "extra", "long", "pickle", "tag", "field", "bomb", "nested"],
)
def test_bad_frames_are_wire_errors(frames: list[memoryview]) -> None:
    with pytest.raises(WireError):
        hub_decoder().decode(frames)


def test_another_protocol_version_is_told_apart() -> None:
    with pytest.raises(ProtocolError, match=r"got 9\.0"):
        hub_decoder().decode(framed(b"\x80", major=9))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_garbage_is_never_anything_but_a_wire_error(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        hub_decoder().decode(views(list(frames)))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_one_wrong_byte_is_noticed_or_harmless(position: int, flip: int) -> None:
    frames = encode_message(Publish(seq=1, body=encode_record(rewards_of("alpha", 1, "p")).body))
    raw = bytearray(frames[0])
    position %= len(raw)
    raw[position] ^= flip
    try:
        got = hub_decoder().decode([memoryview(raw)])
    except WireError:
        return
    assert got.message == hub_decoder().decode(views(frames)).message


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300))
def test_a_garbage_record_is_never_anything_but_a_wire_error(body: bytes) -> None:
    with pytest.raises(WireError):
        RecordDecoder().decode(body, ())


def test_nesting_is_measured_before_decoding_at_every_recursion_limit() -> None:
    check_depth(nested(MAX_DEPTH - 1))
    with pytest.raises(WireError, match="nest"):
        check_depth(nested(MAX_DEPTH))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        with pytest.raises(WireError, match="nest"):
            hub_decoder().decode(framed(nested(200_000)))
        with pytest.raises(WireError, match="nest"):
            RecordDecoder().decode(nested(200_000), ())
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    st.recursive(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=40) | st.binary(max_size=300),
        lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.integers(0, 99), inner, max_size=17),
        max_leaves=20,
    )
)
def test_depth_agrees_with_a_recursive_count(value: object) -> None:
    def depth(item: object) -> int:
        if isinstance(item, dict):
            return 1 + max(map(depth, item.values()), default=0)
        return 1 + max(map(depth, item), default=0) if isinstance(item, list) else 0

    def non_empty_depth(item: object) -> int:
        if isinstance(item, dict):
            return 1 + max(map(non_empty_depth, item.values()), default=0) if item else 0
        return (1 + max(map(non_empty_depth, item), default=0) if item else 0) if isinstance(item, list) else 0

    data = msgspec.msgpack.encode(value)
    check_depth(data, limit=depth(value))
    deepest = non_empty_depth(value)
    if deepest > 1:
        with pytest.raises(WireError):
            check_depth(data, limit=deepest - 1)


def test_no_error_of_a_decoder_gets_past_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exchange.wire.check_depth", lambda data: None)
    with pytest.raises(WireError, match="decoded"):
        hub_decoder().decode(framed(nested(5_000)))
    with pytest.raises(WireError, match="decoded"):
        RecordDecoder().decode(nested(5_000), ())


def test_a_record_without_room_in_the_header_is_not_sent() -> None:
    group = a_rollout_group("alpha", 1, "p")
    long = msgspec.structs.replace(group, messages=(Message(role="user", content="x" * MAX_BODY_BYTES),))
    with pytest.raises(RecordTooLargeError, match=r"RolloutGroup.*shorten"):
        encode_record(long)
    many = Gather(kinds=frozenset({"rewards"}), prompt_ids=frozenset(PromptId(f"{number:064}") for number in range(5000)))
    with pytest.raises(RecordTooLargeError, match="fewer prompt ids"):
        encode_message(many)


@pytest.mark.parametrize("name", ["ids", "logprobs", "finished", "rewards", "text_lengths", "token_counts", "texts"])
def test_arrays_of_unequal_length_are_no_record(name: str) -> None:
    group = a_rollout_group("alpha", 1, "p")
    with pytest.raises(ValueError, match="must be one-dimensional"):
        msgspec.structs.replace(group, **{name: getattr(group, name)[:-1]})


@pytest.mark.parametrize(("ends", "counts"), [([1, 2, 4], [3]), ([-1, 2, 3], [3]), ([1, 2, 3], [4]), ([], [-1])])
def test_tokens_that_end_outside_of_their_text_are_no_record(ends: list[int], counts: list[int]) -> None:
    success = a_success("alpha", 1, "p", "abc")
    with pytest.raises(ValueError, match=r"token_ends|token_counts"):
        msgspec.structs.replace(success, token_ends=np.array(ends, np.int32), token_counts=np.array(counts, np.int32))


def test_messages_keep_their_request_id_and_payload() -> None:
    group = a_rollout_group("alpha", 1, "p", completions=2, tokens=200_000)
    record = encode_record(group)
    assert len(record.frames) == 4, "texts share frame 0 with what is small; ids, logprobs, ends have frames of their own"
    frames = encode_message(Publish(seq=5, body=record.body), 77, record.frames)
    got = hub_decoder().decode(views(frames))
    assert got.request_id == 77
    assert isinstance(got.message, Publish)
    decoded = RecordDecoder().decode(got.message.body, got.payload)
    assert isinstance(decoded, RolloutGroup) and same(decoded, group)


def test_a_hello_needs_a_name_of_sane_length() -> None:
    for name in ("", "x" * 65):
        with pytest.raises(ValueError, match="characters"):
            Hello(name=AgentName(name), run_id="r")


@pytest.mark.parametrize(
    "hostile",
    [
        {"type": "hello", "name": "alpha", "run_id": "r", "epoch": 2**64 - 1},
        {"type": "request", "id": 1, "to": "beta", "deadline_s": 1.0, "body": b"", "tokens": 2**64 - 1},
        {"type": "reply", "asker": "beta", "id": 1, "body": b"", "tokens": 2**64 - 1},
    ],
    ids=["epoch", "asked tokens", "answered tokens"],
)
def test_numbers_that_would_grow_out_of_every_answer_are_no_message(hostile: dict[str, object]) -> None:
    with pytest.raises(WireError, match=r"2\^32|2\^40"):
        hub_decoder().decode(framed(msgspec.msgpack.encode(hostile)))


def test_the_types_of_both_directions_are_apart() -> None:
    assert not set(ToHub.__args__) & set(ToWorker.__args__)
    assert Rows in ToWorker.__args__
    assert VerifiedSuccesses in AnyExperience.__args__


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.binary(max_size=300_000), max_size=3), max_size=12))
def test_messages_that_go_together_come_apart_as_they_were(payloads: list[list[bytes]]) -> None:
    messages = [encode_message(Publish(seq=seq, body=b"x"), seq, payload) for seq, payload in enumerate(payloads, 1)]
    multiparts = [views(multipart) for multipart in joined(messages)]
    got = [hub_decoder().decode(frames) for multipart in multiparts for frames in messages_in(multipart)]
    assert [item.request_id for item in got] == list(range(1, len(payloads) + 1))
    assert [[bytes(frame) for frame in item.payload] for item in got] == payloads
    assert len(multiparts) <= 1 + sum(len(frame) for payload in payloads for frame in payload) // (200 << 10)


def test_any_number_of_small_messages_arrives() -> None:
    messages = [encode_message(Hello(name=AgentName("alpha"), run_id="r"), number) for number in range(2000)]
    multiparts = [views(multipart) for multipart in joined(messages)]
    assert len(multiparts) == 4
    got = [hub_decoder().decode(frames).request_id for multipart in multiparts for frames in messages_in(multipart)]
    assert got == list(range(2000))


def test_a_multipart_of_very_many_heads_costs_no_more_than_an_honest_one() -> None:
    (empty,) = framed(b"")
    pieces = list(messages_in([memoryview(bytes(empty) * 12_000)]))
    assert len(pieces) == 513
    assert pieces[-1][0].nbytes == 40 * (12_000 - 512)


def test_one_bad_message_among_others_spoils_no_other() -> None:
    good = views(encode_message(Hello(name=AgentName("alpha"), run_id="r")))
    bad = framed(b"\x80", crc=7)
    outcomes = []
    for frames in messages_in([memoryview(b"".join([*good, *bad, *good, b"no head", *good]))]):
        try:
            outcomes.append(type(hub_decoder().decode(frames).message).__name__)
        except WireError:
            outcomes.append("bad")
    assert outcomes == ["Hello", "bad", "Hello", "bad"], "behind a frame that begins no message nothing can be told apart"
