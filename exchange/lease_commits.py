"""Answers about leases that wait until what they say is on disk: a count that was raised, a record that is done."""

from __future__ import annotations

from collections.abc import Sequence

from exchange.lease_rows import LeaseRows
from exchange.messages import refused
from exchange.wire import Outgoing

__all__ = ["LeaseCommits"]


class LeaseCommits:
    """What waits for the next group, and what is on its way with this one. Answers keep their order."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], bytes | None] = {}
        self._held: list[Outgoing] = []
        self._writing: dict[tuple[str, int], bytes | None] = {}
        self._told: list[Outgoing] = []
        self._failed: dict[tuple[str, int], bytes | None] = {}

    def __len__(self) -> int:
        """Changes that no group has taken yet."""
        return len(self._waiting)

    @property
    def rows(self) -> LeaseRows:
        """What the group that is on its way writes."""
        return self._writing

    def after(self, rows: LeaseRows, answers: list[Outgoing]) -> list[Outgoing]:
        """The answers, if they need not wait: for these rows, or for answers before them."""
        if not rows and not self._waiting and not self._writing:
            return answers
        if rows:
            self._waiting, self._failed = {**self._failed, **self._waiting, **rows}, {}
        self._held += answers
        return []

    def take(self) -> None:
        """A group is on its way; none before it is."""
        self._writing, self._waiting = self._waiting, {}
        self._told, self._held = self._held, []

    def done(self) -> list[Outgoing]:
        """The group is on disk."""
        answers, self._writing, self._told = self._told, {}, []
        if not self._waiting:
            answers, self._held = answers + self._held, []
        return answers

    def fail(self, reason: str) -> tuple[Sequence[Outgoing], list[Outgoing]]:
        """The group could not be written, and is written with the next change: the answers that waited for it, and what is
        said instead."""
        unsaid, self._failed, self._writing, self._told = self._told, self._writing, {}, []
        if not self._waiting:
            unsaid, self._held = unsaid + self._held, []
        refusal = refused("storage", reason)
        return unsaid, [Outgoing(peer=out.peer, message=refusal, request_id=out.request_id) for out in unsaid]
