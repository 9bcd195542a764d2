"""What a hub has recorded, read beside it and after its end, by a reader that leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

import exchange
from exchange.disk import DiskStore
from exchange.disk_settings import DiskSettings
from exchange.errors import StorageError, WireError
from exchange.log import RecordLog
from exchange.testing import FakeClock, a_rollout_group, a_success, publication_of, rewards_of, step_prompts
from exchange.types import AgentName, Cursor, Experience, PromptId, Version
from exchange.wire import Encoded

# One batch a segment.
SMALL = DiskSettings(segment_bytes=1)


class Critique(exchange.PromptExperience, frozen=True, kw_only=True, tag="critiques/2"):
    """A kind of a project's own."""

    text: str
    marks: np.ndarray[Any, np.dtype[np.float32]]


def opened(directory: Path, settings: DiskSettings = SMALL) -> DiskStore:
    clock = FakeClock()
    return DiskStore.open(directory, run_id="r", settings=settings, clock=clock, wall_ns=lambda: int(clock.now * 1e9))


def record(directory: Path, batches: Sequence[Sequence[Experience]], settings: DiskSettings = SMALL) -> None:
    """Write batches under the cursors 10, 20, …"""
    store, cursor = opened(directory, settings), 0
    for batch in batches:
        publications = []
        for experience in batch:
            cursor += 10
            publications.append(publication_of(experience, cursor, at=1000 + cursor / 1000))
        store.commit(publications)
    store.close()


def three_segments(directory: Path) -> RecordLog:
    alpha = [rewards_of("alpha", 1, "p"), a_success("alpha", 1, "p"), step_prompts("alpha", 1, "p", "q")]
    record(directory, [alpha, [rewards_of("beta", 2, "q"), rewards_of("alpha", 2, "p")], [a_success("beta", 3, "r")]])
    return RecordLog(directory)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RecordLog:
    """Three segments that nobody changes."""
    return three_segments(tmp_path_factory.mktemp("records"))


def cursors(log: RecordLog, **filters: Any) -> list[int]:
    return [row.cursor for row in log.rows(**filters)]


def test_rows_tell_what_they_are(whole: RecordLog) -> None:
    row = next(iter(whole.rows(after=Cursor(20))))
    assert (row.cursor, row.kind, row.agent, row.step, row.version) == (30, "prompts", "alpha", 1, Version(0, 1))
    assert (row.prompt_ids, row.stored_at_ns) == (("p", "q"), 1_000_030_000_000)
    assert row.nbytes == len(msgspec.msgpack.encode(step_prompts("alpha", 1, "p", "q")))


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ({}, [10, 20, 30, 40, 50, 60]),
        ({"kinds": {"rewards"}}, [10, 40, 50]),
        ({"kinds": {"critiques"}}, []),
        ({"agents": [AgentName("beta")]}, [40, 60]),
        ({"prompt_ids": [PromptId("q")]}, [30, 40]),
        ({"prompt_ids": [PromptId("p"), PromptId("r")], "kinds": {"successes"}}, [20, 60]),
        ({"after": 30}, [40, 50, 60]),
        ({"after": 35}, [40, 50, 60]),
        ({"after": 60}, []),
        ({"limit": 2}, [50, 60]),
        ({"limit": 4}, [30, 40, 50, 60]),
        ({"limit": 99}, [10, 20, 30, 40, 50, 60]),
        ({"limit": 0}, []),
        ({"limit": 2, "kinds": {"rewards"}, "agents": ["alpha"]}, [10, 50]),
        ({"limit": 2, "after": 50}, [60]),
    ],
)
def test_filters_are_exact_over_all_segments(whole: RecordLog, filters: dict[str, Any], wanted: list[int]) -> None:
    assert cursors(whole, **filters) == wanted


def test_records_are_read_as_plain_values_of_kinds_that_nobody_registered(tmp_path: Path) -> None:
    base = {"agent": AgentName("alpha"), "step": 1, "version": Version(0, 1), "prompt_id": PromptId("p"), "task": "reverse"}
    marks = np.array([0.5, np.nan], np.float32)
    large = a_rollout_group("alpha", 1, "p", completions=2, tokens=200_000)
    record(tmp_path, [[Critique(**base, text="too short", marks=marks), large]])  # type: ignore[arg-type]
    log = RecordLog(tmp_path)
    critique, group = map(log.read, log.rows())
    np.testing.assert_array_equal(critique.pop("marks"), marks)
    assert critique == base | {"type": "critiques/2", "text": "too short", "version": {"epoch": 0, "step": 1}}
    for name in ("ids", "logprobs", "texts", "finished"):
        np.testing.assert_array_equal(group[name], getattr(large, name))


def test_a_log_is_read_beside_its_hub_and_leaves_no_trace(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.commit([publication_of(rewards_of("alpha", 1, "p"), 10)])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    log = RecordLog(tmp_path)
    assert cursors(log) == [10] and len(list(map(log.read, log.rows()))) == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    store.commit([publication_of(rewards_of("alpha", 2, "p"), 20)])
    assert cursors(log) == [10, 20]
    store.close()
    (tmp_path / "index.sqlite3").unlink()
    assert cursors(log) == [10, 20], "what the index does not know is there"


@pytest.mark.parametrize("missing", [1, 50, 500, 832])
def test_a_record_that_is_being_written_is_left_out(tmp_path: Path, missing: int) -> None:
    group = [rewards_of("alpha", 1, "p"), a_success("alpha", 1, "p"), a_rollout_group("alpha", 1, "p", tokens=100)]
    record(tmp_path, [group])
    (file,) = tmp_path.glob("*.seg")
    whole = file.read_bytes()
    file.write_bytes(whole[:-missing])
    assert cursors(RecordLog(tmp_path)) == [10, 20]
    file.write_bytes(whole)
    assert cursors(RecordLog(tmp_path)) == [10, 20, 30]


@pytest.mark.parametrize("damage", ["cut off", "no record", "meta of 65 kB"])
def test_damage_is_told_with_its_place_behind_what_is_whole(tmp_path: Path, damage: str) -> None:
    log = three_segments(tmp_path)
    file = tmp_path / "00000002.seg"
    first = next(iter(log.rows(after=Cursor(30)))).place
    whole, bad = file.read_bytes()[: first.end], file.read_bytes()[first.end :]
    changed = {"cut off": bad[:-8], "no record": b"?" + bad[1:], "meta of 65 kB": bad[:16] + b"\xff\xff" + bad[18:]}
    file.write_bytes(whole + changed[damage])
    rows = log.rows()
    assert [next(rows).cursor for _ in range(4)] == [10, 20, 30, 40]
    with pytest.raises(StorageError, match=rf"00000002.seg' at offset={first.end}"):
        next(rows)
    assert cursors(log, limit=1) == [60], "what lies behind damage can be had from the end"


def test_a_record_with_a_flipped_bit_is_listed_and_not_read(tmp_path: Path) -> None:
    log = three_segments(tmp_path)
    last = list(log.rows())[-1]
    file = tmp_path / "00000003.seg"
    raw = bytearray(file.read_bytes())
    raw[-70] ^= 1
    file.write_bytes(raw)
    assert cursors(log)[-1] == 60
    with pytest.raises(StorageError, match="checksum"):
        log.read(last)


def test_what_its_producer_wrote_wrongly_is_told_apart_from_damage(tmp_path: Path) -> None:
    store = opened(tmp_path)
    publication = publication_of(a_success("alpha", 1, "p"), 10)
    body = publication.record.encoded.body
    store.commit([replace(publication, record=replace(publication.record, encoded=Encoded(body=body, frames=())))])
    store.close()
    log = RecordLog(tmp_path)
    (row,) = log.rows()
    assert row.nbytes == len(body)
    with pytest.raises(WireError, match="outside its frame"):
        log.read(row)


def test_segments_that_the_hub_lets_go_meanwhile_are_no_error(tmp_path: Path) -> None:
    log = three_segments(tmp_path)
    rows = log.rows()
    assert next(rows).cursor == 10
    (tmp_path / "00000002.seg").unlink()
    assert [row.cursor for row in rows] == [20, 30, 60]


def test_a_directory_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no records are kept here"):
        RecordLog(tmp_path / "none")
    assert cursors(RecordLog(tmp_path)) == []
