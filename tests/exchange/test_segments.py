"""Segment files, in memory and in a real directory: whole records or none."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from exchange import segment_records
from exchange.errors import StorageError
from exchange.files import Files, OSFiles
from exchange.segment_records import HEADER_BYTES, SegmentRecord, stored_bytes
from exchange.segments import SegmentLog
from exchange.testing import Crash, CrashFiles
from exchange.types import Cursor
from exchange.wire import Buffer

FIRST = "00000001.seg"


@pytest.fixture(params=["memory", "system"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return CrashFiles() if request.param == "memory" else OSFiles(tmp_path / "log")


def a_record(cursor: int, *frames: Buffer, body: bytes = b"body", meta: bytes = b"meta") -> SegmentRecord:
    return SegmentRecord(cursor=Cursor(cursor), meta=meta, body=body, frames=frames)


def plain(record: SegmentRecord) -> tuple[object, ...]:
    return record.cursor, record.meta, record.body, tuple(map(bytes, record.frames))


def scanned(log: SegmentLog, *, skip_bad: bool = False) -> list[int]:
    return [record.cursor for _, record in log.scan(skip_bad=skip_bad)]


def filled(files: Files, *batches: Sequence[int], segment_bytes: int = 1 << 20) -> SegmentLog:
    log = SegmentLog(files, segment_bytes)
    for batch in batches:
        log.append([a_record(cursor, bytes(100)) for cursor in batch])
        log.sync()
    return log


PARTS = st.binary(max_size=200)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.tuples(PARTS, PARTS, st.lists(PARTS, max_size=4)), min_size=1, max_size=4), max_size=6))
def test_records_come_back_as_they_were(batches: list[list[tuple[bytes, bytes, list[bytes]]]]) -> None:
    files = CrashFiles()
    log = SegmentLog(files, segment_bytes=1000)
    cursor, wanted, places = 0, [], []
    for batch in batches:
        records = [a_record(cursor + i, *frames, body=body, meta=meta) for i, (meta, body, frames) in enumerate(batch, 1)]
        cursor += len(batch)
        places += log.append(records)
        wanted += [plain(record) for record in records]
    log.sync()
    assert [plain(log.read(place)) for place in places] == wanted
    again = list(SegmentLog(files).scan())
    assert [place for place, _ in again] == places == sorted(places)
    assert [plain(record) for _, record in again] == wanted
    assert [record.cursor for _, record in SegmentLog(files).scan(places[0])] == list(range(2, cursor + 1)) if places else True


def test_frames_lie_at_multiples_of_64_on_disk_and_in_memory(files: Files) -> None:
    log = SegmentLog(files)
    places = log.append([a_record(1, b"x" * 5, b"", b"y" * 65), a_record(2, b"z")])
    log.sync()
    assert all(place.offset % 64 == place.nbytes % 64 == 0 for place in places)
    for frame in log.read(places[0]).frames:
        assert isinstance(frame, memoryview) and frame.readonly
        assert not frame.nbytes or np.frombuffer(frame, np.uint8).ctypes.data % 64 == 0


def test_a_batch_is_one_write_and_its_frames_are_not_copied() -> None:
    class Watched(CrashFiles):
        def append(self, name: str, buffers: Sequence[Buffer]) -> None:
            writes.append(buffers)
            super().append(name, buffers)

    writes: list[Sequence[Buffer]] = []
    frames = [memoryview(bytes(70_000)) for _ in range(3)]
    SegmentLog(Watched()).append([a_record(i, frame) for i, frame in enumerate(frames, 1)])
    assert len(writes) == 1
    assert [buffer for buffer in writes[0] if len(buffer) == 70_000] == frames
    assert all(any(buffer is frame for buffer in writes[0]) for frame in frames)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_changed_byte_is_overlooked(data: st.DataObject) -> None:
    files = CrashFiles()
    log = SegmentLog(files)
    place, behind = log.append([a_record(1, b"frame" * 9, b"x"), a_record(2)])
    log.sync()
    files.damage(FIRST, data.draw(st.integers(0, place.nbytes - 1)))
    with pytest.raises(StorageError, match=r"file=.* at offset=0"):
        log.read(place)
    assert log.read(behind).cursor == 2


@pytest.mark.parametrize("left", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, 63, 64, 128, 191])
def test_a_torn_tail_is_cut_off_and_written_over(files: Files, left: int) -> None:
    filled(files, [1], [2])
    (size,) = files.sizes().values()
    one = stored_bytes(a_record(2, bytes(100)))
    files.truncate(FIRST, size - one + left)
    log = SegmentLog(files)
    assert scanned(log) == [1]
    assert log.truncated_bytes == left
    log.append([a_record(3)])
    log.sync()
    assert scanned(SegmentLog(files)) == [1, 3]


def test_zeros_behind_the_last_record_are_a_torn_tail(files: Files) -> None:
    filled(files, [1])
    files.append(FIRST, [bytes(5000)])
    log = SegmentLog(files)
    assert scanned(log) == [1]
    assert log.truncated_bytes == 5000


def test_damage_in_an_older_segment_is_refused_or_left_out() -> None:
    files = CrashFiles()
    log = filled(files, [1, 2, 3], [4], [5, 6], segment_bytes=100)
    assert sorted(log.sizes) == [1, 2, 3]
    one = log.sizes[2]
    files.damage(FIRST, one + 100)
    with pytest.raises(StorageError, match=rf"file='{FIRST}' at offset={one}: restore"):
        scanned(SegmentLog(files))
    log = SegmentLog(files)
    assert scanned(log, skip_bad=True) == [1, 4, 5, 6]
    assert (log.skipped_segments, log.skipped_bytes, log.truncated_bytes) == (1, 2 * one, 0)
    assert files.sizes()[FIRST] == 3 * one


def test_a_cursor_that_stands_still_is_damage(files: Files) -> None:
    filled(files, [5], [5])
    log = SegmentLog(files)
    assert scanned(log) == [5]
    assert log.truncated_bytes


def test_a_newer_format_is_refused_and_not_cut_off(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_records, "FORMAT", 2)
    filled(files, [1])
    monkeypatch.undo()
    size = files.sizes()[FIRST]
    with pytest.raises(StorageError, match=r"format=2.*00000001\.seg' at offset=0"):
        scanned(SegmentLog(files))
    assert files.sizes()[FIRST] == size


@pytest.mark.parametrize("kind", [0, 1])
def test_every_checksum_that_is_at_hand_is_read(files: Files, monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    if kind not in segment_records._CHECKSUMS:
        pytest.skip("crc32c is not installed")
    monkeypatch.setattr(segment_records, "_KIND", kind)
    filled(files, [1])
    monkeypatch.undo()
    assert scanned(SegmentLog(files)) == [1]


def test_without_the_package_its_checksums_are_not_taken_for_damage(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("crc32c")
    filled(files, [1])
    monkeypatch.delitem(segment_records._CHECKSUMS, 1)
    with pytest.raises(StorageError, match="needs the package crc32c"):
        scanned(SegmentLog(files))


@pytest.mark.parametrize("room", [0, 1, 100, 300])
def test_a_full_disk_leaves_nothing_of_a_batch(room: int) -> None:
    files = CrashFiles()
    log = filled(files, [1])
    files.room_bytes = files.sizes()[FIRST] + room
    with pytest.raises(StorageError, match="no space left"):
        log.append([a_record(2, bytes(100)), a_record(3, bytes(100))])
    files.room_bytes = None
    (place,) = log.append([a_record(4, bytes(10))])
    log.sync()
    assert log.read(place).cursor == 4
    again = SegmentLog(files)
    assert scanned(again) == [1, 4]
    assert again.truncated_bytes == 0


def test_what_a_failed_sync_may_have_lost_is_taken_back() -> None:
    files = CrashFiles()
    log = filled(files, [1])
    log.append([a_record(2)])
    files.failing_syncs = 1
    with pytest.raises(StorageError, match="input/output"):
        log.sync()
    log.append([a_record(3)])
    log.sync()
    files.crash(lambda most: most)
    assert scanned(SegmentLog(files)) == [1, 3]


def test_a_failed_sync_after_a_rewind_takes_back_only_what_came_since() -> None:
    files = CrashFiles()
    log = filled(files, [1])
    (place,) = log.append([a_record(2, bytes(500))])
    log.sync()
    log.rewind(place)
    log.append([a_record(3)])
    files.failing_syncs = 1
    with pytest.raises(StorageError, match="input/output"):
        log.sync()
    assert log.sizes[1] == place.offset
    (again,) = log.append([a_record(4)])
    log.sync()
    assert again.offset == place.offset
    assert scanned(SegmentLog(files)) == [1, 4]


def test_a_segment_is_durable_before_the_next_begins() -> None:
    files = CrashFiles()
    log = SegmentLog(files, segment_bytes=10)
    for cursor in (1, 2, 3):
        log.append([a_record(cursor)])
    files.stop_in = 0
    with pytest.raises(Crash):
        log.sync()
    files.crash(lambda most: 0)
    assert scanned(SegmentLog(files)) == [1, 2]


def test_nothing_is_appended_before_the_tail_is_known(files: Files) -> None:
    filled(files, [1])
    with pytest.raises(StorageError, match="must be scanned"):
        SegmentLog(files).append([a_record(2)])


def test_the_last_segment_is_never_dropped(files: Files) -> None:
    log = filled(files, [1], [2], segment_bytes=10)
    log.drop(1)
    assert list(files.sizes()) == ["00000002.seg"]
    with pytest.raises(ValueError, match="segment=2"):
        log.drop(2)


def test_a_missing_directory_is_made_for_its_user_alone(tmp_path: Path) -> None:
    OSFiles(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_writes_of_many_buffers_and_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writev = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, buffers: writev(fd, [b"".join(buffers[:3])[:17]]))
    wanted = [bytes([i % 256]) * (i % 20) for i in range(2500)]
    files = OSFiles(tmp_path)
    files.append("f", wanted)
    assert (tmp_path / "f").read_bytes() == b"".join(wanted)


@pytest.mark.parametrize(("code", "advice"), [(errno.ENOSPC, "free space"), (errno.EIO, "device"), (errno.EPERM, "kernel")])
def test_errors_of_the_system_say_where_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, advice: str
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    files = OSFiles(tmp_path)
    files.append("f", [b"x"])
    monkeypatch.setattr(os, "fdatasync", refuse)
    with pytest.raises(StorageError, match=f"{os.strerror(code)}, got path='{tmp_path}/f': .*{advice}") as caught:
        files.sync("f")
    assert caught.value.errno == code
