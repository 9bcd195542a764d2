"""Valid messages of every type, mutated: whatever comes, a decoder says WireError and a hub goes on.

A failure prints the seed; FUZZ_SEED sets it for another run, FUZZ_FRAMES how many.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import msgspec
import pytest
from mutations import INTS, a_message, a_record, any_value, cut, flipped, mutated, types_in, with_a_lying_reference

from exchange.blob_messages import BulkToHub, BulkToWorker
from exchange.config import HubConfig
from exchange.errors import WireError
from exchange.hub import Hub
from exchange.messages import Hello, Publish, ToHub, ToWorker
from exchange.service import HubService
from exchange.testing import FakeClock
from exchange.types import AgentName
from exchange.wire import Buffer, MessageDecoder, RecordDecoder, encode_message, messages_in, worker_decoder

SEED = int(os.environ.get("FUZZ_SEED", "1"))
FRAMES = int(os.environ.get("FUZZ_FRAMES", "1000"))
SOAK_FRAMES = int(os.environ.get("FUZZ_FRAMES", "250000"))


@contextmanager
def said(what: str) -> Iterator[Callable[[int, object], None]]:
    """Adds to any error which frame of which seed it was."""
    at: list[object] = [0, None]

    def note(number: int, frames: object) -> None:
        at[:] = [number, frames]

    try:
        yield note
    except BaseException as error:
        error.add_note(f"{what}: frame {at[0]} of FUZZ_SEED={SEED}: {at[1]!r:.2000}")
        raise


def decode_mutations(union: Any, count: int) -> int:
    """How many of so many mutated multiparts held something unreadable."""
    rng, decoder, bad = Random(SEED), MessageDecoder[Any](union), 0
    with said(f"decoder of {union}") as note:
        for number in range(count):
            frames = mutated(rng, union)
            note(number, frames)
            for message in messages_in([memoryview(frame) for frame in frames]):
                try:
                    decoder.decode(message)
                except WireError:
                    bad += 1
    return bad


def a_bad_record(rng: Random) -> list[bytes]:
    body, *frames = a_record(rng)
    how = rng.randrange(6)
    if how == 0:
        fields = msgspec.msgpack.decode(body)
        fields[rng.choice(list(fields))] = any_value(rng)
        return [msgspec.msgpack.encode(fields), *frames]
    if how == 1:
        return [body, *frames[: rng.randrange(len(frames) + 1)], *([cut(rng, frames[0])] if frames else [])]
    if how == 2:
        return [with_a_lying_reference(rng, body), *frames]
    if how == 3:
        return [body, *(flipped(rng, frame) for frame in frames)]
    return [rng.choice((flipped, cut))(rng, body), *frames]


def decode_records(count: int) -> int:
    rng, decoder, bad = Random(SEED), RecordDecoder(), 0
    with said("record decoder") as note:
        for number in range(count):
            body, *frames = a_bad_record(rng)
            note(number, [body, *frames])
            try:
                decoder.decode(body, [memoryview(frame) for frame in frames])
            except WireError:
                bad += 1
    return bad


UNIONS = pytest.mark.parametrize(
    "union", [ToHub, ToWorker, BulkToHub, BulkToWorker], ids=["hub", "worker", "bulk hub", "bulk worker"]
)


@UNIONS
def test_mutated_messages_are_never_anything_but_a_wire_error(union: Any) -> None:
    assert decode_mutations(union, FRAMES) > FRAMES // 2


def test_mutated_records_are_never_anything_but_a_wire_error() -> None:
    assert decode_records(FRAMES) > FRAMES // 2


@pytest.mark.soak
@UNIONS
def test_very_many_mutated_messages_are_never_anything_but_a_wire_error(union: Any) -> None:
    assert decode_mutations(union, SOAK_FRAMES) > SOAK_FRAMES // 2


@pytest.mark.soak
def test_very_many_mutated_records_are_never_anything_but_a_wire_error() -> None:
    assert decode_records(SOAK_FRAMES) > SOAK_FRAMES // 2


async def hub_takes(count: int) -> None:
    """A hub hears members who say what nobody says, in messages that are well formed, while time passes."""
    rng, clock = Random(SEED), FakeClock()
    hub = Hub(HubConfig(run_id="r", memory_bytes=1 << 20, credit_bytes=64 << 10), clock=clock)
    to_worker = worker_decoder()

    def send(peer: bytes, frames: Sequence[Buffer]) -> bool:
        for message in messages_in([memoryview(frame) for frame in frames]):
            to_worker.decode(message)
        return rng.random() < 0.99

    service = HubService(hub, clock=clock, send=send)
    peers = [b"alpha", b"beta", b"third", b"stranger"]
    with said("hub") as note:
        for number in range(count):
            peer = rng.choice(peers)
            if rng.random() < 0.02:
                message: msgspec.Struct = Hello(name=AgentName(peer.decode()), run_id="r", observer=peer == b"third")
            else:
                message = a_message(rng, rng.choice(types_in(ToHub)))
            if isinstance(message, Publish) and rng.random() < 0.5:
                message = msgspec.structs.replace(message, seq=rng.randrange(1, 200), body=a_record(rng)[0])
            frames = encode_message(message, rng.choice(INTS[:15]), a_record(rng)[1:])
            note(number, message)
            service.receive([(peer, [memoryview(frame) for frame in frames])])
            if rng.random() < 0.1:
                clock.advance(rng.random())
                service.tick()
            deadline = hub.next_deadline()
            assert deadline is None or not math.isnan(deadline)
        clock.advance(10**9)
        service.tick()
        assert (hub.next_deadline() or math.inf) > clock()
    stats = hub.stats()
    assert stats.bad_frames == 0 and stats.waiting_gathers <= 64, stats
    service.close()


async def test_a_hub_takes_well_formed_messages_of_any_content() -> None:
    await hub_takes(FRAMES)


@pytest.mark.soak
async def test_a_hub_takes_very_many_well_formed_messages_of_any_content() -> None:
    await hub_takes(SOAK_FRAMES)
