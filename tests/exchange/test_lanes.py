"""Control and data go by lanes of their own: a sign of life or an acknowledgement never waits behind experience."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

import exchange
from exchange import connection
from exchange.bulk_session import without_bulk
from exchange.connection import ASSUMED_CREDIT_MESSAGES, open_client
from exchange.kinds import Kinds
from exchange.messages import Hello
from exchange.session import Link
from exchange.sockets import connect_channel
from exchange.testing import a_rollout_group, rewards_of
from exchange.types import AgentName
from exchange.wire import Buffer

ALPHA = AgentName("alpha")
MIB = 1 << 20


@asynccontextmanager
async def serving(endpoint: str = "tcp://127.0.0.1:0", **config: object) -> AsyncIterator[str]:
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    settings = exchange.HubConfig(run_id="r", **config)  # type: ignore[arg-type]
    hub = asyncio.create_task(exchange.serve(endpoint, settings, stop=stop, on_ready=ready.set_result))
    try:
        yield await ready
    finally:
        stop.set()
        await hub


class Held:
    """A link that takes nothing and gives nothing until `open` is set."""

    open: asyncio.Event

    def __init__(self, link: Link) -> None:
        self._link = link

    async def send(self, frames: Sequence[Buffer]) -> None:
        await self.open.wait()
        await self._link.send(frames)

    def send_now(self, frames: Sequence[Buffer]) -> bool:
        return self.open.is_set() and self._link.send_now(frames)

    async def receive(self) -> list[memoryview]:
        frames = await self._link.receive()
        await self.open.wait()
        return frames

    def close(self) -> None:
        self._link.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> type[Held]:
    """Every client's data lane is held until the event is set."""

    class Holding(Held):
        open = asyncio.Event()

    def connect(endpoint: str, **settings: Any) -> Link:
        channel = connect_channel(endpoint, **settings)
        first = settings["credit_messages"] == ASSUMED_CREDIT_MESSAGES
        return channel if first or "frame_bytes" in settings else Holding(channel)

    monkeypatch.setattr(connection, "connect_channel", connect)
    return Holding


@pytest.mark.slow
async def test_signs_of_life_do_not_wait_behind_experience_in_either_direction(held: type[Held]) -> None:
    held.open.set()
    async with (
        serving(heartbeat_s=0.05) as endpoint,
        exchange.connect(endpoint, name="alpha", run_id="r", request_timeout_s=20.0) as alpha,
        exchange.connect(endpoint, name="beta", run_id="r", request_timeout_s=20.0) as beta,
    ):
        for step in range(3):
            await alpha.publish(a_rollout_group("alpha", step, "p", tokens=20_000))
        held.open.clear()
        gathering = asyncio.create_task(beta.gather(kinds={"rollouts"}, max_bytes=8 * MIB))
        publishing = asyncio.create_task(beta.publish(a_rollout_group("beta", 1, "p", tokens=20_000)))
        await beta.progress(step=7, version=exchange.Version(beta.epoch, 7))
        for _ in range(10):
            stats = await beta.stats()
            await asyncio.sleep(0.05)
        assert stats.workers[AgentName("beta")].state == "live" and stats.workers[AgentName("beta")].step == 7
        assert not gathering.done() and not publishing.done()
        held.open.set()
        assert len((await gathering).rows) == 3
        await publishing


async def test_the_hub_answers_by_the_control_lane_while_a_worker_has_no_other(held: type[Held]) -> None:
    held.open.set()
    async with serving() as endpoint, exchange.connect(endpoint, name="alpha", run_id="r") as alpha:
        await alpha.publish(rewards_of("alpha", 1, "p"))
        stranger = connect_channel(endpoint, routing_id=b"\1old", credit_messages=4)
        hello = Hello(name=AgentName("old"), run_id="r")
        async with open_client(stranger, hello, endpoint=endpoint, kinds=Kinds(), open_bulk=without_bulk) as old:
            assert len((await old.gather(kinds={"rewards"})).rows) == 1
            await old.publish(rewards_of("old", 1, "p"))


async def test_leaving_does_not_overtake_what_was_published(held: type[Held]) -> None:
    held.open.set()
    async with serving() as endpoint, exchange.connect(endpoint, name="beta", run_id="r") as beta:
        async with exchange.connect(endpoint, name="alpha", run_id="r") as alpha:
            held.open.clear()
            for step in range(20):
                publishing = asyncio.create_task(alpha.publish(rewards_of("alpha", step, "p")))
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_later(0.1, held.open.set)
        await publishing
        assert len((await beta.gather(kinds={"rewards"}, agents={ALPHA})).rows) == 20


@asynccontextmanager
async def cuttable(port: int) -> AsyncIterator[tuple[int, Callable[[], None]]]:
    """A way to a port of this host, and how to cut all that goes through it."""
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(OSError):
            while piece := await reader.read(1 << 16):
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, back), pump(there, writer))

    def cut() -> None:
        while writers:
            writers.pop().transport.abort()

    async with await asyncio.start_server(lead, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], cut


@pytest.mark.slow
@pytest.mark.parametrize("cut_lane", ["control", "data"])
async def test_what_a_broken_connection_has_lost_is_sent_again(monkeypatch: pytest.MonkeyPatch, cut_lane: str) -> None:
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(serving())
        control = int(endpoint.rpartition(":")[2])
        ways = {"control": await stack.enter_async_context(cuttable(control))}
        told_ports = {}

        def detour(told: str, lane: str, port: int) -> str:
            told_ports[lane] = port
            return f"tcp://127.0.0.1:{ways[lane][0] if lane in ways else port}"

        monkeypatch.setattr(connection, "lane_endpoint", detour)
        async with exchange.connect(endpoint, name="probe", run_id="r"):
            ways["data"] = await stack.enter_async_context(cuttable(told_ports["data"]))
        through = f"tcp://127.0.0.1:{ways['control'][0]}"
        async with exchange.connect(through, name="alpha", run_id="r") as alpha, asyncio.timeout(20):
            for step in range(40):
                publishing = asyncio.create_task(alpha.publish(a_rollout_group("alpha", step, "p", tokens=2000)))
                if step % 10 == 5:
                    await asyncio.sleep(0)
                    ways[cut_lane][1]()
                await publishing
        async with exchange.connect(endpoint, name="beta", run_id="r") as beta:
            got = await beta.gather(kinds={"rollouts"}, max_bytes=64 * MIB)
            assert [row.experience.step for row in got.rows] == list(range(40))
