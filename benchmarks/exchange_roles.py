"""The processes of benchmarks/exchange.py: `python exchange_roles.py ROLE ARGUMENTS…`.

A role says "ready" on stdout when it can be used, then does one piece of work for every line on stdin and answers it with one
line; it ends with its stdin. Every role is one asyncio process, those of the exchange and those of the raw relay alike.
"""

from __future__ import annotations

import os
import sys

# Python puts a script's own folder first on the path, where `exchange` would be the benchmark.
sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]  # noqa: PTH100, PTH120

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq
import zmq.asyncio

import exchange
from exchange.testing import a_rollout_group
from exchange.types import AgentName, RolloutGroup
from exchange.wire import encode_record

IN_FLIGHT = 64
RUN_ID = "bench"
Work = Callable[[str], Awaitable[object]]


def group_of(agent: str, tokens: int) -> RolloutGroup:
    """A group of 8 completions of so many tokens of one byte each."""
    return a_rollout_group(AgentName(agent), 0, "p", tokens=tokens)


async def obey(work: Work) -> None:
    """Do the work of every line of stdin."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print("ready", flush=True)
    while line := await lines.readline():
        print(await work(line.decode().strip()), flush=True)


async def hub(endpoint: str, directory: str) -> None:
    """The exchange's hub; an empty directory means that it keeps records in memory alone.

    "cpu": its CPU seconds. "batch": records that a commit has had on average.
    """
    stop, ready = asyncio.Event(), asyncio.Event()
    config = exchange.HubConfig(run_id=RUN_ID, memory_bytes=128 << 20)
    where = Path(directory) if directory else None
    serving = asyncio.create_task(exchange.serve(endpoint, config, stop=stop, on_ready=lambda _: ready.set(), directory=where))
    await asyncio.wait((serving, asyncio.create_task(ready.wait())), return_when=asyncio.FIRST_COMPLETED)

    async def tell(what: str) -> float:
        if what == "cpu":
            return time.process_time()
        async with exchange.connect(endpoint, name="observer", run_id=RUN_ID, observer=True) as ex:
            stats = await ex.stats()
        assert stats.disk is not None
        return stats.disk.records / max(stats.disk.commits, 1)

    await obey(tell)
    stop.set()
    await serving


async def publisher(endpoint: str, name: str, tokens: str, ack: str) -> None:
    """Publishes as many groups as it is told, 64 in flight, and answers when each has its acknowledgement."""
    group = group_of(name, int(tokens))
    async with exchange.connect(endpoint, name=name, run_id=RUN_ID) as ex:
        await obey(lambda line: _publish(ex, group, int(line), ack))


async def _publish(ex: exchange.Client, group: RolloutGroup, count: int, ack: str) -> str:
    left = iter(range(count))

    async def one_after_the_other() -> None:
        for _ in left:
            await ex.publish(group, ack="durable" if ack == "durable" else "accepted")

    await asyncio.gather(*(one_after_the_other() for _ in range(IN_FLIGHT)))
    return "done"


async def consumer(endpoint: str, name: str) -> None:
    """Takes as many rows from a subscription as it is told."""
    async with exchange.connect(endpoint, name=name, run_id=RUN_ID) as ex:
        rows = ex.subscribe(kinds={"rollouts"})
        await obey(lambda line: _take(rows, int(line)))


async def _take(rows: exchange.Subscription, count: int) -> str:
    for _ in range(count):
        await anext(rows)
    return "done"


async def agent(endpoint: str, name: str, peer: str, tokens: str) -> None:
    """Publishes and subscribes to one peer at the same time; an empty peer: publishes only; 0 tokens: subscribes only."""
    async with exchange.connect(endpoint, name=name, run_id=RUN_ID) as ex:
        rows = ex.subscribe(kinds={"rollouts"}, agents={AgentName(peer)})

        async def both(line: str) -> str:
            work: list[Awaitable[str]] = [_take(rows, int(line))] if peer else []
            if int(tokens):
                work.append(_publish(ex, group_of(name, int(tokens)), int(line), "accepted"))
            await asyncio.gather(*work)
            return "done"

        await obey(both)


async def idler(endpoint: str, name: str) -> None:
    """A worker that waits for a peer's experience which never comes."""
    async with exchange.connect(endpoint, name=name, run_id=RUN_ID) as ex:
        waiting = asyncio.create_task(anext(ex.subscribe(kinds={"rollouts"}, agents={AgentName("nobody")})))
        await obey(lambda _: asyncio.sleep(0, "done"))
        waiting.cancel()


async def relay(endpoint: str) -> None:
    """ROUTER: hands each message of the publisher to the consumer and acknowledges it."""
    socket = zmq.asyncio.Context().socket(zmq.ROUTER)
    socket.linger = 0
    socket.bind(endpoint)

    async def forward() -> None:
        while True:
            sender, *frames = await socket.recv_multipart(copy=False)
            if sender.bytes == b"publisher":
                await socket.send_multipart([b"consumer", *frames], copy=False)
            await socket.send_multipart([sender.bytes, b"ack"])

    forwarding = asyncio.create_task(forward())
    await obey(lambda _: asyncio.sleep(0, "done"))
    forwarding.cancel()


def _dealer(endpoint: str, name: bytes) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context().socket(zmq.DEALER)
    socket.linger = 0
    socket.routing_id = name
    socket.connect(endpoint)
    return socket


async def relay_publisher(endpoint: str, tokens: str) -> None:
    """Sends the frames of a record as often as it is told, 64 without acknowledgement at most."""
    record = encode_record(group_of("publisher", int(tokens)))
    socket = _dealer(endpoint, b"publisher")

    async def send(line: str) -> str:
        count = int(line)
        for sent in range(count + IN_FLIGHT):
            if sent < count:
                await socket.send_multipart([record.body, *record.frames], copy=False)
            if sent >= IN_FLIGHT:
                await socket.recv_multipart()
        return "done"

    await obey(send)


async def relay_consumer(endpoint: str) -> None:
    """Takes as many messages as it is told."""
    socket = _dealer(endpoint, b"consumer")
    await socket.send(b"hello")
    await socket.recv()  # only now can the relay reach it; before, a ROUTER drops in silence

    async def take(line: str) -> str:
        for _ in range(int(line)):
            await socket.recv_multipart(copy=False)
        return "done"

    await obey(take)


async def disk(directory: str, tokens: str) -> None:
    """Appends as many records as it is told, with an fdatasync for each batch; answers with its seconds."""
    record = encode_record(group_of("publisher", int(tokens)))
    fd = os.open(Path(directory) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def write(line: str) -> float:
        count, batch = map(int, line.split())
        os.ftruncate(fd, 0)
        started = time.perf_counter()
        for start in range(0, count, batch):
            for _ in range(min(batch, count - start)):
                os.writev(fd, [record.body, *record.frames])
            os.fdatasync(fd)
        return time.perf_counter() - started

    await obey(write)


async def ray_buffer(tokens: str) -> None:
    """Hands as many records as it is told to an actor that buffers their arrays, 64 in flight; answers with its seconds."""
    import logging

    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    group = group_of("publisher", int(tokens))
    arrays = [value for name in group.__struct_fields__ if isinstance(value := getattr(group, name), np.ndarray)]

    @ray.remote(num_cpus=1)
    class Kept:
        def __init__(self) -> None:
            self._kept: deque[list[npt.NDArray[Any]]] = deque(maxlen=500)

        def append(self, arrays: list[npt.NDArray[Any]]) -> int:
            self._kept.append(arrays)
            return len(self._kept)

    buffer = Kept.remote()  # type: ignore[attr-defined]  # ray adds it
    ray.get(buffer.append.remote(arrays))

    async def append(line: str) -> float:
        started = time.perf_counter()
        waiting: list[Any] = []
        for _ in range(int(line)):
            if len(waiting) >= IN_FLIGHT:
                _, waiting = ray.wait(waiting, num_returns=1)
            waiting.append(buffer.append.remote(arrays))
        ray.get(waiting)
        return time.perf_counter() - started

    await obey(append)
    ray.shutdown()


async def blobs(endpoint: str, name: str, nbytes: str) -> None:
    """ "send": random bytes to the hub, answers with what names them. "fetch BLOB", "memcpy": seconds. "loop BLOB S": fetches
    for so long."""
    data = np.random.default_rng(0).integers(0, 256, int(nbytes), np.uint8)
    target = np.empty_like(data)
    async with exchange.connect(endpoint, name=name, run_id=RUN_ID) as ex:

        async def work(line: str) -> object:
            what, *arguments = line.split()
            started = time.perf_counter()
            if what == "send":
                return (await ex.send_blob(data)).id
            if what == "memcpy":
                np.copyto(target, data)
                return time.perf_counter() - started
            ref = exchange.BlobRef(id=arguments[0], nbytes=int(nbytes))
            if what == "fetch":
                await ex.fetch_blob(ref)
                return time.perf_counter() - started
            while time.perf_counter() - started < float(arguments[1]):
                await ex.fetch_blob(ref)
            return "done"

        await obey(work)


async def heartbeats(endpoint: str, name: str) -> None:
    """The 99th percentile in ms of as many round trips over the control lane as it is told, one every 5 ms."""
    async with exchange.connect(endpoint, name=name, run_id=RUN_ID) as ex:

        async def beat(line: str) -> float:
            trips = []
            for _ in range(int(line)):
                started = time.perf_counter()
                await ex.stats()
                trips.append(time.perf_counter() - started)
                await asyncio.sleep(0.005)
            return 1000 * float(np.percentile(trips, 99))

        await obey(beat)


ROLES: dict[str, Callable[..., Awaitable[None]]] = {
    role.__name__: role
    for role in (
        agent,
        blobs,
        consumer,
        disk,
        heartbeats,
        hub,
        idler,
        publisher,
        ray_buffer,
        relay,
        relay_consumer,
        relay_publisher,
    )
}

if __name__ == "__main__":
    asyncio.run(ROLES[sys.argv[1]](*sys.argv[2:]))  # type: ignore[arg-type]
