"""Peers that read slowly, or nothing: what the others are handed is counted, and is all of it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import numpy as np
import pytest
from test_faults import joined, serving, stranger

import exchange
from exchange.blob_messages import PIECE_BYTES, BulkToWorker, Get, Piece
from exchange.endpoints import lane_endpoint
from exchange.messages import Gather
from exchange.service import HubService
from exchange.sockets import connect_channel
from exchange.stats import HubStats
from exchange.testing import a_rollout_group, rewards_of
from exchange.types import START, AgentName
from exchange.wire import MessageDecoder, encode_message

HEALTHY = [f"healthy{number}" for number in range(9)]


async def everybody_hears_everybody(workers: list[exchange.Client], step: int) -> HubStats:
    """Each publishes, and gets what the eight others did."""
    await asyncio.gather(*(worker.publish(rewards_of(worker.name, step, "p")) for worker in workers))
    for worker in workers:
        got = await worker.gather(kinds={"rewards"}, min_step=step, max_step=step, min_count=8, deadline_s=30.0)
        assert len(got.rows) == 8
    return await workers[0].stats()


async def test_a_stuck_peer_costs_nine_others_no_message_and_the_hub_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0
    tick = HubService.tick

    def counted_tick(self: HubService) -> None:
        nonlocal turns
        turns += 1
        tick(self)

    monkeypatch.setattr(HubService, "tick", counted_tick)
    async with serving(credit_bytes=1 << 20, memory_bytes=64 << 20, heartbeat_s=5.0) as endpoint, AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(exchange.connect(endpoint, name=name, run_id="r")) for name in HEALTHY]
        without = await everybody_hears_everybody(workers, 0)
        for step in range(10):
            await workers[0].publish(a_rollout_group(HEALTHY[0], step, "p", tokens=4000))
        async with stranger(endpoint) as stuck:
            await joined(stuck, "stuck")
            for number in range(200):
                await stuck.send(
                    encode_message(Gather(kinds=frozenset({"rollouts"}), min_count=number % 2 * 100, deadline_s=1000.0), number)
                )
            handled = [await everybody_hears_everybody(workers, step) for step in range(1, 4)]
        gone = await everybody_hears_everybody(workers, 4)
        for before, after in zip([without, *handled], [*handled, gone], strict=True):
            for name in map(AgentName, HEALTHY):
                assert sum(after.workers[name].accepted.values()) - before.workers[name].accepted["rewards"] in (1, 11)
                assert after.workers[name].refused == {}
    assert turns < 20, "only deadlines wake the hub, and there was none"


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=[pytest.mark.soak, pytest.mark.timeout(300)])])
async def test_a_paused_consumer_gets_every_record_of_a_tight_loop(count: int) -> None:
    async with (
        serving() as endpoint,
        exchange.connect(endpoint, name="alpha", run_id="r") as alpha,
        exchange.connect(endpoint, name="beta", run_id="r") as beta,
    ):
        rows = beta.subscribe(kinds={"rewards"}, after=START)
        await alpha.publish(rewards_of("alpha", 0, "p"))
        assert (await anext(rows)).experience.step == 0
        for first in range(1, count, 100):
            steps = range(first, min(first + 100, count))
            await asyncio.gather(*(alpha.publish(rewards_of("alpha", step, "p")) for step in steps))
        got = [(await anext(rows)).experience.step for _ in range(1, count)]
        assert got == list(range(1, count))


@pytest.mark.slow
async def test_a_peer_that_reads_no_piece_of_a_blob_holds_up_neither_blobs_nor_signs_of_life() -> None:
    data = np.random.default_rng(0).integers(0, 256, 6 * PIECE_BYTES, dtype=np.uint8)
    directory = exchange.private_ipc_dir()
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    settings = exchange.HubConfig(run_id="r")
    hub = asyncio.create_task(exchange.serve(f"ipc://{directory}/hub", settings, stop=stop, on_ready=ready.set_result))
    endpoint = await ready
    try:
        async with exchange.connect(endpoint, name="alpha", run_id="r") as alpha, stranger(endpoint) as control:
            ref = await alpha.send_blob(data)
            await joined(control, "slow")
            at = lane_endpoint(endpoint, "bulk", 0)
            slow = connect_channel(at, routing_id=b"\1stranger", credit_messages=1, frame_bytes=PIECE_BYTES)
            for piece in range(6):
                await slow.send(encode_message(Get(id=ref.id, offset=piece * PIECE_BYTES, nbytes=PIECE_BYTES), piece))
            for step in range(5):
                await alpha.publish(rewards_of("alpha", step, "p"))
                other = await alpha.send_blob(data[step + 1 : PIECE_BYTES])
                assert (await alpha.fetch_blob(other)).nbytes == PIECE_BYTES - step - 1
            decoder: MessageDecoder[BulkToWorker] = MessageDecoder(BulkToWorker)
            for piece in range(6):
                answer = decoder.decode(await slow.receive())
                assert isinstance(answer.message, Piece) and answer.request_id == piece
                np.testing.assert_array_equal(
                    np.frombuffer(answer.payload[0], np.uint8), data[piece * PIECE_BYTES :][:PIECE_BYTES]
                )
            slow.close()
    finally:
        stop.set()
        await hub


async def test_a_worker_that_computes_for_long_stays_a_member() -> None:
    """It says nothing of its own for many heartbeats, and then is welcome with what it has."""
    async with (
        serving(heartbeat_s=0.02) as endpoint,
        exchange.connect(endpoint, name="alpha", run_id="r") as alpha,
        exchange.connect(endpoint, name="watcher", run_id="r", observer=True) as watcher,
        asyncio.timeout(20),
    ):
        began = (await watcher.stats()).uptime_s
        while (stats := await watcher.stats()).uptime_s < began + 15 * 0.02:
            assert stats.workers[AgentName("alpha")].state in ("live", "suspect")
        assert not (await alpha.publish(rewards_of("alpha", 1, "p"))).duplicate
        assert alpha.epoch == 0
