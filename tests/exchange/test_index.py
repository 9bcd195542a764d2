"""The index against a list, and against what happens to its file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from exchange import index as index_module
from exchange.errors import CorruptIndexError, StorageError
from exchange.index import Index, open_index
from exchange.index_rows import Change, ConsumerCursor, IndexedRecord, RecordMeta, saw
from exchange.members import Incarnation
from exchange.segments import Place
from exchange.types import AgentName, Cursor, Kind, PromptId, Version

ALPHA = AgentName("alpha")


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    opened = Index(tmp_path / "index")
    yield opened
    opened.close()


def a_row(cursor: int, *prompts: str, kind: Kind = "rewards", segment: int = 1, step: int = 0) -> IndexedRecord:
    return IndexedRecord(
        cursor=Cursor(cursor),
        kind=kind,
        agent=ALPHA,
        step=step,
        version=Version(0, step),
        stored_at_ns=cursor,
        prompt_ids=tuple(map(PromptId, prompts)),
        place=Place(segment, 64 * cursor, 64),
    )


def meta(seq: int, *, epoch: int = 0, peer: bytes = b"one") -> RecordMeta:
    return RecordMeta(
        kind="rewards", agent=ALPHA, step=0, version=Version(epoch, 0), prompt_ids=(), stored_at_ns=0, peer=peer, seq=seq
    )


KINDS = st.sampled_from(["rewards", "prompts"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("indices")


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.tuples(KINDS, st.lists(st.sampled_from(["p", "q", "p\0", "P"]), max_size=3)), max_size=30),
    st.lists(
        st.tuples(
            st.sets(KINDS), st.none() | st.sets(st.sampled_from(["p", "q", "p\0", "x"])), st.integers(0, 30), st.integers(1, 9)
        ),
        min_size=5,
        max_size=10,
    ),
)
def test_selection_is_what_a_plain_search_finds(
    folder: Path,
    added: list[tuple[Kind, list[str]]],
    asked: list[tuple[set[Kind], set[PromptId] | None, int, int]],
) -> None:
    rows = [a_row(i, *prompts, kind=kind) for i, (kind, prompts) in enumerate(added, 1)]
    index = Index(folder / str(len(list(folder.iterdir()))))
    index.commit(Change(records=rows))
    for kinds, prompts, after, limit in asked:
        wanted = [
            row
            for row in rows
            if row.kind in kinds and row.cursor > after and (prompts is None or prompts & set(row.prompt_ids))
        ]
        assert index.select(kinds, prompts, Cursor(after), limit) == wanted[:limit]
    index.close()


def test_any_number_of_prompts_can_be_asked_for(index: Index) -> None:
    index.commit(Change(records=[a_row(1, "p1", "p700"), a_row(2, "p39999"), a_row(3, "other")]))
    prompts = [PromptId(f"p{i}") for i in range(40_000)]
    assert [row.cursor for row in index.select(["rewards"], prompts, Cursor(0), 10)] == [1, 2]
    assert [row.cursor for row in index.select(["rewards"], prompts, Cursor(0), 1)] == [1]


def test_a_commit_is_all_or_nothing(index: Index) -> None:
    known = {ALPHA: Incarnation(peer=b"one", epoch=2, mark=7, above=frozenset({9}))}
    told = {(ALPHA, "judge"): ConsumerCursor(cursor=Cursor(1), told_at_ns=5)}
    index.commit(Change(records=[a_row(1, "p")], incarnations=known, consumers=told))
    state = index.state()
    assert (state.newest, state.incarnations, state.consumers) == (1, known, told)
    worse = {ALPHA: Incarnation(peer=b"two", epoch=3, mark=0)}
    with pytest.raises(StorageError, match="UNIQUE"):
        index.commit(Change(records=[a_row(2, "q"), a_row(1, "r")], incarnations=worse))
    assert index.state() == state
    assert index.select(["rewards"], [PromptId("q"), PromptId("r")], Cursor(0), 9) == []
    index.commit(Change(records=[a_row(2, "q")]))
    assert index.state().newest == 2


def test_numbers_that_workers_choose_fit(index: Index) -> None:
    huge = {ALPHA: Incarnation(peer=b"one", epoch=2**64 - 1, mark=2**64 - 1, above=frozenset({2**64 + 1}))}
    index.commit(Change(records=[a_row(1, step=2**64 - 1)], incarnations=huge))
    (row,) = index.select(["rewards"], None, Cursor(0), 1)
    assert row.step == 2**63 - 1


def test_what_retention_takes_and_what_is_lost_is_forgotten(index: Index) -> None:
    rows = [a_row(1, "p"), a_row(2, "p"), a_row(3, "p", segment=2), a_row(4, "p", segment=2)]
    index.commit(Change(records=rows))
    assert {segment: (facts.first, facts.last, facts.records) for segment, facts in index.facts().items()} == {
        1: (1, 2, 2),
        2: (3, 4, 2),
    }
    index.forget(1, Cursor(2))
    assert index.forget_behind(2, 64 * 4 + 63) == 1
    for prompts in (None, [PromptId("p")]):
        assert [row.cursor for row in index.select(["rewards"], prompts, Cursor(0), 9)] == [3]
    state = index.state()
    assert (state.newest, state.dropped_to, state.dropped_segment) == (4, 2, 1)


def test_an_index_of_a_newer_version_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "index"
    Index(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StorageError, match=r"newer version.*schema=99.*use that version") as caught:
        open_index(path)
    assert not isinstance(caught.value, CorruptIndexError)
    assert [file.name for file in tmp_path.iterdir()] == ["index"]


def test_an_index_of_an_older_version_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "index"
    Index(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 1")
    db.close()
    index, aside = open_index(path)
    assert aside is not None and aside.exists()
    index.commit(Change(records=[a_row(1)]))
    index.close()


def test_consumers_that_were_silent_for_longest_go_at_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "CONSUMERS_KEPT", 2)
    index = Index(tmp_path / "index")
    told = {(ALPHA, f"c{i}"): ConsumerCursor(cursor=Cursor(i), told_at_ns=i) for i in (3, 1, 4)}
    index.commit(Change(consumers=told))
    index.close()
    index = Index(tmp_path / "index")
    assert sorted(index.state().consumers) == [(ALPHA, "c3"), (ALPHA, "c4")]
    index.close()


@pytest.mark.parametrize("harm", ["no database", "torn pages", "cut"])
def test_a_damaged_index_is_moved_aside(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "index"
    index = Index(path)
    index.commit(Change(records=[a_row(i, f"p{i}") for i in range(1, 500)]))
    index.checkpoint()
    index.close()
    content = bytearray(path.read_bytes())
    if harm == "no database":
        content[:16] = b"some other file "
    elif harm == "torn pages":
        content[4096:] = bytes(len(content) - 4096)
    else:
        del content[len(content) // 2 :]
    path.write_bytes(content)
    for number in (1, 2):
        path.write_bytes(content)
        index, aside = open_index(path)
        assert aside == tmp_path / f"index.damaged-{number}" and aside.read_bytes() == content
        assert index.state().newest == 0
        index.close()


def test_a_long_reader_is_in_the_way_of_the_checkpoint_only(tmp_path: Path, index: Index) -> None:
    index.commit(Change(records=[a_row(1)]))
    other = sqlite3.connect(tmp_path / "index", isolation_level=None)
    other.execute("BEGIN")
    other.execute("SELECT * FROM records").fetchall()
    for cursor in range(2, 30):
        index.commit(Change(records=[a_row(cursor, *(f"{cursor}-{i}" for i in range(50)))]))
    assert not index.checkpoint()
    assert index.sizes()[1] > 0
    other.close()
    assert index.checkpoint()
    assert index.sizes()[1] == 0


def test_own_reads_never_keep_the_log_from_shrinking(index: Index) -> None:
    index._writer.execute("PRAGMA wal_autocheckpoint = 100")
    for cursor in range(1, 40):
        index.commit(Change(records=[a_row(cursor, *(f"{i}-{cursor}" for i in range(60)))]))
        index.select(["rewards"], None, Cursor(0), 1)
    # 100 pages of 4 KiB are moved into the database as they fill up.
    assert index.sizes()[1] < 1 << 20


def test_seen_numbers_close_up_and_stay_within_reach() -> None:
    known = saw(None, meta(1), reach=8)
    for seq in (3, 4):
        known = saw(known, meta(seq), reach=8)
    assert known == Incarnation(peer=b"one", epoch=0, mark=1, above=frozenset({3, 4}))
    assert saw(known, meta(2), reach=8) == Incarnation(peer=b"one", epoch=0, mark=4)
    # 2 was refused or never used: by 10 the hub had answered it.
    assert saw(known, meta(10), reach=8) == Incarnation(peer=b"one", epoch=0, mark=4, above=frozenset({10}))
    assert saw(known, meta(500), reach=8) == Incarnation(peer=b"one", epoch=0, mark=492, above=frozenset({500}))


def test_a_new_incarnation_starts_afresh_and_an_old_one_changes_nothing() -> None:
    first = saw(None, meta(5), reach=8)
    second = saw(first, meta(1, epoch=1, peer=b"two"), reach=8)
    assert second == Incarnation(peer=b"two", epoch=1, mark=1)
    assert saw(second, meta(6), reach=8) == second
