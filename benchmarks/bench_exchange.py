"""The exchange against raw ZeroMQ, in one run on one machine.

    python benchmarks/bench_exchange.py [--json] [--runs 5]

Both sides use three processes over ipc: a producer, a broker and a consumer. `exchange` publishes rollout groups, each
acknowledged, through a hub to one consumer that gathers them; `raw` moves messages of the same bytes from DEALER to ROUTER to
DEALER and back with an empty acknowledgement, with asyncio and the same number in flight. Ratios (exchange over raw) are what
to read: absolute figures of a shared machine change by more than two from one hour to the next. Medians of --runs, the two
sides taking turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import shutil
import statistics
import time
from collections.abc import Callable, Coroutine
from typing import Any

import zmq
import zmq.asyncio

import exchange
from exchange.testing import a_rollout_group
from exchange.types import AgentName, Cursor, RolloutGroup
from exchange.wire import encode_record

IN_FLIGHT = 32
# 8 completions of this many tokens of one byte each: about 27 and 213 KB.
SIZES = {"27KB": 258, "213KB": 2047}
ROLLOUTS = {"27KB": 600, "213KB": 200}
ROUND_TRIPS = 200

Seconds = float
spawning = multiprocessing.get_context("spawn")


def run_in_process(main: Callable[..., Coroutine[Any, Any, None]], *args: object) -> Any:
    """Start `main(*args)` in a process of its own."""
    process = spawning.Process(target=_run, args=(main, *args), daemon=True)
    process.start()
    return process


def _run(main: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
    asyncio.run(main(*args))


async def hub(endpoint: str) -> None:
    """The exchange's broker; ends when it is terminated."""
    config = exchange.HubConfig(run_id="bench", memory_bytes=128 << 20)
    await exchange.serve(endpoint, config, stop=asyncio.Event())


async def gatherer(endpoint: str, count: int, done: Any) -> None:
    """Takes `count` rollouts from the exchange, then says so."""
    async with exchange.connect(endpoint, name="consumer", run_id="bench") as ex:
        done.put("ready")
        taken, cursor = 0, Cursor(0)
        while taken < count:
            got = await ex.gather(kinds={"rollouts"}, after=cursor, min_count=1, deadline_s=10.0)
            taken, cursor = taken + len(got.rows), got.cursor
        done.put("done")


async def publish_all(endpoint: str, group: RolloutGroup, count: int, done: Any) -> tuple[Seconds, Seconds]:
    """Seconds of the median round trip of one publication, and seconds a rollout needs through to the consumer."""
    async with exchange.connect(endpoint, name="producer", run_id="bench") as ex:
        consumer = run_in_process(gatherer, endpoint, count + ROUND_TRIPS, done)
        done.get()
        trips = []
        for _ in range(ROUND_TRIPS):
            started = time.perf_counter()
            await ex.publish(group)
            trips.append(time.perf_counter() - started)
        started = time.perf_counter()
        window = asyncio.Semaphore(IN_FLIGHT)

        async def one() -> None:
            async with window:
                await ex.publish(group)

        await asyncio.gather(*(one() for _ in range(count)))
        await asyncio.to_thread(done.get)
        seconds = time.perf_counter() - started
        consumer.join()
    return statistics.median(trips), seconds / count


async def broker(endpoint: str) -> None:
    """ROUTER: acknowledges each message of the producer and hands it to the consumer; ends when it is terminated."""
    socket = zmq.asyncio.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    while True:
        sender, *frames = await socket.recv_multipart(copy=False)
        if sender.bytes == b"producer":
            await socket.send_multipart([b"consumer", *frames], copy=False)
        await socket.send_multipart([sender.bytes, b"ack"])


def dealer(endpoint: str, name: bytes) -> zmq.asyncio.Socket:
    """A connected DEALER of this name."""
    socket = zmq.asyncio.Context().socket(zmq.DEALER)
    socket.linger = 0
    socket.routing_id = name
    socket.connect(endpoint)
    return socket


async def taker(endpoint: str, count: int, done: Any) -> None:
    """Takes `count` messages from the broker, then says so."""
    socket = dealer(endpoint, b"consumer")
    await socket.send(b"hello")
    await socket.recv()  # only now the broker can reach it; before, a ROUTER drops in silence
    done.put("ready")
    for _ in range(count):
        await socket.recv_multipart(copy=False)
    done.put("done")


async def send_all(endpoint: str, group: RolloutGroup, count: int, done: Any) -> tuple[Seconds, Seconds]:
    """As publish_all, for raw frames of the same sizes."""
    record = encode_record(group)
    frames = [record.body, *record.frames]
    consumer = run_in_process(taker, endpoint, count + ROUND_TRIPS, done)
    socket = dealer(endpoint, b"producer")
    await asyncio.to_thread(done.get)
    trips = []
    for _ in range(ROUND_TRIPS):
        started = time.perf_counter()
        await socket.send_multipart(frames, copy=False)
        await socket.recv_multipart()
        trips.append(time.perf_counter() - started)
    started = time.perf_counter()
    for sent in range(count + IN_FLIGHT):
        if sent < count:
            await socket.send_multipart(frames, copy=False)
        if sent >= IN_FLIGHT:
            await socket.recv_multipart()
    await asyncio.to_thread(done.get)
    seconds = time.perf_counter() - started
    consumer.join()
    return statistics.median(trips), seconds / count


def measure(size: str, side: str) -> tuple[Seconds, Seconds]:
    """One run of one side, with a fresh broker."""
    group = a_rollout_group(AgentName("producer"), 0, "p", tokens=SIZES[size])
    directory = exchange.private_ipc_dir()
    endpoint, done = f"ipc://{directory}/hub", spawning.Queue()
    serving = run_in_process(hub if side == "exchange" else broker, endpoint)
    try:
        client = publish_all if side == "exchange" else send_all
        return asyncio.run(client(endpoint, group, ROLLOUTS[size], done))
    finally:
        serving.terminate()
        serving.join()
        shutil.rmtree(directory)


def main() -> None:
    """Print one line per size and quantity."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    for size in SIZES:
        runs: dict[str, list[tuple[Seconds, Seconds]]] = {"exchange": [], "raw": []}
        for _ in range(options.runs):
            for side, results in runs.items():
                results.append(measure(size, side))
        medians = {side: [statistics.median(column) for column in zip(*got, strict=True)] for side, got in runs.items()}
        nbytes = encode_record(a_rollout_group("producer", 0, "p", tokens=SIZES[size])).nbytes
        for index, quantity in enumerate(("publish_ack_s", "rollout_s")):
            ours, raw = medians["exchange"][index], medians["raw"][index]
            line = {"size": size, "bytes": nbytes, "quantity": quantity, "exchange": ours, "raw": raw, "ratio": ours / raw}
            if options.json:
                print(json.dumps(line), flush=True)
            else:
                per_s = f"{1 / ours:7.0f}/s, raw {1 / raw:7.0f}/s"
                print(f"{size:>6} {quantity:<14} {ours * 1e6:8.0f} us ({per_s}) ratio {ours / raw:.2f}", flush=True)


if __name__ == "__main__":
    main()
