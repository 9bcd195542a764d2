"""The store against a list: what is stored, selected and let go."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from exchange.store import MemoryStore, Record
from exchange.types import AgentName, Cursor, Kind, PromptId, Version
from exchange.wire import Encoded


def record(
    cursor: int, *, kind: Kind = "rewards", prompts: tuple[str, ...] = ("p",), nbytes: int = 100, at: float = 0
) -> Record:
    return Record(
        cursor=Cursor(cursor),
        kind=kind,
        agent=AgentName("alpha"),
        prompt_ids=tuple(map(PromptId, prompts)),
        step=cursor,
        version=Version(0, cursor),
        encoded=Encoded(body=bytes(nbytes), frames=()),
        stored_at=at,
    )


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["rewards", "prompts"]), st.sets(st.sampled_from("pqr"), min_size=1)), max_size=40),
    st.integers(0, 40),
    st.sets(st.sampled_from(["rewards", "prompts"]), min_size=1),
    st.none() | st.sets(st.sampled_from("pqrs")),
    st.integers(1, 20),
)
def test_selection_is_what_a_plain_search_finds(
    added: list[tuple[Kind, set[str]]], after: int, kinds: set[Kind], prompts: set[PromptId] | None, room: int
) -> None:
    records = [record(i + 1, kind=kind, prompts=tuple(sorted(ids))) for i, (kind, ids) in enumerate(added)]
    kept = records[-room:]
    store = MemoryStore(memory_bytes=sum(item.cost_bytes for item in kept), max_age_s=None)
    for item in records:
        store.append(item)
    while len(kept) > len(store):
        del kept[0]
    wanted = [
        item.cursor
        for item in kept
        if item.cursor > after and item.kind in kinds and (prompts is None or prompts & set(item.prompt_ids))
    ]
    assert [item.cursor for item in store.select(kinds, prompts, Cursor(after))] == wanted
    assert len(store) == len(kept)
    assert store.evicted == len(records) - len(kept)
    assert store.stored_bytes == sum(item.cost_bytes for item in kept)
    assert store.evicted_to == store.evicted


def test_one_record_about_several_prompts_comes_once() -> None:
    store = MemoryStore(memory_bytes=10**6, max_age_s=None)
    store.append(record(1, kind="prompts", prompts=("p", "q", "p")))
    assert [item.cursor for item in store.select(["prompts"], [PromptId("p"), PromptId("q")], Cursor(0))] == [1]


def test_room_is_counted_in_bytes_and_the_oldest_go_first() -> None:
    store = MemoryStore(memory_bytes=100_000, max_age_s=None)
    for cursor in range(1, 6):
        store.append(record(cursor, nbytes=10_000))
    store.append(record(6, nbytes=80_000))
    assert [item.cursor for item in store.select(["rewards"], None, Cursor(0))] == [5, 6]
    assert store.stored_bytes <= 100_000


def test_records_expire_by_the_clock_they_were_stored_on() -> None:
    store = MemoryStore(memory_bytes=10**6, max_age_s=60)
    for cursor, at in ((1, 0.0), (2, 50.0), (3, 100.0)):
        store.append(record(cursor, at=at))
    store.expire(110.0)
    assert [item.cursor for item in store.select(["rewards"], None, Cursor(0))] == [2, 3]
    assert (store.expired, store.evicted) == (1, 0)


@pytest.mark.parametrize("count", [20_000])
def test_what_was_dropped_leaves_nothing_in_the_index(count: int) -> None:
    store = MemoryStore(memory_bytes=100 * record(1).cost_bytes, max_age_s=None)
    for cursor in range(1, count + 1):
        store.append(record(cursor, prompts=(f"p{cursor}",)))
    lines = store._lines
    assert len(lines) == 101
    assert sum(len(line._cursors) for line in lines.values()) <= 400
