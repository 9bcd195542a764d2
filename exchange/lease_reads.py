"""Records that wait in a group's line and that memory has let go: they are read from the disk when their turn comes.

What was read is kept for the next hand-out, one piece at a time, which bounds what the hub holds beside its memory.
"""

from __future__ import annotations

from exchange.lease_group import Group, Missing
from exchange.matching import Matcher
from exchange.messages import Gather
from exchange.replays import Chunk, Reading
from exchange.store import MemoryStore, Record
from exchange.types import Cursor

__all__ = ["LeaseReads"]


class LeaseReads:
    """What is to be read for groups, what is on its way, and what has come."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._missing: dict[str, tuple[Group, Missing]] = {}
        self._reading: tuple[Group, Missing] | None = None
        self._loaded: dict[Cursor, Record] = {}

    def get(self, cursor: Cursor) -> Record | None:
        """A record that is in memory, or was read."""
        return self._store.get(cursor) or self._loaded.get(cursor)

    def want(self, group: Group) -> None:
        """Have read what a group could not hand out, unless that is on its way."""
        if group.missing is not None and not self.pending(group):
            self._missing[group.name] = group, group.missing

    def pending(self, group: Group) -> bool:
        """Whether something is or will be read for a group."""
        return group.name in self._missing or (self._reading is not None and self._reading[0] is group)

    def next_reading(self) -> Reading | None:
        """What is to be read now; None while something is."""
        if self._reading is not None or not self._missing:
            return None
        self._reading = _, missing = self._missing.pop(next(iter(self._missing)))
        gather = Gather(kinds=frozenset({missing.kind}), agents=frozenset({missing.agent}), after=Cursor(missing.cursor - 1))
        matcher = Matcher(learner=missing.agent, gather=gather, edges=None, newest={}, now=0.0)
        return Reading(matcher=matcher, to=self._store.newest)

    def loaded(self, chunk: Chunk | None) -> Group | None:
        """Take what was read, None for nothing; returns for whom, None when it was not for a lease.

        What is not there any more is lost to the group.
        """
        if self._reading is None:
            return None
        (group, missing), self._reading = self._reading, None
        if chunk is not None:
            self._loaded = {record.cursor: record for record in chunk.records}
            group.looked(missing, chunk.cursor, self._loaded)
        return group
