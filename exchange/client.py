"""What an agent sees of the exchange: publish, gather, subscribe, progress, stats."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Literal, TypeVar, Unpack, cast

import msgspec

from exchange.credits import CreditWindow
from exchange.errors import RecordTooLargeError, RefusedError, RequestTimeoutError, WireError
from exchange.messages import Accepted, AskStats, Commit, Committed, Gather, Refused, RowHeader, Rows, ToWorker
from exchange.rows import Filters, Gathered, Receipt, Row, gather_message
from exchange.session import Answer, Session
from exchange.stats import HubStats
from exchange.subscription import Subscription
from exchange.types import START, AgentName, AnyExperience, Cursor, Kind, Version
from exchange.wire import RecordDecoder, encode_record

__all__ = ["Client", "Row"]

# Together the hub's own limit, so that they queue here and are not refused there; apart, so that subscriptions to what
# never comes hold up no gather.
GATHERS_IN_FLIGHT = POLLS_IN_FLIGHT = 8
# How long a subscription waits at the hub before it asks again.
POLL_S = 10.0

T = TypeVar("T", bound=ToWorker)


class Client:
    """One worker's end of the exchange. Any number of tasks may call it at the same time."""

    def __init__(self, session: Session, *, name: AgentName, request_timeout_s: float) -> None:
        self.name = name
        self._session = session
        self._request_timeout_s = request_timeout_s
        self._decoder = RecordDecoder()
        self._gathers = asyncio.Semaphore(GATHERS_IN_FLIGHT)
        self._polls = asyncio.Semaphore(POLLS_IN_FLIGHT)
        self._max_record_bytes = 0
        self._credits = CreditWindow(messages=0, nbytes=0)

    async def open(self, *, timeout_s: float) -> None:
        """Join the run. Raises ConnectError."""
        welcome = await self._session.open(timeout_s=timeout_s)
        self._max_record_bytes = welcome.max_record_bytes
        self._credits = CreditWindow(messages=welcome.credit_messages, nbytes=welcome.credit_bytes)

    @property
    def epoch(self) -> int:
        """How often this name has come back to the run; versions of published records carry it."""
        return self._session.epoch

    async def publish(self, experience: AnyExperience, *, ack: Literal["accepted", "durable"] = "accepted") -> Receipt:
        """Hand one record to the hub; waits for credit and for the hub to have it: in memory, or on disk.

        The arrays may be written to as soon as this is called. Raises RefusedError with the hub's reason,
        RecordTooLargeError, RequestTimeoutError, HubLostError. Cancelled, the record may arrive or not.
        """
        record = encode_record(experience)
        nbytes = record.nbytes
        if nbytes > self._max_record_bytes:
            raise RecordTooLargeError(
                f"this hub takes records of at most {self._max_record_bytes} bytes, got {nbytes}: publish smaller groups, "
                f"or raise the exchange's `memory_bytes` and `credit_bytes`"
            )
        waits_for = "credit: its earlier records have no answer"
        try:
            async with asyncio.timeout(self._request_timeout_s):
                await self._credits.acquire(nbytes)
                try:
                    answer = self._session.publish(record, durable=ack == "durable")
                except BaseException:
                    self._credits.release(nbytes)
                    raise
                answer.add_done_callback(lambda _: self._credits.release(nbytes))
                waits_for = "the hub's answer to a record"
                # Shielded, as credit comes back with the answer and not with the caller's patience.
                accepted = _expect(Accepted, await asyncio.shield(answer))
        except TimeoutError:
            raise self._timed_out(waits_for) from None
        return Receipt(seq=accepted.seq, cursor=accepted.cursor, duplicate=accepted.duplicate)

    async def gather(
        self,
        *,
        kinds: Collection[Kind],
        after: Cursor = START,
        min_count: int = 0,
        deadline_s: float = 0.0,
        max_bytes: int = 8 << 20,
        **filters: Unpack[Filters],
    ) -> Gathered:
        """Rows behind `after` that fit the filters, as soon as min_count are there, or at the deadline with fewer.

        max_bytes: size of the answer; it has at least one row. After an answer with `more`, ask again with min_count 0.
        Raises ValueError for an unknown kind, RefusedError, RequestTimeoutError, HubLostError. Cancellation is safe.
        """
        request = gather_message(kinds, after, **filters)
        return await self._pull(
            msgspec.structs.replace(request, min_count=min_count, deadline_s=deadline_s, max_bytes=max_bytes), self._gathers
        )

    def subscribe(
        self,
        *,
        kinds: Collection[Kind],
        after: Cursor = START,
        name: str | None = None,
        max_bytes: int = 8 << 20,
        **filters: Unpack[Filters],
    ) -> Subscription:
        """Every row behind `after` that fits the filters, those that are there and then those that come.

            async for row in ex.subscribe(kinds={"successes"}, agents={"beta"}):
                ...

        after: START is the oldest that the hub still has; `(await ex.stats()).cursor` is now. name: of a consumer of this
        worker whose cursor the hub keeps; without `after` it goes on behind its last `commit`. max_bytes: fetched at a
        time. Up to 8 subscriptions of a client wait at once, more take turns. Raises ValueError for an unknown kind.
        """
        request = gather_message(kinds, after, **filters)
        request = msgspec.structs.replace(request, consumer=name, min_count=1, deadline_s=POLL_S, max_bytes=max_bytes)
        return Subscription(request, pull=lambda gather: self._pull(gather, self._polls), commit=self._commit)

    async def progress(self, *, step: int, version: Version) -> None:
        """Tell how far this worker is, now and with every heartbeat; raises its newest known version. Does not wait."""
        self._session.tell_progress(step, version)

    async def stats(self) -> HubStats:
        """What the hub has counted so far."""
        return _expect(HubStats, await self._ask(AskStats(), "statistics", self._request_timeout_s))

    async def close(self) -> None:
        await self._session.close()

    async def _pull(self, request: Gather, slots: asyncio.Semaphore) -> Gathered:
        async with slots:
            request = msgspec.structs.replace(request, received_bytes=self._session.received_bytes)
            answer = await self._ask(request, "rows", request.deadline_s + self._request_timeout_s)
        rows = _expect(Rows, answer)
        return Gathered(
            rows=[self._decode(row, answer.payload) for row in rows.rows],
            cursor=rows.cursor,
            more=rows.more,
            newest=rows.newest,
            evicted_to=rows.evicted_to,
            gap_to=rows.gap_to,
        )

    async def _commit(self, consumer: str, cursor: Cursor) -> Cursor:
        commit = Commit(consumer=consumer, cursor=cursor)
        return _expect(Committed, await self._ask(commit, "a consumer's cursor", self._request_timeout_s)).cursor

    async def _ask(self, request: Gather | Commit | AskStats, what: str, timeout_s: float) -> Answer:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._session.request(request)
        except TimeoutError:
            raise self._timed_out(f"the hub's answer with {what}") from None

    def _timed_out(self, waits_for: str) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"{self.name!r} waited too long for {waits_for}, got request_timeout_s={self._request_timeout_s:g}"
        )

    def _decode(self, row: RowHeader, payload: Sequence[memoryview]) -> Row:
        if row.frame < 0 or row.frame >= len(payload) or row.first_large + row.large > len(payload):
            raise WireError(f"row outside its message, got frame={row.frame} of {len(payload)}")
        packed = payload[row.frame][row.offset : row.offset + row.nbytes]
        frames = (packed, *payload[row.first_large : row.first_large + row.large])
        experience = self._decoder.decode(row.body, frames)
        return Row(experience=experience, cursor=row.cursor, age_s=row.age_s, lag=row.lag)


def _expect(kind: type[T], answer: Answer) -> T:
    if isinstance(answer.message, Refused):
        raise RefusedError(answer.message.reason, answer.message.detail)
    if not isinstance(answer.message, kind):
        raise WireError(f"the hub answered with {type(answer.message).__name__} where {kind.__name__} was expected")
    return cast(T, answer.message)
