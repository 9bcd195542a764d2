"""A worker's end of a lease: the records that it holds, and its word on what became of them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from exchange.answers import expect
from exchange.errors import ExchangeError, LeaseLostError
from exchange.lease_messages import Outcome
from exchange.message_base import sayable
from exchange.messages import Lease, Leased, Release, Renew, RowHeader, Settled, ToHub
from exchange.rows import RawRow, Row
from exchange.session import Answer
from exchange.types import Cursor

__all__ = ["Batch", "Calls", "leasing"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What a lease needs of its client. send: as Session.request. within: waits for an answer at most so many seconds
    beside the time that a request takes. read: as RowReader.read. tags: of the types that this client knows.
    slots: for requests that wait at the hub; more than it takes wait here."""

    send: Callable[[ToHub], asyncio.Future[Answer]]
    within: Callable[[asyncio.Future[Answer], float], Awaitable[Answer]]
    read: Callable[[Sequence[RowHeader], Sequence[memoryview]], tuple[list[Row], tuple[RawRow, ...]]]
    tags: Collection[str]
    slots: asyncio.Semaphore


class Batch:
    """Records that this worker holds and no other of its group gets; `Client.lease` makes it.

    rows: none when the deadline came first. deliveries: of each row, how often it was handed out, this time included.
    Any number of tasks may say what became of different rows.
    """

    def __init__(self, calls: Calls, lease: Lease, rows: Sequence[Row], deliveries: Sequence[int]) -> None:
        self.rows = tuple(rows)
        self.deliveries = tuple(deliveries)
        self._calls = calls
        self._lease = lease
        self._held: dict[Cursor, None] = dict.fromkeys(row.cursor for row in rows)

    async def renew(self) -> None:
        """Begin the lease's time again, when work on it has gone on; waits for the calls. Nothing when no row is left.

        Raises LeaseLostError when the lease had ended: what is left of the batch is another worker's.
        """
        if self._held:
            await self._ask(Renew(lease=self._lease.id))

    async def done(self, *rows: Row) -> None:
        """These rows are done, before the others of the batch: they never come again. Waits for the calls.

        Raises LeaseLostError, RefusedError, RequestTimeoutError, HubLostError, ValueError for a row that is not held.
        """
        await self._release("done", rows)

    async def fail(self, *rows: Row, detail: str) -> None:
        """These rows failed: they come again, and are given up after 5 deliveries. As `done`."""
        await self._release("failed", rows, detail)

    async def give_back(self, *rows: Row) -> None:
        """These rows were not looked at: they come again, as if they had not been handed out. As `done`."""
        await self._release("returned", rows)

    @property
    def held(self) -> tuple[Row, ...]:
        """The rows of which nothing was said yet."""
        return tuple(row for row in self.rows if row.cursor in self._held)

    def give_back_now(self) -> None:
        """Give back what is left, without waiting for the calls."""
        _give_back(self._calls, self._lease, self._let_go(self.held))

    async def _release(self, outcome: Outcome, rows: Sequence[Row], detail: str = "") -> None:
        unknown = [row.cursor for row in rows if row.cursor not in self._held]
        if unknown:
            raise ValueError(f"only rows of this batch that are still held can be settled, got cursors={unknown}")
        if rows:
            await self._ask(_word(self._lease, outcome, self._let_go(rows), detail))

    def _let_go(self, rows: Sequence[Row]) -> tuple[Cursor, ...]:
        for row in rows:
            self._held.pop(row.cursor, None)
        return tuple(row.cursor for row in rows)

    async def _ask(self, message: Renew | Release) -> None:
        try:
            expect(Settled, await self._calls.within(self._calls.send(message), 0.0))
        except LeaseLostError:
            self._held.clear()
            raise


@asynccontextmanager
async def leasing(calls: Calls, lease: Lease) -> AsyncIterator[Batch]:
    """The batch that the hub leases; what is left of it at the end is done, or failed when the block raises.

    An exception that is no Exception (cancellation, the end of the process) gives back what is left.
    """
    batch = await _batch(calls, lease)
    try:
        yield batch
    except Exception as error:
        try:
            await batch.fail(*batch.held, detail=f"{type(error).__name__}: {error}")
        except ExchangeError as untold:
            _log.info("group %s was not told of a failure: %s", lease.group, untold)
        raise
    except BaseException:
        batch.give_back_now()
        raise
    await batch.done(*batch.held)


async def _batch(calls: Calls, lease: Lease) -> Batch:
    """Ask until there is something that this worker can read, or the deadline has come."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + lease.deadline_s
    while True:
        async with calls.slots:
            left_s = max(ends_at - loop.time(), 0.0)
            lease = msgspec.structs.replace(lease, id=secrets.randbits(63), deadline_s=left_s)
            answer = await _answer(calls, lease)
        leased = expect(Leased, answer)
        counts = {header.cursor: count for header, count in zip(leased.rows, leased.deliveries, strict=True)}
        held = dict.fromkeys(counts)
        try:
            rows, unread = calls.read(leased.rows, answer.payload)
            for row in unread:
                del held[row.cursor]
                await _give_up(calls, lease, row)
        except BaseException:
            _give_back(calls, lease, tuple(held))
            raise
        if rows or not leased.rows:
            return Batch(calls, lease, rows, [counts[row.cursor] for row in rows])


async def _give_up(calls: Calls, lease: Lease, row: RawRow) -> None:
    """A row that cannot be read here is for a worker that knows its type, or for none when it is not whole."""
    known = row.tag is None or row.tag in calls.tags
    word = _word(lease, "failed" if known else "unsupported", (row.cursor,), row.reason)
    expect(Settled, await calls.within(calls.send(word), 0.0))


async def _answer(calls: Calls, lease: Lease) -> Answer:
    asked = calls.send(lease)
    try:
        return await calls.within(asked, lease.deadline_s)
    except BaseException:
        # An answer that came in the same moment would hold its records until the lease expires.
        if asked.done() and not asked.cancelled() and asked.exception() is None:
            message = asked.result().message
            if isinstance(message, Leased) and message.rows:
                _give_back(calls, lease, tuple(row.cursor for row in message.rows))
        raise


def _give_back(calls: Calls, lease: Lease, cursors: tuple[Cursor, ...]) -> None:
    """Say without waiting that nobody has looked at these."""
    try:
        calls.send(_word(lease, "returned", cursors))
    except ExchangeError as error:
        _log.info("rows were not given back to group %s: %s", lease.group, error)


def _word(lease: Lease, outcome: Outcome, cursors: tuple[Cursor, ...], detail: str = "") -> Release:
    return Release(group=lease.group, lease=lease.id, cursors=cursors, outcome=outcome, detail=sayable(detail))
