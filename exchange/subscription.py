"""Rows as they come: replay, then live tail, by one gather after the other.

A subscription asks for the next rows as soon as many have come, so that they are on their way while these are used. A slow
reader holds two answers here and nothing at the hub.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

import msgspec

from exchange.errors import GapError
from exchange.messages import Gather
from exchange.reading import RowsAnswer
from exchange.rows import RawRow, Row
from exchange.types import Cursor

__all__ = ["Subscription"]

# Of what cannot be read a few are enough to see why.
QUARANTINED_ROWS = 64
QUARANTINED_BYTES = 16 << 20
# Less is used up so soon that to ask later, and then for more at once, is cheaper.
AHEAD_BYTES = 128 << 10


class Subscription:
    """An endless async iterator over rows, for one task at a time; `Client.subscribe` makes it.

    cursor: nothing up to here is still to come, so `subscribe(after=cursor)` goes on where this one stands. quarantined: the
    last records that fitted and could not be read here; they are left out.
    """

    def __init__(
        self,
        gather: Gather,
        *,
        ask: Callable[[Gather], Coroutine[Any, Any, RowsAnswer]],
        commit: Callable[[str, Cursor], Awaitable[Cursor]],
    ) -> None:
        self._ahead: asyncio.Task[RowsAnswer] | None = None
        self._gather = gather
        self._ask = ask
        self._commit = commit
        self._rows: deque[Row] = deque()
        self.quarantined: deque[RawRow] = deque(maxlen=QUARANTINED_ROWS)
        self._behind = self.cursor = gather.after

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Row:
        """The next row; waits for it as long as it takes. Cancelled, it loses nothing.

        Raises GapError when rows that would have come may be gone; the next call goes on behind them. RefusedError with
        reason "storage" when the disk cannot be read; otherwise as Client.gather.
        """
        while not self._rows:
            await self._refill()
        row = self._rows.popleft()
        self.cursor = row.cursor if self._rows else self._behind
        return row

    async def commit(self) -> Cursor:
        """Tell the hub that this named consumer is done with every row that it was handed; returns where it stands.

        Waits for the hub's disk where it has one. The next subscription under the same name begins there. Cancelled, it may
        stand there or not. Raises ValueError without a name; RefusedError with reason "too_many" (64 names of a worker) or
        "storage"; RequestTimeoutError, HubLostError.
        """
        if self._gather.consumer is None:
            raise ValueError("only a named consumer has a cursor at the hub, got name=None: subscribe(name=...)")
        return await self._commit(self._gather.consumer, self.cursor)

    async def _refill(self) -> None:
        after = self._behind
        ahead, self._ahead = self._ahead, None
        answer = await (self._ask(msgspec.structs.replace(self._gather, after=after)) if ahead is None else ahead)
        if sum(map(len, answer.payload)) >= AHEAD_BYTES:
            self._ahead = self._ask_ahead(answer.rows.cursor)
        got = answer.read()
        self._rows.extend(got.rows)
        self._set_aside(got.quarantined)
        self._behind = got.cursor
        if not got.rows:
            self.cursor = got.cursor
        if got.gap_to:
            raise GapError(after, got.gap_to)

    def _ask_ahead(self, after: Cursor) -> asyncio.Task[RowsAnswer]:
        asked = asyncio.create_task(self._ask(msgspec.structs.replace(self._gather, after=after)))
        asked.add_done_callback(lambda asked: asked.cancelled() or asked.exception())  # it may be that nobody comes for it
        return asked

    def __del__(self) -> None:
        # Left before its end: what it asked for is no longer wanted.
        if self._ahead is not None and not self._ahead.get_loop().is_closed():
            self._ahead.cancel()

    def _set_aside(self, rows: Iterable[RawRow]) -> None:
        self.quarantined.extend(rows)
        while len(self.quarantined) > 1 and sum(row.nbytes for row in self.quarantined) > QUARANTINED_BYTES:
            self.quarantined.popleft()
