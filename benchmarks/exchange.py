"""The exchange against raw ZeroMQ, a raw disk, memcpy and Ray, each in the same minute on the same machine.

    python benchmarks/exchange.py [--json] [--runs 5] [--only NAME] [--directory DIR]

Every role is a process of its own (benchmarks/exchange_roles.py). The two sides of a ratio take turns, and every number is a
median over the runs. Records are groups of 8 completions, 27 or 213 KB; 64 are in flight on every side. One line each:

* accepted_*: records per second from one publisher through a hub in memory to one consumer over ipc. Reference: a bare pyzmq
  asyncio relay DEALER-ROUTER-DEALER of the same frames, acknowledged.
* durable_*: the same with durable acknowledgements. Reference: the slower of that relay, and of appending the same bytes to a
  file with an fdatasync for every batch, as large as the hub's.
* vs_ray_*: records per second (27KB durable, 213KB accepted) against calls per second of a Ray actor that buffers the arrays.
* bulk_128MB: GB/s of a blob that lies in the hub, to one worker, verified. Reference: memcpy of as many bytes.
* heartbeat_p99_ms: of round trips of another worker meanwhile. Reference: of the same without a blob on its way.
* fanout_8: deliveries per second of 8 agents in a ring, each publishing and gathering from one. Reference: one pair.
* idle_cpu: part of a core that a hub takes with 8 agents that wait. Reference: 1.
"""

from __future__ import annotations

import os
import sys

# Python puts a script's own folder first on the path, where `exchange` would be this file.
sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]  # noqa: PTH100, PTH120

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import exchange
from exchange.endpoints import remove_private_dir

ROLES = Path(__file__).with_name("exchange_roles.py")
# 8 completions of this many tokens of one byte each, and how many records are a run.
TOKENS = {"27KB": 258, "213KB": 2047}
RECORDS = {"27KB": 2000, "213KB": 500}
RING = 8
RING_RECORDS = 250
BLOB_BYTES = 128 << 20
HEARTBEATS = 400
LOOP_S = 3.0
IDLE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One result. ratio: value over reference. wanted: of the ratio, or of the value where that is what counts."""

    name: str
    value: float
    reference: float
    ratio: float
    wanted: str
    unit: str
    runs: int
    ratios: tuple[float, ...] = ()


class Role:
    """A process that does one piece of work for each line it is told."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, str(ROLES), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._arguments = arguments
        self.heard()

    def tell(self, line: object) -> None:
        """Begin a piece of work."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def heard(self) -> str:
        """Wait for its end."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the benchmark has ended, got role={self._arguments}")
        return line.strip()

    def do(self, line: object) -> float:
        """A piece of work that answers with a number."""
        self.tell(line)
        return float(self.heard())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Stage:
    """Processes and directories that go when it is left."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._resources = ExitStack()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def role(self, *arguments: str) -> Role:
        """A started process."""
        role = Role(*arguments)
        self._resources.callback(role.close)
        return role

    def endpoint(self) -> str:
        """A fresh ipc endpoint."""
        endpoint = f"ipc://{exchange.private_ipc_dir()}/hub"
        self._resources.callback(remove_private_dir, endpoint)
        return endpoint

    def directory(self) -> str:
        """A fresh directory on the disk that is measured."""
        path = tempfile.mkdtemp(prefix="mrl-bench-", dir=self._directory)
        self._resources.callback(shutil.rmtree, path, ignore_errors=True)
        return path

    def hub(self, *, durable: bool = False) -> tuple[Role, str]:
        """A hub and its endpoint."""
        endpoint = self.endpoint()
        return self.role("hub", endpoint, self.directory() if durable else ""), endpoint


def flow(consumers: Sequence[Role], publishers: Sequence[Role], records: int) -> float:
    """Records per second of each publisher until all roles have done as many."""
    started = time.perf_counter()
    for role in (*consumers, *publishers):
        role.tell(records)
    for role in (*consumers, *publishers):
        role.heard()
    return records / (time.perf_counter() - started)


def interleaved(sides: Sequence[Callable[[], float]], runs: int) -> list[list[float]]:
    """What each side measured, taking turns; a first round warms up and does not count."""
    rounds = [[side() for side in sides] for _ in range(runs + 1)]
    return [list(column) for column in zip(*rounds[1:], strict=True)]


def compared(name: str, ours: Sequence[float], *references: Sequence[float], wanted: str, unit: str) -> Line:
    """The medians, against the slower reference."""
    reference = min(references, key=statistics.median)
    value, against = statistics.median(ours), statistics.median(reference)
    ratios = tuple(round(our / other, 3) for our, other in zip(ours, reference, strict=True))
    return Line(
        name=name,
        value=value,
        reference=against,
        ratio=value / against,
        wanted=wanted,
        unit=unit,
        runs=len(ours),
        ratios=ratios,
    )


def through_hub(stage: Stage, endpoint: str, size: str, ack: str) -> Callable[[], float]:
    """Records per second from a publisher through a hub to a consumer."""
    consumer = stage.role("consumer", endpoint, "consumer")
    publisher = stage.role("publisher", endpoint, "publisher", str(TOKENS[size]), ack)
    return lambda: flow([consumer], [publisher], RECORDS[size])


def through_relay(stage: Stage, size: str) -> Callable[[], float]:
    """The same for frames through a bare relay."""
    endpoint = stage.endpoint()
    stage.role("relay", endpoint)
    consumer = stage.role("relay_consumer", endpoint)
    publisher = stage.role("relay_publisher", endpoint, str(TOKENS[size]))
    return lambda: flow([consumer], [publisher], RECORDS[size])


def onto_disk(stage: Stage, hub: Role, size: str) -> Callable[[], float]:
    """Records per second of a bare append with an fdatasync for every batch, of as many records as the hub's have had."""
    disk = stage.role("disk", stage.directory(), str(TOKENS[size]))

    def written() -> float:
        batch = max(round(hub.do("batch")), 1)
        return RECORDS[size] / disk.do(f"{RECORDS[size]} {batch}")

    return written


def accepted(stage: Stage, runs: int, size: str) -> Line:
    _, endpoint = stage.hub()
    ours, relay = interleaved([through_hub(stage, endpoint, size, "accepted"), through_relay(stage, size)], runs)
    return compared(f"accepted_{size}", ours, relay, wanted=">= 0.6", unit="records/s")


def durable(stage: Stage, runs: int, size: str) -> Line:
    hub, endpoint = stage.hub(durable=True)
    sides = [through_hub(stage, endpoint, size, "durable"), through_relay(stage, size), onto_disk(stage, hub, size)]
    ours, relay, disk = interleaved(sides, runs)
    return compared(f"durable_{size}", ours, relay, disk, wanted=">= 0.4", unit="records/s")


def vs_ray(stage: Stage, runs: int, size: str, ack: str) -> Line:
    _, endpoint = stage.hub(durable=ack == "durable")
    ray = stage.role("ray_buffer", str(TOKENS[size]))
    sides = [through_hub(stage, endpoint, size, ack), lambda: RECORDS[size] / ray.do(RECORDS[size])]
    ours, theirs = interleaved(sides, runs)
    return compared(f"vs_ray_{size}", ours, theirs, wanted=">= 2", unit="records/s")


def bulk(stage: Stage, runs: int) -> Iterator[Line]:
    _, endpoint = stage.hub()
    sender = stage.role("blobs", endpoint, "sender", str(BLOB_BYTES))
    fetcher = stage.role("blobs", endpoint, "fetcher", str(BLOB_BYTES))
    heart = stage.role("heartbeats", endpoint, "heart")
    sender.tell("send")
    blob = sender.heard()

    def beside(*, busy: bool) -> float:
        fetcher.tell(f"loop {blob} {LOOP_S if busy else 0}")
        p99_ms = heart.do(HEARTBEATS)
        fetcher.heard()
        return p99_ms

    gb = BLOB_BYTES / 1e9
    ours, copied = interleaved([lambda: gb / fetcher.do(f"fetch {blob}"), lambda: gb / fetcher.do("memcpy")], runs)
    yield compared("bulk_128MB", ours, copied, wanted=">= 0.2", unit="GB/s")
    busy, idle = interleaved([lambda: beside(busy=True), lambda: beside(busy=False)], runs)
    yield compared("heartbeat_p99_ms", busy, idle, wanted="value < 50", unit="ms")


def fanout(stage: Stage, runs: int) -> Line:
    tokens = str(TOKENS["27KB"])
    _, endpoint = stage.hub()
    ring = [stage.role("agent", endpoint, f"a{i}", f"a{(i + 1) % RING}", tokens) for i in range(RING)]
    _, endpoint = stage.hub()
    pair = [stage.role("agent", endpoint, "a0", "", tokens), stage.role("agent", endpoint, "a1", "a0", "0")]
    sides = [lambda: RING * flow(ring, [], RING_RECORDS), lambda: flow(pair, [], RING * RING_RECORDS)]
    ours, single = interleaved(sides, runs)
    return compared("fanout_8", ours, single, wanted=">= 0.8", unit="deliveries/s")


def idle(stage: Stage, runs: int) -> Line:
    hub, endpoint = stage.hub()
    for number in range(8):
        stage.role("idler", endpoint, f"a{number}")
    shares = []
    for _ in range(runs):
        before, began = hub.do("cpu"), time.perf_counter()
        time.sleep(IDLE_S)
        shares.append((hub.do("cpu") - before) / (time.perf_counter() - began))
    return compared("idle_cpu", shares, [1.0] * runs, wanted="value < 0.01", unit="cores")


def lines(only: str, runs: int, directory: Path | None) -> Iterator[Line]:
    """Every line whose name begins so."""
    measures: dict[str, Callable[[Stage], Line | Iterator[Line]]] = {
        "accepted_27KB": lambda stage: accepted(stage, runs, "27KB"),
        "accepted_213KB": lambda stage: accepted(stage, runs, "213KB"),
        "durable_27KB": lambda stage: durable(stage, runs, "27KB"),
        "durable_213KB": lambda stage: durable(stage, runs, "213KB"),
        "vs_ray_27KB": lambda stage: vs_ray(stage, runs, "27KB", "durable"),
        "vs_ray_213KB": lambda stage: vs_ray(stage, runs, "213KB", "accepted"),
        "bulk_128MB": lambda stage: bulk(stage, runs),
        "fanout_8": lambda stage: fanout(stage, runs),
        "idle_cpu": lambda stage: idle(stage, runs),
    }
    for name, measure in measures.items():
        if name.startswith(only):
            with Stage(directory) as stage:
                found = measure(stage)
                yield from (found,) if isinstance(found, Line) else found


def main() -> None:
    """Print one line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", default="", help="lines whose name begins so")
    parser.add_argument("--directory", type=Path, help="where the disk is that is measured (default: the temporary directory)")
    options = parser.parse_args()
    for line in lines(options.only, options.runs, options.directory):
        told = f"{line.name:<18}{line.value:10.4g} {line.unit:<13} reference {line.reference:10.4g}   ratio {line.ratio:.3f}"
        print(json.dumps(asdict(line)) if options.json else f"{told}   wanted: {line.wanted}", flush=True)


if __name__ == "__main__":
    main()
