"""Bad luck on real sockets: strangers, garbage, hubs that die or never were, workers that do not read."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

import exchange
from exchange.errors import ConnectError, EndpointError, HubLostError
from exchange.messages import AskStats, Gather, Hello, Publish, Welcome
from exchange.sockets import Channel, connect_channel
from exchange.testing import a_rollout_group, rewards_of
from exchange.types import AgentName
from exchange.wire import MAJOR, encode_message, encode_record, worker_decoder

ALPHA = AgentName("alpha")
HUB = Path(__file__).with_name("hub_process.py")


@asynccontextmanager
async def serving(at: str = "tcp://127.0.0.1:0", **config: object) -> AsyncIterator[str]:
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    settings = exchange.HubConfig(run_id="r", **config)  # type: ignore[arg-type]
    hub = asyncio.create_task(exchange.serve(at, settings, stop=stop, on_ready=ready.set_result))
    try:
        yield await ready
    finally:
        stop.set()
        await hub


@asynccontextmanager
async def stranger(endpoint: str, routing_id: bytes = b"\1stranger") -> AsyncIterator[Channel]:
    channel = connect_channel(endpoint, routing_id=routing_id, credit_messages=64)
    try:
        yield channel
    finally:
        channel.close()


async def joined(channel: Channel, name: str) -> None:
    await channel.send(encode_message(Hello(name=AgentName(name), run_id="r")))
    assert isinstance(worker_decoder().decode(await channel.receive()).message, Welcome)


def fixed(header: bytes, *, major: int = MAJOR, crc: int | None = None, nbytes: int = 0) -> bytes:
    checksum = zlib.crc32(header) if crc is None else crc
    return struct.pack("<4s4HIQQIxxxx", b"MRLX", major, 0, 0, 0, len(header), nbytes, 1, checksum)


class Bomb:
    """Would end the test run if anything unpickled it."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return os._exit, (99,)


async def test_hostile_frames_are_counted_and_the_next_message_is_handled() -> None:
    nested = b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"
    bad = [
        [b"GET / HTTP/1.1\r\n\r\n"],
        [b""],
        [pickle.dumps(Bomb())],
        [fixed(b"\x80") + b"\x80"],
        [fixed(pickle.dumps(Bomb())) + pickle.dumps(Bomb())],
        [fixed(nested) + nested],
        [fixed(b"\x80", crc=1) + b"\x80"],
        [fixed(b"\x80", nbytes=2**63) + b"\x80"],
        [fixed(b"\x80")[:20] + b"\x80"],
        [b"x"] * 5000,
    ]
    async with serving() as endpoint, stranger(endpoint) as channel:
        for frames in bad:
            await channel.send(frames)
        await channel.send([fixed(b"\x80", major=9) + b"\x80"])
        answer = worker_decoder().decode(await channel.receive()).message
        assert "protocol" in str(answer)
        async with exchange.connect(endpoint, name="alpha", run_id="r") as alpha:
            await alpha.publish(rewards_of("alpha", 1, "p"))
            assert (await alpha.stats()).bad_frames == len(bad) + 1


async def test_random_bytes_on_the_port_do_not_matter() -> None:
    async with serving() as endpoint, exchange.connect(endpoint, name="alpha", run_id="r") as alpha:
        port = int(endpoint.rpartition(":")[2])
        for seed in range(20):
            with socket.create_connection(("127.0.0.1", port)) as scanner:
                scanner.sendall(bytes((seed * 31 + i * 7) % 256 for i in range(500)))
        await alpha.publish(rewards_of("alpha", 1, "p"))


async def test_workers_that_come_and_go_leave_nothing_behind() -> None:
    def open_files() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    async with serving(heartbeat_s=0.5) as endpoint, exchange.connect(endpoint, name="alpha", run_id="r") as alpha:
        before = open_files()
        for round_ in range(30):
            async with stranger(endpoint, b"\1s%d" % round_) as channel:
                await joined(channel, f"passer{round_ % 3}-{round_}")
                await channel.send(encode_message(Gather(kinds=frozenset({"rewards"}), min_count=1, deadline_s=100.0)))
        await alpha.publish(rewards_of("alpha", 1, "p"))
        async with asyncio.timeout(10):
            while open_files() > before + 5:
                await alpha.stats()


async def test_a_worker_that_reads_nothing_holds_up_nobody() -> None:
    async with serving(credit_bytes=4 << 20, memory_bytes=64 << 20) as endpoint, stranger(endpoint) as deaf:
        await joined(deaf, "deaf")
        async with (
            exchange.connect(endpoint, name="alpha", run_id="r") as alpha,
            exchange.connect(endpoint, name="beta", run_id="r") as beta,
        ):
            for step in range(20):
                await alpha.publish(a_rollout_group("alpha", step, "p", tokens=4000))
            for _ in range(300):
                await deaf.send(encode_message(Gather(kinds=frozenset({"rollouts"}))))
            for step in range(20, 40):
                await alpha.publish(a_rollout_group("alpha", step, "p", tokens=4000))
            got = await beta.gather(kinds={"rollouts"}, min_step=20, max_bytes=64 << 20)
            assert len(got.rows) == 20
            stats = await beta.stats()
            assert stats.workers[AgentName("deaf")].delivered_bytes < (4 << 20) + (9 << 20)


async def test_a_worker_over_its_limits_is_refused_and_the_rest_goes_on() -> None:
    async with serving(credit_messages=4) as endpoint, stranger(endpoint) as greedy:
        await joined(greedy, "greedy")
        for seq in range(1, 50):
            record = encode_record(rewards_of("greedy", seq, "p"))
            await greedy.send(encode_message(Publish(seq=seq * 100, body=record.body), seq, record.frames))
        await greedy.send(encode_message(AskStats()))
        async with exchange.connect(endpoint, name="alpha", run_id="r") as alpha:
            stats = await alpha.stats()
            while stats.workers[AgentName("greedy")].published < 49:
                stats = await alpha.stats()
        assert stats.workers[AgentName("greedy")].refused == {"window": 49}


async def test_no_hub_is_an_error_that_names_the_endpoint(tmp_path: Path) -> None:
    for endpoint in ("tcp://127.0.0.1:9", f"ipc:///tmp/mrl-{os.getpid()}-none/hub"):
        with pytest.raises(ConnectError, match=endpoint):
            async with exchange.connect(endpoint, name="alpha", run_id="r", connect_timeout_s=0.05):
                pass


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
async def test_every_way_to_write_loopback_leads_to_the_hub(host: str) -> None:
    if host == "[::1]" and not has_ipv6():
        pytest.skip("no IPv6 loopback here")
    async with serving(f"tcp://{host}:0") as endpoint:
        at = f"tcp://{host}:{endpoint.rpartition(':')[2]}"
        async with exchange.connect(at, name="alpha", run_id="r") as alpha:
            await alpha.publish(rewards_of("alpha", 1, "p"))
            assert (await alpha.fetch_blob(await alpha.send_blob(b"weights"))).tobytes() == b"weights"


def has_ipv6() -> bool:
    with suppress(OSError):
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        return True
    return False


async def test_something_else_at_the_endpoint_is_an_error_too() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConnectError, match="no WELCOME"):
            async with exchange.connect(endpoint, name="alpha", run_id="r", connect_timeout_s=0.05):
                pass


async def test_a_loopback_default_on_another_host_is_an_error_that_says_so_and_no_hang(unused_port: int) -> None:
    with pytest.raises(ConnectError, match="reaches this machine alone; a hub on another one needs keys"):
        async with exchange.connect(f"tcp://127.0.0.1:{unused_port}", name="alpha", run_id="r", connect_timeout_s=0.05):
            pass


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def test_a_hub_that_ends_tells_its_workers() -> None:
    async with AsyncExitStack() as stack:
        async with serving() as endpoint:
            alpha = await stack.enter_async_context(exchange.connect(endpoint, name="alpha", run_id="r"))
            waiting = asyncio.create_task(alpha.gather(kinds={"rewards"}, min_count=1, deadline_s=100.0))
            await alpha.stats()
        with pytest.raises(HubLostError, match="has ended"):
            await waiting
        with pytest.raises(HubLostError, match="has ended"):
            await alpha.publish(rewards_of("alpha", 1, "p"))


@asynccontextmanager
async def hub_process(endpoint: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, str(HUB), endpoint, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert (await process.stdout.readline()).startswith(b"ready")
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.slow
async def test_a_killed_hub_is_survived_when_it_comes_back_and_reported_when_not() -> None:
    directory = exchange.private_ipc_dir()
    endpoint = f"ipc://{directory}/hub"
    async with (
        hub_process(endpoint) as first,
        exchange.connect(endpoint, name="alpha", run_id="r", request_timeout_s=15.0) as alpha,
    ):
        await alpha.publish(rewards_of("alpha", 1, "p"))
        before = await alpha.gather(kinds={"rewards"}, agents={ALPHA})
        with pytest.raises(EndpointError, match="another hub"):
            await exchange.serve(endpoint, exchange.HubConfig(run_id="r"), stop=asyncio.Event())
        first.kill()
        await first.wait()
        publishing = [asyncio.create_task(alpha.publish(rewards_of("alpha", step, "p"))) for step in (2, 3)]
        async with hub_process(endpoint) as second:
            await asyncio.gather(*publishing)
            assert alpha.epoch == 0
            after = await alpha.gather(kinds={"rewards"}, agents={ALPHA}, after=before.cursor)
            assert [row.experience.step for row in after.rows] == [2, 3], "the old cursor hides nothing new"
            async with exchange.connect(endpoint, name="beta", run_id="r", request_timeout_s=0.5) as beta:
                second.kill()
                await second.wait()
                with pytest.raises((HubLostError, TimeoutError)):
                    await beta.publish(rewards_of("beta", 1, "p"))
    shutil.rmtree(directory)


@pytest.mark.slow
async def test_a_hub_that_comes_back_with_another_data_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    async with hub_process(endpoint) as first, exchange.connect(endpoint, name="alpha", run_id="r") as alpha:
        await alpha.publish(rewards_of("alpha", 1, "p"))
        first.kill()
        await first.wait()
        publishing = asyncio.create_task(alpha.publish(rewards_of("alpha", 2, "p")))
        async with hub_process(endpoint):
            await publishing
            got = await alpha.gather(kinds={"rewards"}, agents={ALPHA})
            assert [row.experience.step for row in got.rows] == [2]


@pytest.mark.slow
def test_a_process_that_leaves_its_sockets_open_still_ends() -> None:
    script = """
import asyncio, exchange
async def main():
    client = exchange.connect("tcp://127.0.0.1:9", name="alpha", run_id="r", connect_timeout_s=0.05)
    try:
        await client.__aenter__()
    except exchange.ExchangeError:
        pass
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(exchange.serve("tcp://127.0.0.1:0", exchange.HubConfig(run_id="r"), stop=stop,
                                                 on_ready=ready.set_result))
    kept.append(exchange.connect(await ready, name="alpha", run_id="r"))
    kept.append(await kept[0].__aenter__())
    raise SystemExit(7)
kept = []
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", script], timeout=20, capture_output=True, check=False)
    assert ended.returncode == 7, ended.stderr


async def test_a_worker_that_outlives_its_process_stores_nothing_twice() -> None:
    """Its acknowledgements were lost with it; it comes back under its identity and sends them again."""
    identity = exchange.new_routing_id()
    async with serving(heartbeat_s=0.1) as endpoint:
        async with exchange.connect(endpoint, name="alpha", run_id="r", identity=identity) as alpha:
            first = [await alpha.publish(rewards_of("alpha", step, "p")) for step in range(3)]
            epoch = alpha.epoch
        async with exchange.connect(endpoint, name="alpha", run_id="r", identity=identity, first_seq=2) as alpha:
            again = [await alpha.publish(rewards_of("alpha", step, "p", epoch=alpha.epoch)) for step in (1, 2, 3)]
            stats = await alpha.stats()
        assert alpha.epoch == epoch == 0
        assert [receipt.seq for receipt in first] == [1, 2, 3]
        assert [(receipt.seq, receipt.duplicate) for receipt in again] == [(2, True), (3, True), (4, False)]
        assert stats.stored == 4
