"""A worker that answers its peers: runs a handler for each request that the hub delivers, once.

A request that comes again after a break is not run again: while it runs it is left to run, and what was answered is
answered the same way. Handlers run on the event loop that also sends signs of life, so work that computes for long belongs
into a thread (`asyncio.to_thread`); a worker without a sign of life is gone to its askers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Union

from exchange.credits import CreditWindow
from exchange.errors import ExchangeError, RecordTooLargeError, WireError
from exchange.message_base import sayable
from exchange.messages import Deliver, Fail, Reply, Revoke, Serve
from exchange.requests import PeerReply, PeerRequest, reply_type
from exchange.session import Answer, Session
from exchange.types import AgentName
from exchange.wire import Encoded, StructDecoder, encode_record, kind_of_tag

__all__ = ["Handlers", "Serving"]

_log = logging.getLogger(__name__)

# What was answered is kept for requests that come again: more than can be open at a hub, within some memory.
KEPT_ANSWERS = 1024
KEPT_BYTES = 64 << 20

Handlers = Mapping[type[PeerRequest[Any]], Callable[[Any], Awaitable[PeerReply]]]
_Key = tuple[AgentName, int]
_REASONS: dict[type[Exception], str] = {WireError: "malformed", RecordTooLargeError: "too_large"}


class Serving:
    """One worker's handlers, from `start` to `stop`; `Client.serve` makes it. concurrency: requests that run at once."""

    def __init__(self, session: Session, handlers: Handlers, *, concurrency: int, max_bytes: int, credit: CreditWindow) -> None:
        if not handlers or concurrency < 1:
            raise ValueError(f"serving needs handlers and a concurrency >= 1, got {len(handlers)} and {concurrency}")
        for request in handlers:
            reply_type(request)
        self._session = session
        self._handlers = handlers
        self._kinds = tuple(kind_of_tag(str(request.__struct_config__.tag)) for request in handlers)
        self._decoder: StructDecoder[PeerRequest[Any]] = StructDecoder(Union[tuple(handlers)])  # noqa: UP007  # made of values
        self._slots = asyncio.Semaphore(concurrency)
        self._max_bytes = max_bytes
        self._credit = credit
        self._running: dict[_Key, asyncio.Task[None]] = {}
        self._answers: OrderedDict[_Key, tuple[Reply | Fail, Encoded]] = OrderedDict()
        self._kept_bytes = 0

    async def start(self) -> Answer:
        """Tell the hub; its answer comes when requests can be delivered. Raises HubLostError."""
        return await self._session.serve(Serve(kinds=self._kinds))

    async def stop(self) -> None:
        """Take no more requests and cancel those that run; their askers are told that this worker is gone."""
        try:
            await self._session.serve(None)
        except ExchangeError:
            pass  # without a hub there is nobody to tell
        finally:
            tasks = [*self._running.values()]
            self._running.clear()
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def wait(self) -> None:
        """Serve until the hub is lost; then raises HubLostError. Cancellation is safe."""
        await self._session.lost()

    def take(self, incoming: Answer) -> None:
        """Handle what the hub sent: start a request, or end one. Does not wait."""
        message = incoming.message
        if isinstance(message, Revoke):
            task = self._running.pop((message.asker, message.id), None)
            if task is not None:
                task.cancel()
        elif isinstance(message, Deliver):
            key = (message.asker, message.id)
            if key in self._running:
                return
            work = self._answer_again(key) if key in self._answers else self._run(key, message, incoming.payload)
            task = asyncio.create_task(work, name=f"exchange request {message.id} of {message.asker}")
            self._running[key] = task
            task.add_done_callback(lambda task: self._ended(key, task))

    async def _run(self, key: _Key, message: Deliver, payload: tuple[memoryview, ...]) -> None:
        asker, request_id = key
        try:
            async with asyncio.timeout(message.deadline_s) as deadline, self._slots:
                request = self._decoder.decode(message.body, payload)
                reply = await self._handlers[type(request)](request)
                record = encode_record(reply)
                if record.nbytes > self._max_bytes:
                    raise RecordTooLargeError(f"an answer has at most {self._max_bytes} bytes here, got {record.nbytes}")
            answer: Reply | Fail = Reply(asker=asker, id=request_id, body=record.body, tokens=reply.tokens)
        except Exception as error:  # a handler may raise anything, and its asker is to know
            if deadline.expired():
                return  # the hub has told the asker
            _log.warning("request %d of %s failed", request_id, asker, exc_info=error)
            reason = _REASONS.get(type(error), "failed")
            detail = sayable(f"{type(error).__name__}: {error}")
            answer, record = Fail(asker=asker, id=request_id, reason=reason, detail=detail), Encoded(body=b"", frames=())
        self._keep(key, answer, record)
        await self._send(answer, record)

    def _keep(self, key: _Key, answer: Reply | Fail, record: Encoded) -> None:
        self._answers[key] = answer, record
        self._kept_bytes += record.nbytes
        while len(self._answers) > KEPT_ANSWERS or (self._kept_bytes > KEPT_BYTES and len(self._answers) > 1):
            _, (_, oldest) = self._answers.popitem(last=False)
            self._kept_bytes -= oldest.nbytes

    async def _answer_again(self, key: _Key) -> None:
        await self._send(*self._answers[key])

    async def _send(self, answer: Reply | Fail, record: Encoded) -> None:
        """Send an answer under the credit of published records, which comes back when the hub has it."""
        await self._credit.acquire(record.nbytes)
        try:
            settled = self._session.request(answer, record.frames)
        except ExchangeError as error:
            self._credit.release(record.nbytes)
            _log.info("an answer to %s was not sent: %s", answer.asker, error)
        else:
            settled.add_done_callback(lambda _: self._credit.release(record.nbytes))

    def _ended(self, key: _Key, task: asyncio.Task[None]) -> None:
        revoked = self._running.pop(key, None) is not task
        if task.cancelled() and not revoked:
            fail = Fail(asker=key[0], id=key[1], reason="failed", detail="the handler was cancelled")
            try:
                self._session.request(fail)
            except ExchangeError as error:
                _log.info("an answer to %s was not sent: %s", key[0], error)
        elif not task.cancelled() and (failure := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=failure)
