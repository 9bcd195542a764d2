"""What a worker asks for and gets: filters, rows, receipts."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypedDict, Unpack, get_args

from exchange.messages import Gather
from exchange.types import START, AgentName, AnyExperience, Cursor, Kind, PromptId, Version

__all__ = ["Filters", "Gathered", "Receipt", "Row", "gather_message"]


class Filters(TypedDict, total=False):
    """Filters of a gather; one that is left out or None does not filter.

    agents: producers; without it all but the asker itself. steps: the producer's, inclusive. max_age_s: by the hub's
    clock. max_lag: in versions behind the producer's newest known one; rows of an earlier epoch never pass it.
    latest_only: of the rows that fit the others, only each producer's newest of a kind on a prompt.
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
    """The hub has the record. duplicate: it had it before. cursor: where, 0 if that is forgotten."""

    seq: int
    cursor: Cursor
    duplicate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One record. age_s: since the hub stored it, by its clock. lag: None when of an earlier epoch of its producer."""

    experience: AnyExperience
    cursor: Cursor
    age_s: float
    lag: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """rows: in cursor order. cursor: the next `after`; with it nothing is skipped and nothing comes twice.

    more: the answer was cut by its size, ask again. newest: newest version known of each producer. evicted_to: rows up to
    this cursor may be missing, as the hub let them go for room or age. gap_to: the same for the asked kinds and agents
    alone; 0 where nothing behind the given `after` can be missing.
    """

    rows: list[Row]
    cursor: Cursor
    more: bool
    newest: dict[AgentName, Version]
    evicted_to: Cursor
    gap_to: Cursor


def gather_message(kinds: Collection[Kind], after: Cursor = START, **filters: Unpack[Filters]) -> Gather:
    """The message that asks for these rows at once. Raises ValueError for an unknown kind, or none."""
    unknown = set(kinds) - set(get_args(Kind))
    if unknown or not kinds:
        raise ValueError(f"`kinds` must be some of {', '.join(get_args(Kind))}, got kinds={kinds!r}")
    prompt_ids, agents = filters.get("prompt_ids"), filters.get("agents")
    return Gather(
        kinds=tuple(kinds),
        prompt_ids=None if prompt_ids is None else tuple(prompt_ids),
        agents=None if agents is None else tuple(agents),
        after=after,
        min_step=filters.get("min_step"),
        max_step=filters.get("max_step"),
        max_age_s=filters.get("max_age_s"),
        max_lag=filters.get("max_lag"),
        latest_only=filters.get("latest_only", False),
    )
