"""Whatever happens to the machine: what was committed is there afterwards, whole and in order, and nothing is half there."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from exchange.commits import Publication
from exchange.disk import DiskStore
from exchange.disk_settings import DiskSettings
from exchange.errors import StorageError
from exchange.index import Index
from exchange.index_rows import Change
from exchange.store import Record
from exchange.testing import Crash, CrashFiles, FakeClock
from exchange.types import AgentName, Cursor, PromptId, Version
from exchange.wire import Encoded

Fault = Literal["none", "stop", "full", "bad sync", "index refuses", "stop before index", "stop behind index"]
FAULTS: tuple[Fault, ...] = ("stop", "full", "bad sync", "index refuses", "stop before index", "stop behind index")
SETTINGS = DiskSettings(segment_bytes=700, max_bytes=3000, hard_bytes=10**6)


class FaultyIndex(Index):
    """Commits are atomic: before a fault there is nothing of them, behind it all. (Without syncs, for speed.)"""

    fault: Fault = "none"

    def _connect(self) -> sqlite3.Connection:
        db = super()._connect()
        db.execute("PRAGMA synchronous = OFF")
        return db

    def commit(self, change: Change) -> None:
        if self.fault == "index refuses":
            raise StorageError("the index failed: no space")
        if self.fault == "stop before index":
            raise Crash
        super().commit(change)
        if self.fault == "stop behind index":
            raise Crash


class Machine:
    """A hub's disk with what it has promised. draw: as CrashFiles.crash wants it."""

    def __init__(self, directory: Path, draw: Callable[[int], int]) -> None:
        self.directory, self.draw = directory, draw
        self.files = CrashFiles()
        self.tried: dict[int, list[Publication]] = {}
        self.promised: dict[int, Publication] = {}
        self.seq = 0
        self.start()

    def start(self) -> None:
        self.index = FaultyIndex(self.directory / "index")
        clock = FakeClock()
        try:
            self.store = DiskStore(
                self.files, self.index, run_id="r", settings=SETTINGS, clock=clock, wall_ns=lambda: int(clock() * 1e9)
            )
        except BaseException:
            self.index.close()
            raise
        self.newest = self.store.newest
        self.check()

    def crash(self, *, lose_index: bool = False) -> None:
        self.index.close()
        self.files.crash(self.draw)
        if lose_index:
            for file in self.directory.iterdir():
                file.unlink()
        self.start()

    def commit(self, sizes: list[int], fault: Fault) -> None:
        group = [self.publication(nbytes) for nbytes in sizes]
        for each in group:
            assert each.record.cursor not in self.promised
            self.tried.setdefault(each.record.cursor, []).append(each)
        self.files.stop_in = self.draw(6) if fault == "stop" else None
        self.files.room_bytes = sum(self.files.sizes().values()) + self.draw(sum(sizes)) if fault == "full" else None
        self.files.failing_syncs = int(fault == "bad sync")
        self.index.fault = fault
        try:
            self.store.commit(group)
        except StorageError:
            assert fault in ("full", "bad sync", "index refuses")
        except Crash:
            self.crash()
            return
        else:
            self.promised |= {each.record.cursor: each for each in group}
        self.files.stop_in = self.files.room_bytes = None
        self.index.fault = "none"
        self.check()

    def publication(self, nbytes: int) -> Publication:
        self.newest, self.seq = Cursor(self.newest + 1), self.seq + 1
        content = bytes(f"{self.newest}-{self.seq}", "ascii") * nbytes
        record = Record(
            cursor=self.newest,
            kind="rewards",
            agent=AgentName("alpha"),
            prompt_ids=(PromptId(f"p{self.seq % 3}"),),
            step=self.seq,
            version=Version(0, self.seq),
            encoded=Encoded(body=content[: nbytes // 2], frames=(content[: nbytes // 3], content[:nbytes])),
            stored_at=1000.0,
        )
        return Publication(record=record, peer=b"incarnation", seq=self.seq)

    def check(self) -> None:
        found = self.store.select(["rewards"], None, Cursor(0), 10_000)
        cursors = [each.cursor for each in found]
        assert cursors == sorted(set(cursors))
        assert set(cursors) >= {cursor for cursor in self.promised if cursor > self.store.dropped_to}
        assert self.store.newest >= max([0, *cursors, *self.promised])
        for each in found:
            record = self.store.load(each)
            assert record is not None
            assert same(record) in [same(tried.record) for tried in self.tried[each.cursor]]
            if each.cursor in self.promised:
                assert same(record) == same(self.promised[each.cursor].record)
        if self.promised:
            known = self.store.incarnations[AgentName("alpha")]
            kept = [each.seq for each in self.promised.values() if each.record.cursor > self.store.dropped_to]
            assert all(seq <= known.mark or seq in known.above for seq in kept)


def same(record: Record) -> tuple[object, ...]:
    frames = tuple(map(bytes, record.encoded.frames))
    return record.cursor, record.agent, record.prompt_ids, record.step, record.version, record.encoded.body, frames


# In memory where the system has such a place: SQLite syncs a new file whatever it is told.
PLACE = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
SIZES = st.lists(st.integers(0, 400), min_size=1, max_size=4)
DEEDS = st.one_of(
    st.tuples(st.just("commit"), SIZES, st.sampled_from(("none", *FAULTS))),
    st.tuples(st.just("commit"), SIZES, st.just("none")),
    st.tuples(st.sampled_from(["crash", "lose index", "retain", "stop while retaining", "stop while starting"])),
)


def live(deeds: list[tuple[object, ...]], draw: Callable[[int], int]) -> None:
    with tempfile.TemporaryDirectory(dir=PLACE) as directory:
        machine = Machine(Path(directory), draw)
        for deed in deeds:
            match deed:
                case ("commit", list(sizes), fault):
                    machine.commit(sizes, fault)  # type: ignore[arg-type]
                case ("crash",):
                    machine.crash()
                case ("lose index",):
                    machine.crash(lose_index=True)
                case ("retain",):
                    machine.store.retain()
                    machine.check()
                case ("stop while retaining",):
                    machine.files.stop_in = draw(3)
                    try:
                        machine.store.retain()
                    except Crash:
                        machine.crash()
                    machine.files.stop_in = None
                case ("stop while starting",):
                    machine.index.close()
                    machine.files.crash(draw)
                    machine.files.stop_in = draw(3)
                    try:
                        machine.start()
                    except Crash:
                        machine.files.crash(draw)
                        machine.start()
                    machine.files.stop_in = None
        machine.crash()
        machine.crash(lose_index=True)
        machine.index.close()


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.lists(DEEDS, max_size=10), st.data())
def test_what_was_committed_survives_everything(deeds: list[tuple[object, ...]], data: st.DataObject) -> None:
    live(deeds, lambda most: data.draw(st.integers(0, most)))


@pytest.mark.soak
@settings(max_examples=2000, deadline=None)
@given(st.lists(DEEDS, max_size=25), st.data())
def test_what_was_committed_survives_everything_for_long(deeds: list[tuple[object, ...]], data: st.DataObject) -> None:
    live(deeds, lambda most: data.draw(st.integers(0, most)))
