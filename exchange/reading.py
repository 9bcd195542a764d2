"""Rows as they cross become experience. One that cannot is set aside, and harms no other."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from exchange.arrays import own_small
from exchange.errors import WireError
from exchange.kinds import Kinds
from exchange.messages import RowHeader, Rows
from exchange.rows import Gathered, RawRow, Row
from exchange.types import AgentName
from exchange.wire import tag_of

__all__ = ["RowReader"]

_log = logging.getLogger(__name__)

# Tags that are counted apart, as peers choose them.
MAX_TAGS = 64
OTHER_TAGS = "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsAnswer:
    """One answer to a gather as it came."""

    rows: Rows
    payload: Sequence[memoryview]
    reader: RowReader

    def read(self) -> Gathered:
        """Its rows. Raises WireError when the answer itself is not whole."""
        read, quarantined = self.reader.read(self.rows.rows, self.payload)
        return Gathered(
            rows=read,
            cursor=self.rows.cursor,
            more=self.rows.more,
            newest=self.rows.newest,
            evicted_to=self.rows.evicted_to,
            gap_to=self.rows.gap_to,
            quarantined=quarantined,
        )


class RowReader:
    """Reads rows for one client. quarantined: how many could not be read, by tag ("" for none)."""

    def __init__(self, kinds: Kinds, *, reader: AgentName) -> None:
        self._kinds = kinds
        self._reader = reader
        self.quarantined: Counter[str] = Counter()

    def read(self, headers: Iterable[RowHeader], payload: Sequence[memoryview]) -> tuple[list[Row], tuple[RawRow, ...]]:
        """The rows of one answer, and those of a kind that is unknown here or that are not whole.

        Raises WireError when the answer itself is not whole.
        """
        rows: list[Row] = []
        raw: list[RawRow] = []
        for header in headers:
            frames = _frames(header, payload)
            try:
                experience = self._kinds.decode(header.body, frames)
            except WireError as error:
                raw.append(self._set_aside(header, frames, error))
            else:
                rows.append(Row(experience=experience, cursor=header.cursor, age_s=header.age_s, lag=header.lag))
        return rows, tuple(raw)

    def _set_aside(self, header: RowHeader, frames: Sequence[memoryview], error: WireError) -> RawRow:
        tag = tag_of(header.body)
        reason = str(error)
        if tag is not None and tag not in self._kinds.tags:
            known = ", ".join(sorted(self._kinds.tags))
            reason = f"this client knows {known}, got type={tag!r}: connect(types=[...]) with its type, or a newer version"
        counted = tag or ""
        if counted not in self.quarantined and len(self.quarantined) >= MAX_TAGS:
            counted = OTHER_TAGS
        if counted not in self.quarantined:
            _log.warning("%s leaves records of type %r out: %s", self._reader, counted, reason)
        self.quarantined[counted] += 1
        return RawRow(cursor=header.cursor, tag=tag, reason=reason, body=header.body, frames=tuple(map(own_small, frames)))


def _frames(header: RowHeader, payload: Sequence[memoryview]) -> Sequence[memoryview]:
    """The frames of one row."""
    if not 0 <= header.frame < len(payload) or header.first_large + header.large > len(payload):
        raise WireError(f"row outside its message, got frame={header.frame} of {len(payload)}")
    packed = payload[header.frame][header.offset : header.offset + header.nbytes]
    return (packed, *payload[header.first_large : header.first_large + header.large])
