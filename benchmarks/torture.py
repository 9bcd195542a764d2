"""Kills the processes of an exchange at random, in the middle of their work, and counts what was lost.

    python benchmarks/torture.py --kills 30 --seed 0 [--disk-mb 32] [--json] [--keep DIR]

A durable hub, two publishers and two consumers, each a process. A publisher sends numbered items with durable acknowledgement
and notes in a SQLite database of its own what was acknowledged; killed, it comes back under its identity and goes on behind
that. A consumer takes rows and commits their effect and its cursor in one transaction. SIGKILL falls on one of the five at a
time. In the end the publishers stop, the consumers catch up, and the databases are compared: `published` items reached a
consumer; `lost` is what was acknowledged and has no effect at some consumer; `duplicates`, rows that came to a consumer again
although it had committed them, or whose item came again under another cursor.

With --disk-mb the hub's directory is a small file system (tmpfs, so root is needed) which is filled up again and again: durable
records are then refused, and publishers go on as new incarnations once there is room. What they had sent meanwhile they send
again; such an item may come twice, under two cursors (`resent`), and is known by its number.

SIGKILL leaves the page cache alone, so that it says nothing of fdatasync: tests/properties/test_segments_crash.py does.
"""

from __future__ import annotations

import os
import sys

# Python puts a script's own folder first on the path, where `exchange` would be the benchmark of that name.
sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]  # noqa: PTH100, PTH120

import argparse
import asyncio
import json
import random
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import exchange
from exchange.endpoints import remove_private_dir
from exchange.testing import a_rollout_group
from exchange.types import Cursor

AGENTS = ("alpha", "beta")
CONSUMERS = ("gamma", "delta")
IN_FLIGHT = 16
RUN_ID = "torture"
HEARTBEAT_S = 0.2
BETWEEN_KILLS_S = (0.2, 2.0)
CATCH_UP_S = 60.0


def database(path: Path) -> sqlite3.Connection:
    """One worker's own memory."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.executescript(
        """
        PRAGMA journal_mode=WAL;
        CREATE TABLE IF NOT EXISTS state(
            id INTEGER PRIMARY KEY CHECK (id = 0), identity BLOB, acknowledged INTEGER, cursor INTEGER);
        CREATE TABLE IF NOT EXISTS effects(agent TEXT, item INTEGER, cursor INTEGER UNIQUE, PRIMARY KEY (agent, item));
        CREATE TABLE IF NOT EXISTS redelivered(agent TEXT, item INTEGER, cursor INTEGER);
        """
    )
    connection.execute("INSERT OR IGNORE INTO state VALUES (0, ?, 0, 0)", (exchange.new_routing_id(),))
    return connection


def state(connection: sqlite3.Connection, column: str) -> object:
    return connection.execute(f"SELECT {column} FROM state").fetchone()[0]


async def hub(folder: Path) -> None:
    config = exchange.HubConfig(run_id=RUN_ID, heartbeat_s=HEARTBEAT_S)
    await exchange.serve(endpoint(folder), config, stop=asyncio.Event(), directory=folder / "store")


def endpoint(folder: Path) -> str:
    return f"ipc://{(folder / 'socket').read_text()}/hub"


async def publisher(folder: Path, name: str) -> None:
    """Publish items until the folder holds `stop`; item n is the record with sequence number n."""
    own = database(folder / f"{name}.db")
    identity = own.execute("SELECT identity FROM state").fetchone()[0]
    acknowledged = int(str(state(own, "acknowledged")))
    async with exchange.connect(
        endpoint(folder), name=name, run_id=RUN_ID, identity=identity, first_seq=acknowledged + 1, connect_timeout_s=30
    ) as ex:
        item = acknowledged
        waiting: dict[int, asyncio.Task[exchange.Receipt]] = {}
        while waiting or not (folder / "stop").exists():
            while len(waiting) < IN_FLIGHT and not (folder / "stop").exists():
                item += 1
                record = a_rollout_group(name, item, f"{name}/{item}", completions=2, tokens=64, epoch=ex.epoch)
                waiting[item] = asyncio.create_task(ex.publish(record, ack="durable"))
                await asyncio.sleep(0)  # tasks start in order, so that items keep their numbers
            oldest = next(iter(waiting))
            try:
                receipt = await waiting.pop(oldest)
            except exchange.RefusedError as refusal:
                # Under its number the record stays refused: come back as another incarnation.
                own.execute("UPDATE state SET identity = ?", (exchange.new_routing_id(),))
                sys.exit(f"refused, to be tried again: {refusal}")
            assert receipt.seq == oldest
            own.execute("UPDATE state SET acknowledged = ?", (oldest,))


async def consumer(folder: Path, name: str) -> None:
    """Take rows until the folder holds `end`; their effect and the cursor are one transaction."""
    own = database(folder / f"{name}.db")
    async with exchange.connect(endpoint(folder), name=name, run_id=RUN_ID, connect_timeout_s=30) as ex:
        while not (folder / "end").exists():
            cursor = Cursor(int(str(state(own, "cursor"))))
            got = await ex.gather(kinds={"rollouts"}, after=cursor, min_count=1, deadline_s=0.5, max_bytes=1 << 18)
            own.execute("BEGIN IMMEDIATE")
            for row in got.rows:
                effect = (row.experience.agent, row.experience.step, row.cursor)
                try:
                    own.execute("INSERT INTO effects VALUES (?, ?, ?)", effect)
                except sqlite3.IntegrityError:
                    own.execute("INSERT INTO redelivered VALUES (?, ?, ?)", effect)
            own.execute("UPDATE state SET cursor = ?", (got.cursor,))
            own.execute("COMMIT")


class Disk:
    """A small file system under a folder, with a file in it that takes what room there is, or does not."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        folder.mkdir(mode=0o700)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0700", "tmpfs", str(folder)], check=True)
        self._folder = folder
        self._filler = folder / "filler"
        self.times_full = 0

    def toggle(self) -> None:
        """Fill what is free, or free it."""
        if self._filler.exists():
            self.free()
            return
        self.times_full += 1
        block = bytes(1 << 16)
        with self._filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(block) == len(block):
                pass

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self._folder)], check=True)


class Torture:
    """Starts the five, kills them, and starts them again."""

    def __init__(self, folder: Path, rng: random.Random, *, disk: Disk | None) -> None:
        self._folder = folder
        self._rng = rng
        self._disk = disk
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        log = (self._folder / f"{name}.log").open("ab")
        command = [sys.executable, __file__, "--role", name, "--keep", str(self._folder)]
        self._running[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self) -> None:
        name = self._rng.choice(["hub", *AGENTS, *CONSUMERS])
        process = self._running[name]
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.start(name)

    def revive(self, *, but: Sequence[str] = ()) -> None:
        """Start again what failed by itself, as a publisher does whose hub stayed away; `but` those that may end well."""
        for name, process in list(self._running.items()):
            if process.poll() is not None and not (name in but and process.returncode == 0):
                self.start(name)

    def run(self, kills: int) -> dict[str, int]:
        for name in ("hub", *AGENTS, *CONSUMERS):
            self.start(name)
        time.sleep(2.0)
        for _ in range(kills):
            time.sleep(self._rng.uniform(*BETWEEN_KILLS_S))
            self.revive()
            self.kill()
            if self._disk is not None:
                self._disk.toggle()
        if self._disk is not None:
            self._disk.free()
        time.sleep(2.0)
        self.revive()
        (self._folder / "stop").touch()
        self.wait_for(AGENTS)
        deadline = time.monotonic() + CATCH_UP_S
        while self.count()["lost"] and time.monotonic() < deadline:
            time.sleep(0.2)
            self.revive()
        (self._folder / "end").touch()
        self.wait_for(CONSUMERS)
        self._running.pop("hub").terminate()
        return {"kills": kills} | self.count()

    def wait_for(self, names: Sequence[str]) -> None:
        """Until these have come to their end; who fails on the way is started again."""
        deadline = time.monotonic() + CATCH_UP_S
        while any(self._running[name].poll() != 0 for name in names):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{', '.join(names)} did not end within {CATCH_UP_S:g} s: see their logs")
            self.revive(but=names)
            time.sleep(0.1)
        for name in names:
            del self._running[name]

    def stop(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def count(self) -> dict[str, int]:
        """What the workers' databases say."""
        acknowledged = {name: int(str(state(database(self._folder / f"{name}.db"), "acknowledged"))) for name in AGENTS}
        delivered = lost = duplicates = resent = 0
        published = set[tuple[str, int]]()
        for name in CONSUMERS:
            own = database(self._folder / f"{name}.db")
            effects = set(own.execute("SELECT agent, item FROM effects"))
            delivered += len(effects)
            lost += sum((agent, item) not in effects for agent, most in acknowledged.items() for item in range(1, most + 1))
            published |= effects
            again = own.execute("SELECT agent, item, cursor FROM redelivered").fetchall()
            same = sum(
                bool(own.execute("SELECT 1 FROM effects WHERE cursor = ?", (cursor,)).fetchone()) for *_, cursor in again
            )
            moved = len(again) - same
            duplicates += same + (0 if self._disk else moved)
            resent += moved if self._disk else 0
        total = sum(acknowledged.values())
        return {
            "published": len(published),
            "acknowledged": total,
            "delivered": delivered,
            "lost": lost,
            "duplicates": duplicates,
            "resent": resent,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disk-mb", type=int, help="a hub whose disk is this small and fills up")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path, help="leave databases and logs in this folder")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        role = arguments.role
        works = hub(arguments.keep) if role == "hub" else (publisher if role in AGENTS else consumer)(arguments.keep, role)
        asyncio.run(works)
        return
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="torture-"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "socket").write_text(str(exchange.private_ipc_dir()))
    disk = Disk(folder / "store", arguments.disk_mb) if arguments.disk_mb else None
    torture = Torture(folder, random.Random(arguments.seed), disk=disk)
    try:
        result = torture.run(arguments.kills) | ({"times_full": disk.times_full} if disk else {})
    finally:
        torture.stop()
        if disk is not None:
            disk.close()
        remove_private_dir(endpoint(folder))
    if not arguments.keep:
        shutil.rmtree(folder)
    print(json.dumps(result) if arguments.json else "\n".join(f"{name:<14}{value:>10,}" for name, value in result.items()))
    sys.exit(result["lost"] > 0 or result["duplicates"] > 0)


if __name__ == "__main__":
    main()
