"""Which records a gather gets: its filters, the edges of the topology, and the cut by bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from exchange.arrays import OWN_BYTES, padding
from exchange.config import Edges
from exchange.matching import Matcher, is_from
from exchange.members import Member, Members
from exchange.messages import Gather, RowHeader, Rows
from exchange.store import MemoryStore, Record
from exchange.types import START, AgentName, Cursor, Kind
from exchange.wire import MAX_BODY_BYTES, Buffer

__all__ = ["Selection", "Selector"]

JOINED_FRAME_BYTES = 1 << 20
# What a row takes in the header beside its body.
ROW_HEADER_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """records: in cursor order. cursor: the next `after`. matching: at least min_count, or all that match.

    withheld: how many matched up to `cursor` and may not cross.
    """

    records: tuple[Record, ...]
    cursor: Cursor
    more: bool
    matching: int
    withheld: int


class Selector:
    """Runs gathers over a store. edges: allowed (learner, teacher, kind); None allows all. Prompts may always cross."""

    def __init__(self, store: MemoryStore, members: Members, edges: Edges | None) -> None:
        self._store = store
        self._members = members
        self._edges = edges

    def run(self, learner: AgentName, gather: Gather, now: float) -> Selection:
        """The rows that `learner` gets now."""
        records: list[Record] = []
        payload_bytes = header_bytes = matching = withheld = 0
        cut = False
        matcher = self.matcher(learner, gather, now)
        for record in self._candidates(matcher):
            if not matcher.allowed(record.agent, record.kind):
                withheld += not cut
                continue
            matching += 1
            payload_bytes += record.encoded.nbytes
            header_bytes += len(record.encoded.body) + ROW_HEADER_BYTES
            over = payload_bytes > gather.max_bytes or header_bytes > MAX_BODY_BYTES
            cut = cut or (bool(records) and over)
            if not cut:
                records.append(record)
            elif matching >= gather.min_count:
                break
        cursor = records[-1].cursor if cut else max(self._store.newest, gather.after)
        return Selection(records=tuple(records), cursor=cursor, more=cut, matching=matching, withheld=withheld)

    def replayed(self, matcher: Matcher, chunk: Sequence[Record], cursor: Cursor, withheld: int) -> Selection:
        """Rows that were read from the disk, as far as they still fit."""
        records = (each for each in chunk if _matches(matcher, each) and matcher.allowed(each.agent, each.kind))
        fitting = tuple(_latest(records) if matcher.gather.latest_only else records)
        return Selection(records=fitting, cursor=cursor, more=True, matching=len(fitting), withheld=withheld)

    def matcher(self, learner: AgentName, gather: Gather, now: float) -> Matcher:
        """The gather's filters as they are now."""
        newest = {} if gather.max_lag is None else self._members.newest()
        return Matcher(learner=learner, gather=gather, edges=self._edges, newest=newest, now=now)

    def _candidates(self, matcher: Matcher) -> Iterable[Record]:
        """The records that pass every filter, in cursor order."""
        gather = matcher.gather
        selected = self._store.select(gather.kinds, gather.prompt_ids, gather.after)
        matching = (record for record in selected if _matches(matcher, record))
        return _latest(matching) if gather.latest_only else matching

    def fits(self, learner: AgentName, gather: Gather, record: Record, now: float) -> bool:
        """Whether `learner` would get this one record."""
        # Asked for every record and every gather that waits: what is cheap comes first.
        if record.kind not in gather.kinds or not is_from(gather, learner, record.agent) or record.cursor <= gather.after:
            return False
        if gather.prompt_ids is not None and gather.prompt_ids.isdisjoint(record.prompt_ids):
            return False
        matcher = self.matcher(learner, gather, now)
        return _matches(matcher, record) and matcher.allowed(record.agent, record.kind)

    def may(self, learner: AgentName, agent: AgentName, kind: Kind) -> bool:
        """Whether the topology lets this kind cross from `agent` to `learner`."""
        return self._edges is None or kind == "prompts" or agent == learner or (learner, agent, kind) in self._edges

    def start(self, learner: AgentName, gather: Gather) -> Cursor:
        """The cursor behind which a gather misses no row yet; one from the start takes what is there as all."""
        return gather.after or self.lost_to(learner, gather)

    def newest(self) -> Cursor:
        """The cursor of the newest record."""
        return self._store.newest

    @property
    def evicted_to(self) -> Cursor:
        """Up to where memory has let records go."""
        return self._store.evicted_to

    def gap_to(self, learner: AgentName, gather: Gather, seen_to: Cursor) -> Cursor:
        """Up to where rows behind `seen_to` may be missing from the answer to a gather, or 0."""
        lost_to = self.lost_to(learner, gather)
        return lost_to if lost_to > seen_to else START

    def lost_to(self, learner: AgentName, gather: Gather) -> Cursor:
        """Up to where memory may miss rows of the asked kinds and agents."""

        def wanted(agent: AgentName, kind: Kind) -> bool:
            return kind in gather.kinds and (agent != learner if gather.agents is None else agent in gather.agents)

        return self._store.lost_to(wanted)

    def answer(self, member: Member, selection: Selection, now: float, gap_to: Cursor) -> tuple[Rows, Sequence[Buffer]]:
        """The answer to a gather with its payload; counts what was delivered and withheld."""
        member.tally.withheld += selection.withheld
        rows, payload = self.deliver(member, selection.records, now)
        message = Rows(
            rows=rows,
            cursor=selection.cursor,
            more=selection.more,
            newest=self._members.newest(),
            evicted_to=self._store.evicted_to,
            gap_to=gap_to,
        )
        return message, payload

    def deliver(self, member: Member, records: Sequence[Record], now: float) -> tuple[tuple[RowHeader, ...], Sequence[Buffer]]:
        """Rows for a worker with their payload; counts them as delivered."""
        tally = member.tally
        for record in records:
            tally.delivered[record.agent][record.kind] += 1
            tally.delivered_bytes += record.encoded.nbytes
        lags = [self._members[record.agent].lag(record.version) for record in records]
        rows, payload = _pack(records, lags, now)
        member.sent_bytes += sum(map(len, payload))
        return rows, payload

    def nothing_yet(self, gather: Gather) -> Rows:
        """The answer when the worker has too much unread: ask again from the same place."""
        newest = self._members.newest()
        return Rows(rows=(), cursor=gather.after, more=True, newest=newest, evicted_to=self._store.evicted_to)


def _matches(matcher: Matcher, record: Record) -> bool:
    return matcher.matches(record.agent, record.step, record.version, record.stored_at)


def _latest(records: Iterable[Record]) -> list[Record]:
    """Each producer's newest of a kind on a prompt, in cursor order."""
    latest = {(record.agent, record.kind, record.prompt_ids): record for record in records}
    return sorted(latest.values(), key=lambda record: record.cursor)


def _pack(records: Sequence[Record], lags: Iterable[int | None], now: float) -> tuple[tuple[RowHeader, ...], Sequence[Buffer]]:
    """Rows with their payload frames: small frames joined up to about 1 MiB, as one frame each would cost more.

    A frame that pins little beside its own size goes as it is.
    """
    joined: list[Buffer] | None = None
    joined_bytes = 0
    groups: list[list[Buffer]] = []
    places: list[tuple[int, int, int]] = []
    for record in records:
        first = record.encoded.frames[0] if record.encoded.frames else b""
        nbytes = memoryview(first).nbytes
        if nbytes >= OWN_BYTES:
            places.append((len(groups), 0, nbytes))
            groups.append([first])
            joined = None
            continue
        if joined is None or joined_bytes + nbytes > JOINED_FRAME_BYTES:
            joined, joined_bytes = [], 0
            groups.append(joined)
        places.append((len(groups) - 1, joined_bytes, nbytes))
        gap = padding(nbytes)
        joined += [first, bytes(gap)]
        joined_bytes += nbytes + gap
    payload = [group[0] if len(group) <= 2 else b"".join(group) for group in groups]
    rows: list[RowHeader] = []
    for record, lag, (frame, offset, nbytes) in zip(records, lags, places, strict=True):
        large = record.encoded.frames[1:]
        rows.append(
            RowHeader(
                cursor=record.cursor,
                age_s=now - record.stored_at,
                lag=lag,
                body=record.encoded.body,
                frame=frame,
                offset=offset,
                nbytes=nbytes,
                first_large=len(payload),
                large=len(large),
            )
        )
        payload += large
    return tuple(rows), payload
