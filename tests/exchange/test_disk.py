"""The store on disk: what a hub finds when it comes back, what retention takes, who may open it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from exchange import disk
from exchange.commits import Publication
from exchange.disk import DiskStore
from exchange.disk_settings import DiskSettings
from exchange.errors import StorageError
from exchange.members import Incarnation
from exchange.testing import FakeClock, a_rollout_group, a_success, publication_of
from exchange.types import AgentName, AnyExperience, Cursor, Kind, PromptId
from exchange.wire import RecordDecoder

ROOT = Path(__file__).parents[2]
JUDGE = (AgentName("beta"), "judge")
SMALL = DiskSettings(segment_bytes=1, max_bytes=1 << 30, hard_bytes=1 << 30)

Opened = Callable[..., DiskStore]


@pytest.fixture
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Opened:
    """Opens the store in one directory; closed at the end, or by the test."""

    def open_store(limits: DiskSettings | None = None, *, run_id: str = "r", clock: FakeClock | None = None) -> DiskStore:
        clock = clock or FakeClock()
        store = DiskStore.open(
            tmp_path / "disk", run_id=run_id, settings=limits, clock=clock, wall_ns=lambda: int(clock.now * 1e9)
        )
        request.addfinalizer(store.close)
        return store

    return open_store


def a_publication(cursor: int, *, prompt: str = "p", at: float = 1000.0, seq: int | None = None, large: int = 0) -> Publication:
    experience: AnyExperience = a_success("alpha", cursor, prompt)
    if large:
        experience = a_rollout_group("alpha", cursor, prompt, completions=4, tokens=large // 16)
    publication = publication_of(experience, cursor, at=at)
    return publication if seq is None else msgspec.structs.replace(publication, seq=seq)


def cursors(store: DiskStore, after: int = 0, *prompts: str) -> list[int]:
    kinds: tuple[Kind, ...] = ("successes", "rollouts")
    return [found.cursor for found in store.select(kinds, [PromptId(p) for p in prompts] or None, Cursor(after), 1000)]


def test_a_hub_that_comes_back_finds_everything(opened: Opened) -> None:
    store = opened()
    wanted = [a_publication(1), a_publication(2, prompt="q", large=3 << 20), a_publication(5)]
    store.commit(wanted[:2], {JUDGE: Cursor(1)})
    store.commit(wanted[2:])
    store.close()
    again = opened()
    assert again.newest == 5
    assert again.incarnations == {AgentName("alpha"): Incarnation(peer=b"incarnation", epoch=0, mark=2, above=frozenset({5}))}
    assert again.consumers[JUDGE].cursor == 1
    assert (cursors(again), cursors(again, 1), cursors(again, 0, "q")) == ([1, 2, 5], [2, 5], [2])
    for found, publication in zip(again.select(["successes", "rollouts"], None, Cursor(0), 9), wanted, strict=True):
        record = again.load(found)
        assert record is not None
        sent = publication.record
        assert (record.cursor, record.kind, record.agent, record.prompt_ids) == (
            *(sent.cursor, sent.kind, sent.agent),
            sent.prompt_ids,
        )
        assert (record.step, record.version, record.encoded.body) == (sent.step, sent.version, sent.encoded.body)
        assert list(map(bytes, record.encoded.frames)) == list(map(bytes, sent.encoded.frames))
        frames = [memoryview(frame) for frame in record.encoded.frames]
        experience = RecordDecoder().decode(record.encoded.body, frames)
        assert experience.version == sent.version
    stats = again.stats()
    assert (stats.records, stats.reindexed, stats.lost, stats.truncated_bytes) == (3, 0, 0, 0)


def test_a_second_hub_is_told_who_holds_the_directory(opened: Opened, tmp_path: Path) -> None:
    opened()
    with pytest.raises(StorageError, match=f"another hub.*held by pid={os.getpid()}: end that hub"):
        DiskStore.open(tmp_path / "disk", run_id="r")


def test_the_records_of_another_run_are_refused(opened: Opened) -> None:
    opened(run_id="first").close()
    with pytest.raises(StorageError, match="run_id='second', stored run='first'"):
        opened(run_id="second")
    opened(run_id="first")


def test_a_run_id_that_a_crash_cut_off_is_written_again(opened: Opened, tmp_path: Path) -> None:
    opened(run_id="first").close()
    (tmp_path / "disk" / "run").write_bytes(b"fir")
    opened(run_id="first").close()
    assert (tmp_path / "disk" / "run").read_bytes() == b"first\n"


@pytest.mark.parametrize("harm", ["missing", "damaged", "behind"])
def test_an_index_is_made_anew_from_the_segments(opened: Opened, tmp_path: Path, harm: str) -> None:
    store = opened(SMALL)
    path = tmp_path / "disk" / "index.sqlite3"
    store.commit([a_publication(1), a_publication(2, prompt="q")])
    store.checkpoint()
    before = path.read_bytes()
    store.commit([a_publication(3)])
    store.close()
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(before if harm == "behind" else before[:5000])
    again = opened(SMALL)
    assert (cursors(again), cursors(again, 0, "q"), again.newest) == ([1, 2, 3], [2], 3)
    assert again.incarnations[AgentName("alpha")].mark == 3
    stats = again.stats()
    assert stats.reindexed == (1 if harm == "behind" else 3)
    assert stats.damaged_index == (str(path.with_name("index.sqlite3.damaged-1")) if harm == "damaged" else None)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.data())
def test_a_power_cut_takes_the_end_of_the_indexs_log_and_nothing_else(data: st.DataObject) -> None:
    """Records and the numbers that workers used come back from the segments, consumers' cursors as they were told."""
    with tempfile.TemporaryDirectory() as folder:
        live, cut = Path(folder) / "live", Path(folder) / "cut"
        store = DiskStore.open(live, run_id="r", settings=SMALL)
        wal = live / "index.sqlite3-wal"
        cursor, synced, told = 0, wal.stat().st_size, {}
        for count, tells in data.draw(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6)):
            group = [a_publication(cursor + i, seq=2 * (cursor + i)) for i in range(1, count + 1)]
            cursor += count
            store.commit(group, {JUDGE: Cursor(cursor)} if tells else None)
            if tells:
                synced, told = wal.stat().st_size, {JUDGE: Cursor(cursor)}
        shutil.copytree(live, cut)
        os.truncate(cut / wal.name, data.draw(st.integers(synced, wal.stat().st_size)))
        again = DiskStore.open(cut, run_id="r", settings=SMALL)
        assert (cursors(again), again.newest) == (list(range(1, cursor + 1)), cursor)
        assert again.incarnations == store.incarnations
        assert {key: known.cursor for key, known in again.consumers.items()} == told
        assert again.stats().lost == 0
        again.commit([a_publication(cursor + 1)])
        again.close()
        store.close()


def test_what_stands_in_the_index_alone_is_synced(opened: Opened) -> None:
    store = opened(SMALL)
    modes = []
    store._index._writer.set_trace_callback(
        lambda sql: modes.append(store._index._durable) if sql == "COMMIT" else None  # who syncs is said before BEGIN
    )
    one_each(store, 2)
    store.commit([], {JUDGE: Cursor(1)})
    one_each(store, 1)
    store._drop(1, store._facts[1], forced=False)
    assert modes == [False, False, True, False, True]
    assert store._index._writer.execute("PRAGMA synchronous").fetchall() == [(2,)]


def test_the_newest_records_are_found_from_the_end(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "INDEXED_AT_ONCE", 2)
    store = opened()
    store.commit([a_publication(cursor) for cursor in range(1, 8)])
    one = store.stats().nbytes // 7
    for count in (0, 1, 2, 3, 6, 7, 9):
        assert [found.cursor for found in store.latest(count * one)] == list(range(8 - min(count, 7), 8))


def test_records_that_no_segment_has_any_more_are_counted_and_their_cursors_not_reused(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    store.commit([a_publication(1), a_publication(2)])
    store.close()
    segment = tmp_path / "disk" / "00000001.seg"
    os.truncate(segment, segment.stat().st_size - 1)
    again = opened()
    assert (cursors(again), again.newest) == ([1], 2)
    assert (again.stats().lost, again.stats().truncated_bytes > 0) == (1, True)
    with pytest.raises(ValueError, match=r"above newest=2, got cursors=\[2\]"):
        again.commit([a_publication(2)])


def test_damage_is_named_when_a_record_is_loaded(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    store.commit([a_publication(1), a_publication(2)])
    with (tmp_path / "disk" / "00000001.seg").open("r+b") as file:
        file.seek(100)
        file.write(b"\xff\xff")
    first, second = store.select(["successes"], None, Cursor(0), 2)
    with pytest.raises(StorageError, match=r"checksum.*00000001\.seg' at offset=0"):
        store.load(first)
    assert store.load(second) is not None


def test_nothing_of_a_commit_stays_when_the_index_refuses_it(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    store.commit([a_publication(1)])
    nbytes = store.stats().nbytes

    def refuse(change: object) -> None:
        raise StorageError("full")

    with monkeypatch.context() as patch:
        patch.setattr(store._index, "commit", refuse)
        with pytest.raises(StorageError, match="full"):
            store.commit([a_publication(2)])
    assert (store.newest, store.stats().nbytes) == (1, nbytes)
    store.commit([a_publication(3)])
    store.close()
    assert cursors(opened()) == [1, 3]


def test_numbers_that_a_worker_chose_stop_nobody(opened: Opened) -> None:
    store = opened()
    store.commit([a_publication(1, seq=2**64 - 1), a_publication(2, seq=2**64 - 2)])
    store.close()
    assert cursors(opened()) == [1, 2]


def one_each(store: DiskStore, count: int, *, at: float = 1000.0) -> None:
    for cursor in range(store.newest + 1, store.newest + 1 + count):
        store.commit([a_publication(cursor, at=at)])


def test_the_oldest_segments_go_for_room(opened: Opened) -> None:
    store = opened(SMALL)
    one_each(store, 1)
    one = store.stats().nbytes
    store.close()
    store = opened(DiskSettings(segment_bytes=1, max_bytes=3 * one, hard_bytes=5 * one))
    one_each(store, 4)
    gone = store.select(["successes"], None, Cursor(0), 1)[0]
    store.retain()
    assert (cursors(store), store.dropped_to, store.load(gone)) == ([3, 4, 5], 2, None)
    one_each(store, 3)
    store.retain(keep_from=Cursor(3))
    assert (cursors(store), store.stats().forced_segments) == ([4, 5, 6, 7, 8], 1)
    store.retain(keep_from=Cursor(7))
    assert cursors(store) == [6, 7, 8]
    stats = store.stats()
    assert (stats.dropped_records, stats.dropped_segments, stats.forced_segments, stats.segments) == (5, 5, 1, 3)
    store.close()
    assert opened(SMALL).dropped_to == 5


def test_records_go_with_age_by_the_clock_of_the_hub(opened: Opened) -> None:
    clock = FakeClock()
    store = opened(DiskSettings(segment_bytes=1, max_age_s=60), clock=clock)
    one_each(store, 1, at=clock.now)
    clock.advance(50)
    one_each(store, 1, at=clock.now)
    store.retain()
    assert cursors(store) == [1, 2]
    clock.advance(20)
    store.retain()
    assert cursors(store) == [2]
    clock.advance(1000)
    store.retain()
    assert cursors(store) == [2]  # the last segment says where cursors go on


def test_the_newest_record_stays_though_an_empty_segment_follows(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    store = opened(DiskSettings(segment_bytes=1, max_age_s=60), clock=clock)
    one_each(store, 2, at=clock.now)

    def refuse(fd: int, buffers: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", refuse)
        with pytest.raises(StorageError, match=r"No space left.*00000003\.seg': free space"):
            one_each(store, 1, at=clock.now)
    clock.advance(1000)
    store.retain()
    assert (cursors(store), store.stats().segments) == ([2], 2)


def test_a_segment_that_a_crash_left_behind_is_removed(opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(SMALL)
    one_each(store, 3)
    with monkeypatch.context() as patch:
        patch.setattr(store._log, "drop", lambda segment: None)
        store._drop(1, store._facts[1], forced=False)
    store.close()
    assert (tmp_path / "disk" / "00000001.seg").exists()
    again = opened(SMALL)
    assert (cursors(again), again.stats().segments) == ([2, 3], 2)


def test_a_log_that_a_reader_keeps_growing_is_told_once(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(DiskSettings(wal_alarm_bytes=500_000))
    one_each(store, 1)
    reader = sqlite3.connect(tmp_path / "disk" / "index.sqlite3", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM records").fetchall()
    one_each(store, 5)
    assert store.upkeep(None, idle=True).wal_alarms == 0
    one_each(store, 60)
    assert [store.upkeep(None, idle=True).wal_alarms for _ in range(3)] == [1, 1, 1]
    assert ["wal_bytes" in told for told in caplog.messages] == [True]
    reader.close()
    assert store.upkeep(None, idle=True).wal_bytes == 0


@pytest.mark.parametrize(("wall_s", "age_s"), [(1500.0, 500.0), (100.0, 0.0)])
def test_ages_go_on_over_a_restart_and_never_below_zero(opened: Opened, wall_s: float, age_s: float) -> None:
    store = opened()
    store.commit([a_publication(1, at=1000.0)])
    store.close()
    clock = FakeClock(wall_s)
    again = opened(clock=clock)
    record = again.load(again.select(["successes"], None, Cursor(0), 1)[0])
    assert record is not None
    assert clock() - record.stored_at == pytest.approx(age_s)


@pytest.mark.slow
def test_readers_and_the_committing_thread_do_not_disturb_each_other(opened: Opened) -> None:
    store = opened(DiskSettings(segment_bytes=4000, max_bytes=12_000, hard_bytes=12_000))
    done = threading.Event()

    def write() -> None:
        try:
            for cursor in range(1, 81, 4):
                store.commit([a_publication(cursor + i) for i in range(4)])
                store.retain()
        finally:
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen: set[int] = set()
    while not done.is_set():
        for found in store.select(["successes"], None, store.dropped_to, 1000):
            record = store.load(found)
            assert record is None or record.cursor == found.cursor
            seen.add(found.cursor)
        assert store.stats().nbytes < 30_000
    writer.join()
    assert store.newest == 80
    assert len(seen) > 20


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, "tests/exchange")
from test_disk import DiskStore, a_publication
store = DiskStore.open(Path(sys.argv[1]), run_id="r")
cursor = store.newest
while True:
    store.commit([a_publication(cursor + i) for i in (1, 2, 3)])
    cursor += 3
    print(cursor, flush=True)
"""


@pytest.mark.slow
def test_what_a_killed_process_had_committed_is_there(tmp_path: Path) -> None:
    for round_ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as hub:
            assert hub.stdout is not None
            told = [int(hub.stdout.readline()) for _ in range(10 + round_)]
            hub.send_signal(signal.SIGKILL)
            told += map(int, hub.stdout.read().split())
        store = DiskStore.open(tmp_path, run_id="r")
        assert cursors(store) == list(range(1, store.newest + 1))
        assert store.newest >= told[-1]
        store.close()
