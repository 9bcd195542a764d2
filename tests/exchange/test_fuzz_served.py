"""A hub's process under fire on all of its lanes, while an honest worker goes on."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hub_children import HubChild, hub_child
from mutations import mutated

import exchange
from exchange.blob_messages import BulkToHub
from exchange.endpoints import lane_endpoint
from exchange.errors import WireError
from exchange.messages import Hello, ToHub
from exchange.sockets import Channel, connect_channel
from exchange.testing import rewards_of
from exchange.types import AgentName, Cursor
from exchange.wire import MessageDecoder, encode_message, messages_in

SEED = int(os.environ.get("FUZZ_SEED", "1"))
FRAMES = int(os.environ.get("FUZZ_FRAMES", "500"))
SOAK_FRAMES = int(os.environ.get("FUZZ_FRAMES", "100000"))
ROUND = 50
MEMBER, STRANGER = b"\1member", b"\1stranger"
GROWTH_BYTES = 8 << 20


@asynccontextmanager
async def attacker(endpoint: str, routing_id: bytes) -> AsyncIterator[Channel]:
    """A socket that reads what it gets and looks at none of it."""
    channel = connect_channel(endpoint, routing_id=routing_id, credit_messages=64)

    async def drain() -> None:
        while True:
            await channel.receive()

    draining = asyncio.create_task(drain())
    try:
        yield channel
    finally:
        draining.cancel()
        await asyncio.wait((draining,))
        channel.close()


def unreadable(decoder: MessageDecoder[Any], messages: Iterable[Sequence[memoryview]]) -> int:
    count = 0
    for message in messages:
        try:
            decoder.decode(message)
        except WireError:
            count += 1
    return count


class Fire:
    """Mutated messages on the lanes of one hub. bad: how many of them cannot be read, by lane."""

    def __init__(self, control: list[Channel], bulk: list[Channel]) -> None:
        self._rng = Random(SEED)
        self._control, self._bulk = control, bulk
        self._decoders = {ToHub: MessageDecoder[Any](ToHub), BulkToHub: MessageDecoder[Any](BulkToHub)}
        self.bad = {ToHub: 0, BulkToHub: 0}
        self.sent = 0

    async def round(self) -> None:
        for _ in range(ROUND):
            union, channels = self._rng.choice(((ToHub, self._control), (BulkToHub, self._bulk)))
            frames = mutated(self._rng, union)
            views = [memoryview(frame) for frame in frames]
            # The bulk lane knows no messages that are joined.
            self.bad[union] += unreadable(self._decoders[union], messages_in(views) if union is ToHub else [views])
            await self._rng.choice(channels).send(frames)
            self.sent += 1


async def one_step(honest: exchange.Client, step: int, cursor: Cursor) -> Cursor:
    """The honest worker publishes, and gets what it published and nothing else."""
    await honest.publish(rewards_of("honest", step, "p"), ack="durable")
    got = await honest.gather(kinds={"rewards"}, agents={AgentName("honest")}, after=cursor, min_count=1, deadline_s=30.0)
    assert [row.experience.step for row in got.rows] == [step]
    return got.cursor


async def under_fire(hub: HubChild, count: int) -> None:
    half_rss, cursor = 0, exchange.types.START
    data_at, bulk_at = lane_endpoint(hub.endpoint, "data", 0), lane_endpoint(hub.endpoint, "bulk", 0)
    async with (
        exchange.connect(hub.endpoint, name="honest", run_id="r") as honest,
        attacker(hub.endpoint, MEMBER) as member,
        attacker(hub.endpoint, STRANGER) as stranger,
        attacker(data_at, MEMBER) as data_member,
        attacker(bulk_at, MEMBER) as bulk_member,
        attacker(bulk_at, STRANGER) as bulk_stranger,
    ):
        await member.send(encode_message(Hello(name=AgentName("mallory"), run_id="r")))
        fire = Fire([member, data_member, stranger], [bulk_member, bulk_stranger])
        try:
            for step in range(count // ROUND):
                await fire.round()
                cursor = await one_step(honest, step, cursor)
                if step == count // ROUND // 2:
                    half_rss = hub.rss_bytes()
            async with asyncio.timeout(30):
                while (stats := await honest.stats()).bad_frames + stats.blobs.bad_frames < sum(fire.bad.values()):
                    pass
            assert (stats.bad_frames, stats.blobs.bad_frames) == (fire.bad[ToHub], fire.bad[BulkToHub])
            assert await honest.fetch_blob(await honest.send_blob(b"weights")) is not None
            assert hub.process.poll() is None
            assert hub.rss_bytes() - half_rss < GROWTH_BYTES
            assert len(hub.errors.read_text().splitlines()) < 300, "whoever sends garbage fills no disk"
        except BaseException as error:
            # A hub that fails says why as it ends.
            with suppress(subprocess.TimeoutExpired):
                hub.process.wait(timeout=2)
            error.add_note(f"after {fire.sent} frames of FUZZ_SEED={SEED}; the hub said {hub.errors.read_text()[-2000:]}")
            raise


@pytest.mark.slow
async def test_a_hub_under_fire_serves_who_is_honest(tmp_path: Path) -> None:
    with hub_child(tmp_path, directory=tmp_path / "exchange", memory_bytes=8 << 20, credit_bytes=1 << 20) as hub:
        await under_fire(hub, FRAMES)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_a_hub_under_fire_for_long_serves_who_is_honest(tmp_path: Path) -> None:
    with hub_child(tmp_path, directory=tmp_path / "exchange", memory_bytes=8 << 20, credit_bytes=1 << 20) as hub:
        await under_fire(hub, SOAK_FRAMES)
