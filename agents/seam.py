"""Where a run was taken up again: what its agents had made behind the checkpoint counts as never made."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from exchange.types import AgentName, Cursor


class Seam(msgspec.Struct, frozen=True, kw_only=True):
    """One resume. cursor: of the newest record that the exchange then had. steps: how many steps each agent then had made.

    An agent makes its later steps again, and publishes them again; what it had published of them before is abandoned.
    """

    cursor: Cursor
    steps: dict[AgentName, int]

    def abandons(self, cursor: Cursor, agent: AgentName, step: int) -> bool:
        """Whether the record at this cursor, of the agent's step (counted from 0), is of a step that was made again."""
        return cursor <= self.cursor and step >= self.steps.get(agent, 0)


def is_abandoned(seams: Iterable[Seam], cursor: Cursor, agent: AgentName, step: int) -> bool:
    """Whether any of a run's seams abandons the record."""
    return any(seam.abandons(cursor, agent, step) for seam in seams)
