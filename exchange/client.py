"""What an agent sees of the exchange: publish, gather, subscribe, request, serve, progress, stats."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Literal, Unpack, cast, overload

import msgspec
import numpy as np
import numpy.typing as npt

from exchange.answers import expect
from exchange.blob_client import BlobClient
from exchange.blob_ends import BlobData
from exchange.bulk_session import OpenBulk, without_bulk
from exchange.credits import CreditWindow
from exchange.errors import (
    ExchangeError,
    RecordTooLargeError,
    RefusedError,
    RequestFailedError,
    RequestTimeoutError,
)
from exchange.kinds import Kinds
from exchange.lease_messages import DeadLetter
from exchange.leasing import Batch, Calls, leasing
from exchange.messages import (
    MAX_OPEN_REQUESTS,
    Accepted,
    Answered,
    AskDeadLetters,
    AskStats,
    Commit,
    Committed,
    DeadLetters,
    Deliver,
    Fail,
    Gather,
    Lease,
    Refused,
    Request,
    Rows,
    Settled,
)
from exchange.reading import RowReader, RowsAnswer
from exchange.requests import PeerRequest, R, reply_type
from exchange.rows import Filters, Gathered, Receipt, Row, gather_message
from exchange.serving import Handlers, Serving
from exchange.session import LEAST_DEADLINE_S, Answer, Session
from exchange.stats import HubStats
from exchange.subscription import Subscription
from exchange.types import START, AgentName, BlobRef, Cursor, Experience, Kind, Version
from exchange.wire import StructDecoder, encode_record

__all__ = ["Client", "Row"]

# Together the hub's own limit, so that they queue here and are not refused there; apart, so that subscriptions to what
# never comes hold up no gather.
GATHERS_IN_FLIGHT = POLLS_IN_FLIGHT = 8
LEASES_IN_FLIGHT = 16
# How long a subscription waits at the hub before it asks again.
POLL_S = 10.0


class Client:
    """One worker's end of the exchange. Any number of tasks may call it at the same time."""

    def __init__(
        self,
        session: Session,
        *,
        name: AgentName,
        request_timeout_s: float,
        kinds: Kinds | None = None,
        open_bulk: OpenBulk = without_bulk,
    ) -> None:
        self.name = name
        self._session = session
        self._request_timeout_s = request_timeout_s
        self._kinds = Kinds() if kinds is None else kinds
        self._reader = RowReader(self._kinds, reader=name)
        self._blobs = BlobClient(session, open_bulk, lost_after_s=request_timeout_s)
        self._gathers = asyncio.Semaphore(GATHERS_IN_FLIGHT)
        self._polls = asyncio.Semaphore(POLLS_IN_FLIGHT)
        self._leases = asyncio.Semaphore(LEASES_IN_FLIGHT)
        self._max_record_bytes = 0
        self._credits = self._asking = CreditWindow(messages=0, nbytes=0)
        self._serving: Serving | None = None
        session.on_work = self._work

    async def open(self, *, timeout_s: float) -> None:
        """Join the run. Raises ConnectError."""
        welcome = await self._session.open(timeout_s=timeout_s)
        self._max_record_bytes = welcome.max_record_bytes
        self._credits = CreditWindow(messages=welcome.credit_messages, nbytes=welcome.credit_bytes)
        self._asking = CreditWindow(messages=MAX_OPEN_REQUESTS, nbytes=welcome.credit_bytes)

    @property
    def epoch(self) -> int:
        """How often this name has come back to the run; versions of published records carry it."""
        return self._session.epoch

    @property
    def quarantined(self) -> Mapping[str, int]:
        """How many records came that this client could not read, by tag."""
        return self._reader.quarantined

    async def publish(self, experience: Experience, *, ack: Literal["accepted", "durable"] = "accepted") -> Receipt:
        """Hand one record to the hub; waits for credit and for the hub to have it: in memory, or on disk.

        The arrays may be written to as soon as this is called. Raises ValueError for a type that was not registered or an
        array of another dtype than it declares, RefusedError with the hub's reason, RecordTooLargeError,
        RequestTimeoutError, HubLostError. Cancelled, the record may arrive or not.
        """
        self._kinds.check(experience)
        record = encode_record(experience)
        nbytes = record.nbytes
        self._check_size(nbytes)
        waits_for = "credit: its earlier records have no answer"
        try:
            async with asyncio.timeout(self._request_timeout_s):
                await self._credits.acquire(nbytes)

                def release() -> None:
                    """Credit comes back with the answer, and not with the caller's patience."""
                    self._credits.release(nbytes)

                try:
                    answer = self._session.publish(record, durable=ack == "durable", on_end=release)
                except BaseException:
                    release()
                    raise
                waits_for = "the hub's answer to a record"
                accepted = expect(Accepted, await answer)
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
        Records that cannot be read here are in `quarantined`, and not in `rows`.
        Raises ValueError for an unknown kind or a deadline_s above a day, RefusedError, RequestTimeoutError, HubLostError.
        Cancellation is safe.
        """
        request = gather_message(kinds, after, **filters)
        self._kinds.check_known(request.kinds)
        request = msgspec.structs.replace(request, min_count=min_count, deadline_s=deadline_s, max_bytes=max_bytes)
        return (await self._ask_rows(request, self._gathers)).read()

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

        after: START is the oldest that the hub still has, in memory or on its disk; `(await ex.stats()).cursor` is now.
        name: of a consumer of this worker whose cursor the hub keeps; without `after` it goes on behind its last `commit`.
        max_bytes: fetched at a time; two such answers are held. Up to 8 subscriptions of a client wait at once, more take
        turns. Raises ValueError for an unknown kind.
        """
        request = gather_message(kinds, after, **filters)
        self._kinds.check_known(request.kinds)
        request = msgspec.structs.replace(
            request, consumer=name, min_count=1, deadline_s=POLL_S, max_bytes=max_bytes, replay=True
        )
        return Subscription(request, ask=lambda gather: self._ask_rows(gather, self._polls), commit=self._commit)

    def lease(
        self,
        *,
        group: str,
        kinds: Collection[Kind],
        agents: Collection[str] | None = None,
        count: int = 1,
        lease_s: float = 30.0,
        deadline_s: float = 10.0,
    ) -> AbstractAsyncContextManager[Batch]:
        """Up to `count` records that no other worker of the group gets, as soon as there is one, none at the deadline.

            async with ex.lease(group="judges", kinds={"rollouts"}, count=4) as batch:
                for row in batch.rows:
                    ...
                    await batch.renew()

        Leaving the block says that they are done; an exception that they failed, to be handed out again, and given up after
        5 deliveries; cancellation gives them back. A lease ends lease_s after it was given or renewed, and with its worker;
        the block then ends with LeaseLostError. kinds, agents: of all records of the group, fixed by its first lease; what
        a worker published itself it gets only when `agents` names it. A row of a type that this client does not know goes
        to others. Raises ValueError, RefusedError, RequestTimeoutError, HubLostError. Cancellation is safe.
        """
        wanted = gather_message(kinds, agents=cast("Collection[AgentName] | None", agents))
        self._kinds.check_known(wanted.kinds)
        lease = Lease(
            id=0,
            group=group,
            kinds=wanted.kinds,
            agents=wanted.agents,
            count=count,
            lease_s=lease_s,
            deadline_s=deadline_s,
        )
        calls = Calls(
            send=self._session.request, within=self._leased, read=self._reader.read, tags=self._kinds.tags, slots=self._leases
        )
        return leasing(calls, lease)

    async def dead_letters(self, group: str) -> tuple[DeadLetter, ...]:
        """The latest 128 records that a group has given up, oldest first; they stay where they were, for a gather.

        Raises RefusedError ("unknown_group") when nobody has leased of it, RequestTimeoutError, HubLostError.
        """
        ask = AskDeadLetters(group=group)
        return expect(DeadLetters, await self._ask(ask, "dead letters", self._request_timeout_s)).letters

    async def request(self, message: PeerRequest[R], *, to: str, timeout_s: float) -> R:
        """Ask another worker and wait for its answer: `await ex.request(ScoreRequest(...), to="beta", timeout_s=30.0)`.

        Up to 16 of a client's requests are open at once, more wait here. Raises RequestFailedError when the peer's handler
        raised; RefusedError with reason "deadline", "gone" (the peer left, died or stopped serving), "not_serving" (also
        shortly after the hub restarted), "not_allowed" (by the run's topology), "busy", "too_large", "malformed" (not as
        the peer knows the type), "invalid" (timeout_s above an hour); RecordTooLargeError, HubLostError, WireError for an
        answer that is not of its type. RequestTimeoutError: the hub said nothing in time. Cancelled, the peer is told.
        """
        record = encode_record(message)
        self._check_size(record.nbytes)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(ends_at):
                await self._asking.acquire(record.nbytes)
        except TimeoutError:
            raise RefusedError("deadline", f"{MAX_OPEN_REQUESTS} earlier requests of {self.name!r} have no answer") from None
        request = Request(
            id=secrets.randbits(63),
            to=AgentName(to),
            deadline_s=max(ends_at - loop.time(), LEAST_DEADLINE_S),
            body=record.body,
            tokens=message.tokens,
        )
        try:
            answer = self._session.request(request, record.frames)
        except BaseException:
            self._asking.release(record.nbytes)
            raise
        answer.add_done_callback(lambda _: self._asking.release(record.nbytes))
        got = await self._within(answer, f"the answer of {to!r}", request.deadline_s + self._request_timeout_s)
        if isinstance(got.message, Refused) and got.message.reason == "failed":
            raise RequestFailedError(f"{to!r} could not answer: {got.message.detail}")
        body = expect(Answered, got).body
        decoder: StructDecoder[R] = StructDecoder(reply_type(type(message)))
        return decoder.decode(body, got.payload)

    @asynccontextmanager
    async def serve(self, handlers: Handlers, *, concurrency: int = 4) -> AsyncIterator[Serving]:
        """Answer peers' requests inside this block, each by the handler of its type.

            async with ex.serve({ScoreRequest: score}) as serving:
                await serving.wait()

        handlers: coroutine functions from the question to its answer; at most `concurrency` run at a time. A handler runs
        once for a request, is cancelled when nobody waits for it any more, and what it raises is told to the asker.
        Leaving the block cancels what runs; its askers are told. Raises ValueError for no handlers or when this client
        serves already, RefusedError ("too_many": 32 types), RequestTimeoutError, HubLostError.
        """
        if self._serving is not None:
            raise ValueError(f"{self.name!r} serves already: give one `serve` all handlers")
        serving = Serving(
            self._session, handlers, concurrency=concurrency, max_bytes=self._max_record_bytes, credit=self._credits
        )
        self._serving = serving
        try:
            answer = await self._within(serving.start(), "the hub's answer to serving", self._request_timeout_s)
            expect(Settled, answer)
            yield serving
        finally:
            self._serving = None
            await serving.stop()

    async def progress(self, *, step: int, version: Version) -> None:
        """Tell how far this worker is, now and with every heartbeat; moves its newest known version up. Does not wait for
        the hub. Raises HubLostError."""
        self._session.tell_progress(step, version)

    async def stats(self) -> HubStats:
        """What the hub has counted so far. Raises RequestTimeoutError, HubLostError."""
        return expect(HubStats, await self._ask(AskStats(), "statistics", self._request_timeout_s))

    async def send_blob(self, data: BlobData) -> BlobRef:
        """Hand the hub bytes of any size, contiguous memory or a file; the reference may stand in any experience.

        What the hub has already is not sent again. The data must not change before this returns: that is noticed, and
        refused. Raises ValueError for an array that is not contiguous; BlobError; RefusedError with reason "too_large" or
        "full" (the hub's `blob_bytes`), "storage"; StorageError for the file; RequestTimeoutError after
        request_timeout_s without progress; HubLostError. Cancelled, what has arrived is kept for whoever sends it next.
        """
        return await self._blobs.send(data)

    @overload
    async def fetch_blob(self, ref: BlobRef, path: None = None, *, wait_s: float = 0.0) -> npt.NDArray[np.uint8]: ...

    @overload
    async def fetch_blob(self, ref: BlobRef, path: Path, *, wait_s: float = 0.0) -> None: ...

    async def fetch_blob(self, ref: BlobRef, path: Path | None = None, *, wait_s: float = 0.0) -> npt.NDArray[np.uint8] | None:
        """The verified bytes of a blob: uint8 [nbytes], read-only and aligned to a page, or in a file at `path`, which
        appears, durable, when it is whole.

        wait_s: how long the hub may wait for somebody to send it. Raises RefusedError with reason "not_there"; BlobError
        when the bytes are not those of the name; StorageError for the file; RequestTimeoutError after request_timeout_s
        without progress; HubLostError. Cancelled, nothing is left.
        """
        return await self._blobs.fetch(ref, path, wait_s=wait_s)

    async def close(self) -> None:
        try:
            await self._session.close()
        finally:
            await self._blobs.close()

    async def _ask_rows(self, request: Gather, slots: asyncio.Semaphore) -> RowsAnswer:
        async with slots:
            answer = await self._ask(request, "rows", request.deadline_s + self._request_timeout_s)
        return RowsAnswer(rows=expect(Rows, answer), payload=answer.payload, reader=self._reader)

    async def _commit(self, consumer: str, cursor: Cursor) -> Cursor:
        commit = Commit(consumer=consumer, cursor=cursor)
        return expect(Committed, await self._ask(commit, "a consumer's cursor", self._request_timeout_s)).cursor

    async def _ask(self, request: Gather | Commit | AskDeadLetters | AskStats, what: str, timeout_s: float) -> Answer:
        return await self._within(self._session.request(request), f"the hub's answer with {what}", timeout_s)

    async def _within(self, answer: Awaitable[Answer], what: str, timeout_s: float) -> Answer:
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise self._timed_out(what) from None

    async def _leased(self, answer: Awaitable[Answer], deadline_s: float) -> Answer:
        return await self._within(answer, "the hub's answer about a lease", deadline_s + self._request_timeout_s)

    def _check_size(self, nbytes: int) -> None:
        if nbytes > self._max_record_bytes:
            raise RecordTooLargeError(
                f"this hub takes records of at most {self._max_record_bytes} bytes, got {nbytes}: publish smaller groups, "
                f"or raise the exchange's `memory_bytes` and `credit_bytes`"
            )

    def _work(self, incoming: Answer) -> None:
        """What a peer asks, or no longer wants; a request from before this process is answered by nobody here."""
        if self._serving is not None:
            self._serving.take(incoming)
        elif isinstance(incoming.message, Deliver):
            asker, request_id = incoming.message.asker, incoming.message.id
            detail = f"{self.name!r} has stopped serving"
            with suppress(ExchangeError):  # a session that ends has no answers to give
                self._session.request(Fail(asker=asker, id=request_id, reason="not_serving", detail=detail))

    def _timed_out(self, waits_for: str) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"{self.name!r} waited too long for {waits_for}, got request_timeout_s={self._request_timeout_s:g}"
        )
