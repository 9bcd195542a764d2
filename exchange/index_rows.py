"""What is known of stored records, of incarnations and consumers, and of segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from exchange.consumers import ConsumerKey
from exchange.lease_rows import LeaseRows
from exchange.members import Incarnation
from exchange.segments import Place
from exchange.types import AgentName, Cursor, Kind, PromptId, Version

__all__ = ["Change", "ConsumerCursor", "IndexState", "IndexedRecord", "RecordMeta", "SegmentFacts", "saw"]


class RecordMeta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="record/1"):
    """What is stored beside each record, so that an index can be made from segments alone.

    stored_at_ns: wall clock. peer, seq: the incarnation that published it, and its number there.
    """

    kind: Kind
    agent: AgentName
    step: int
    version: Version
    prompt_ids: tuple[PromptId, ...]
    stored_at_ns: int
    peer: bytes
    seq: int

    def at(self, cursor: Cursor, place: Place) -> IndexedRecord:
        """What the index keeps of it."""
        return IndexedRecord(
            cursor=cursor,
            kind=self.kind,
            agent=self.agent,
            step=self.step,
            version=self.version,
            stored_at_ns=self.stored_at_ns,
            prompt_ids=self.prompt_ids,
            place=place,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedRecord:
    """One record. stored_at_ns: wall clock."""

    cursor: Cursor
    kind: Kind
    agent: AgentName
    step: int
    version: Version
    stored_at_ns: int
    prompt_ids: tuple[PromptId, ...]
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerCursor:
    """Up to where a named consumer is done, and when it said so by the wall clock."""

    cursor: Cursor
    told_at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One group commit. incarnations: those that the records have changed, whole."""

    records: Sequence[IndexedRecord] = ()
    incarnations: Mapping[AgentName, Incarnation] = field(default_factory=dict)
    consumers: Mapping[ConsumerKey, ConsumerCursor] = field(default_factory=dict)
    leases: LeaseRows = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexState:
    """Everything but the records. newest: highest cursor ever committed. dropped_*: up to where retention has come."""

    newest: Cursor
    dropped_to: Cursor
    dropped_segment: int
    incarnations: dict[AgentName, Incarnation]
    consumers: dict[ConsumerKey, ConsumerCursor]
    leases: dict[tuple[str, int], bytes]


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """The indexed records of one segment. end: of the last one, in bytes from the start of the file."""

    first: Cursor
    last: Cursor
    records: int
    newest_at_ns: int
    end: int


def saw(known: Incarnation | None, meta: RecordMeta, *, reach: int) -> Incarnation:
    """An agent's incarnation after one more of its records.

    reach: how far a sequence number may be ahead of the lowest unanswered one; what lies further back was refused, or was
    never used, and counts as seen.
    """
    epoch = meta.version.epoch
    if known is None or epoch > known.epoch or (epoch == known.epoch and known.peer != meta.peer):
        known = Incarnation(peer=meta.peer, epoch=epoch, mark=0)
    elif epoch < known.epoch:
        return known
    if not known.above and meta.seq == known.mark + 1:
        return Incarnation(peer=known.peer, epoch=epoch, mark=meta.seq)
    above = {*known.above, meta.seq}
    mark = max(known.mark, max(above) - reach)
    while mark + 1 in above:
        mark += 1
    return Incarnation(peer=meta.peer, epoch=epoch, mark=mark, above=frozenset(seq for seq in above if seq > mark))
