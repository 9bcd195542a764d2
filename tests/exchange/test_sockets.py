"""The socket factory sets every option that matters, and is the only place where sockets are made."""

from __future__ import annotations

import ast
import asyncio
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq
from zmq.utils.garbage import gc as lent

from exchange.sockets import Channel, bind_channel, connect_channel
from exchange.wire import MAX_RECORD_BYTES

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "exchange").rglob("*.py"))


async def test_every_socket_has_the_options_that_keep_it_honest() -> None:
    router, endpoint = bind_channel("tcp://127.0.0.1:0", credit_messages=64)
    dealer = connect_channel(endpoint, routing_id=b"\1worker", credit_messages=64)
    try:
        for channel in (router, dealer):

            def get(option: int, bus: zmq.Socket[bytes] = channel.socket) -> int:
                return int(bus.getsockopt(option))

            assert get(zmq.LINGER) == 0
            assert get(zmq.IMMEDIATE) == 1
            assert 64 < get(zmq.SNDHWM) == get(zmq.RCVHWM)
            assert get(zmq.MAXMSGSIZE) >= MAX_RECORD_BYTES
            assert 0 < get(zmq.HEARTBEAT_IVL) < get(zmq.HEARTBEAT_TIMEOUT)
            assert get(zmq.HANDSHAKE_IVL) > 0
            assert get(zmq.TCP_KEEPALIVE) == 1
            assert get(zmq.IPV6) == 0
        assert dealer.socket.getsockopt(zmq.ROUTING_ID) == b"\1worker"
        assert not router.send_to(b"nobody", [b"x"]), "a message to nobody is an answer, not a loss and not an error"
    finally:
        dealer.close()
        router.close()


async def test_leaving_with_unsent_messages_does_not_hang() -> None:
    router, endpoint = bind_channel("tcp://127.0.0.1:0", credit_messages=4)
    dealer = connect_channel(endpoint, routing_id=b"\1worker", credit_messages=4)
    for _ in range(8):
        await dealer.send([b"x" * 100_000])
    router.close()
    dealer.close()


async def test_ipv6_is_on_where_the_address_asks_for_it() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    router, endpoint = bind_channel("tcp://[::1]:0", credit_messages=4)
    dealer = connect_channel(endpoint, routing_id=b"\1worker", credit_messages=4)
    await dealer.send([b"over", b"six"])
    assert [bytes(frame) for frame in await router.receive()] == [b"\1worker", b"over", b"six"]
    dealer.close()
    router.close()


async def test_what_was_received_goes_on_as_it_is_and_a_part_of_it_as_that_part() -> None:
    router, endpoint = bind_channel("tcp://127.0.0.1:0", credit_messages=4)
    dealer = connect_channel(endpoint, routing_id=b"\1worker", credit_messages=4)
    sent = bytes(range(256)) * (4 << 12)
    try:
        async with asyncio.timeout(20):
            await dealer.send([sent])
            worker, whole = await router.receive()
            before = set(lent.refs)
            assert router.send_to(bytes(worker), [whole])
            assert not lent.refs.keys() - before, "a buffer that is lent to libzmq costs a turn of a thread when it comes back"
            assert router.send_to(bytes(worker), [whole[:-1], whole[1:]])
            assert [bytes(frame) for frame in await dealer.receive()] == [sent]
            assert [bytes(frame) for frame in await dealer.receive()] == [sent[:-1], sent[1:]]
    finally:
        dealer.close()
        router.close()


@pytest.mark.slow
def test_contexts_and_sockets_are_made_in_one_place() -> None:
    makers = {
        path.name
        for path in PACKAGE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("Context", "socket", "setsockopt")
    }
    assert makers == {"sockets.py"}


def test_nothing_that_runs_foreign_bytes_is_near_the_bus() -> None:
    forbidden = re.compile(r"\b(pickle|cloudpickle|dill|marshal|recv_pyobj|send_pyobj|allow_pickle|eval|exec)\b")
    assert [path.name for path in PACKAGE if forbidden.search(path.read_text())] == []


def test_the_library_is_new_enough() -> None:
    assert zmq.zmq_version_info() >= (4, 3, 5)


async def test_a_receive_that_is_cancelled_at_any_moment_loses_nothing() -> None:
    router, endpoint = bind_channel("tcp://127.0.0.1:0", credit_messages=64)
    dealer = connect_channel(endpoint, routing_id=b"\1worker", credit_messages=64)
    got: list[bytes] = []

    async def receive() -> None:
        got.append(bytes((await router.receive())[-1]))

    async with asyncio.timeout(20):
        for number in range(200):
            receiving = asyncio.create_task(receive())
            if number % 3 == 0:
                await asyncio.sleep(0)
            await dealer.send([b"%d" % number])
            for _ in range(number % 5):
                await asyncio.sleep(0)
            receiving.cancel()
            await asyncio.wait((receiving,))
        while len(got) < 200:
            await receive()
    assert got == [b"%d" % number for number in range(200)]
    dealer.close()
    router.close()


async def _crossing(messages: int, window: int) -> None:
    """Two ends that send and receive at the same time, on one socket each, with few messages on their way."""
    router, endpoint = bind_channel("tcp://127.0.0.1:0", credit_messages=4)
    dealer = connect_channel(endpoint, routing_id=b"\1worker", credit_messages=4)
    await dealer.send([b"here"])
    await router.receive()
    slots = {end: asyncio.Semaphore(window) for end in "ab"}

    async def send_all(end: str, send: Callable[[bytes], Awaitable[None]]) -> None:
        for number in range(messages):
            await slots[end].acquire()
            await send(b"%d" % number)
            if number % 7 == 0:
                await asyncio.sleep(0)

    async def receive_all(end: str, channel: Channel) -> None:
        for number in range(messages):
            assert bytes((await channel.receive())[-1]) == b"%d" % number
            slots[end].release()

    async def to_worker(body: bytes) -> None:
        while not router.send_to(b"\1worker", [body]):  # noqa: ASYNC110  # a ROUTER has no event for one peer
            await asyncio.sleep(0)

    async with asyncio.timeout(60 + messages / 100), asyncio.TaskGroup() as tasks:
        tasks.create_task(send_all("a", lambda body: dealer.send([body])))
        tasks.create_task(receive_all("a", router))
        tasks.create_task(send_all("b", to_worker))
        tasks.create_task(receive_all("b", dealer))
    dealer.close()
    router.close()


@pytest.mark.parametrize("window", [1, 3, 100])
async def test_sending_and_receiving_on_one_socket_swallows_no_wakeup(window: int) -> None:
    await _crossing(300, window)


@pytest.mark.soak
@pytest.mark.parametrize("window", [1, 3, 100])
async def test_sending_and_receiving_on_one_socket_never_stalls(window: int) -> None:
    await _crossing(300_000, window)


async def test_a_send_that_waits_for_its_peer_goes_on_when_it_comes() -> None:
    probe = socket.create_server(("127.0.0.1", 0))
    endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    probe.close()
    dealer = connect_channel(endpoint, routing_id=b"\1worker", credit_messages=4)
    sending = asyncio.create_task(dealer.send([b"early"]))
    reading = asyncio.create_task(dealer.receive())
    await asyncio.sleep(0)
    router, _ = bind_channel(endpoint, credit_messages=4)
    async with asyncio.timeout(10):
        assert bytes((await router.receive())[-1]) == b"early"
        await sending
        assert router.send_to(b"\1worker", [b"late"])
        assert bytes((await reading)[0]) == b"late"
    dealer.close()
    router.close()
