"""What a worker asks for and gets: filters, rows, receipts."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypedDict, TypeVar, Unpack

from exchange.messages import Gather
from exchange.types import START, AgentName, Cursor, Experience, Kind, PromptId, Version
from exchange.wire import Buffer

__all__ = ["Filters", "Gathered", "RawRow", "Receipt", "Row", "gather_message"]

T = TypeVar("T")


class Filters(TypedDict, total=False):
    """Filters of a gather; one that is left out or None does not filter.

    agents: producers; without it all but the asker itself. *_step: the producer's, inclusive. max_age_s: seconds since the
    hub stored it, by its clock. max_lag: in versions behind the producer's newest known one; rows of an earlier epoch never
    pass it. latest_only: of the rows that fit the others, only each producer's newest of a kind on a prompt.
    """

    prompt_ids: Iterable[PromptId] | None
    agents: Iterable[AgentName] | None
    min_step: int | None
    max_step: int | None
    max_age_s: float | None
    max_lag: int | None
    latest_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The hub has the record. seq: its number among those of this incarnation, from 1 (or first_seq). duplicate: the hub
    had it before. cursor: where, 0 if that is forgotten."""

    seq: int
    cursor: Cursor
    duplicate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One record. age_s: seconds since the hub stored it, by its clock, when it was sent. lag: in versions behind the
    producer's newest, None when of an earlier epoch of it."""

    experience: Experience
    cursor: Cursor
    age_s: float
    lag: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRow:
    """One record that this client could not read, as it was published. tag: None when it has none; reason: for people.

    body: msgpack; frames: what its array references point into.
    """

    cursor: Cursor
    tag: str | None
    reason: str
    body: bytes
    frames: tuple[Buffer, ...]

    @property
    def nbytes(self) -> int:
        return len(self.body) + sum(memoryview(frame).nbytes for frame in self.frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """rows: in cursor order. cursor: the next `after`; with it nothing is skipped and nothing comes twice.

    more: the answer was cut by its size, ask again. newest: newest version known of each producer. evicted_to: rows up to
    this cursor may be missing, as the hub let them go for room or age. gap_to: the same for the asked kinds and agents
    alone; 0 where nothing behind the given `after` can be missing. quarantined: records that fit and could not be read here,
    of an unknown type or not whole; they count as rows for `min_count`, `max_bytes` and `cursor`.
    """

    rows: list[Row]
    cursor: Cursor
    more: bool
    newest: dict[AgentName, Version]
    evicted_to: Cursor
    gap_to: Cursor
    quarantined: tuple[RawRow, ...] = ()


def gather_message(kinds: Collection[Kind], after: Cursor = START, **filters: Unpack[Filters]) -> Gather:
    """The message that asks for these rows at once. Raises TypeError for an unknown filter, ValueError for a bare string."""
    unknown = filters.keys() - Filters.__annotations__.keys()
    if unknown:
        raise TypeError(f"a filter is one of {', '.join(Filters.__annotations__)}, got {', '.join(sorted(unknown))}")
    return Gather(
        kinds=_several("kinds", kinds) or frozenset(),
        prompt_ids=_several("prompt_ids", filters.get("prompt_ids")),
        agents=_several("agents", filters.get("agents")),
        after=after,
        min_step=filters.get("min_step"),
        max_step=filters.get("max_step"),
        max_age_s=filters.get("max_age_s"),
        max_lag=filters.get("max_lag"),
        latest_only=filters.get("latest_only", False),
    )


def _several(name: str, given: Iterable[T] | None) -> frozenset[T] | None:
    if isinstance(given, str):
        raise ValueError(f"`{name}` must be a collection of them, got {name}={given!r}: {name}={{{given!r}}}")
    return None if given is None else frozenset(given)
