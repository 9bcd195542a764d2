"""A worker's conversation with the hub: handshake, requests and their answers, heartbeat, and coming back.

A link is read by one task and written by another; experience goes by a link of its own, the data lane, so that signs of
life and acknowledgements never wait behind it. The heartbeat notices a silent hub. A hub that restarts answers Unknown; the
session then says Hello again and sends once more what was not answered (the hub knows duplicates by their sequence number).
When the hub stays silent, every pending and later request fails with HubLostError.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from exchange.endpoints import silence_at
from exchange.errors import ClosedError, ConnectError, ExchangeError, HubLostError, WireError
from exchange.messages import (
    DATA_TO_HUB,
    Answered,
    Bye,
    Cancel,
    Closing,
    Deliver,
    Gather,
    Hello,
    Lease,
    Leased,
    Ping,
    Publish,
    Refused,
    Reply,
    Request,
    Revoke,
    Rows,
    Serve,
    ToHub,
    ToWorker,
    Unknown,
    Welcome,
)
from exchange.outbox import Outbox, Sender
from exchange.types import Version
from exchange.wire import Buffer, Encoded, Incoming, encode_message, messages_in, worker_decoder

__all__ = ["Answer", "Link", "OpenData", "Session"]

_log = logging.getLogger(__name__)

LOST_HEARTBEATS = 3
# A worker tells what it has received at every heartbeat, and when it is this part of its credit.
TELL_FRACTION = 4
# What a request that is sent again still gets when its time is over, so that the hub is the one to say so.
LEAST_DEADLINE_S = 0.001
# How long a leaving worker waits for a hub that says nothing.
DRAIN_SILENCE_S = 1.0

Answer = Incoming[ToWorker]


class Link(Sender, Protocol):
    """What carries frames between one worker and the hub."""

    async def receive(self) -> list[memoryview]:
        """Wait for one multipart; without frames when what was on its way may be lost."""
        ...

    def close(self) -> None: ...


OpenData = Callable[[Welcome], Link | None]


class _Pending(msgspec.Struct, frozen=True, kw_only=True):
    message: ToHub
    payload: Sequence[Buffer]
    sent_at: float
    answer: asyncio.Future[Answer]
    on_end: Callable[[], None] | None = None


class Session:
    """One incarnation of one worker. lost_after_s: silence after which the hub counts as lost.

    open_data: a link to the data lane of the hub that gave this WELCOME, None for one without.
    on_work: is handed what the hub delivers of peers' requests; on_welcome: every WELCOME. None of them may wait.
    """

    def __init__(
        self,
        link: Link,
        hello: Hello,
        *,
        endpoint: str,
        lost_after_s: float,
        open_data: OpenData = lambda welcome: None,
    ) -> None:
        self._link = link
        self._open_data = open_data
        self._hello = hello
        self._endpoint = endpoint
        self._lost_after_s = lost_after_s
        self._loop = asyncio.get_running_loop()
        self._decoder = worker_decoder()
        self._control = self._data = Outbox(link)
        self._data_port: int | None = None
        self._close_data: Callable[[], None] = lambda: None
        self._pending: dict[int, _Pending] = {}
        self._last_id = 0
        self._last_seq = hello.first_seq - 1
        self._opened: asyncio.Future[Welcome] = self._loop.create_future()
        self._joined = False
        self._heard_at = self._loop.time()
        self._failure: ExchangeError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ping = Ping()
        self._serve: Serve | None = None
        self._lost = asyncio.Event()
        self._told_bytes = self._received_bytes = 0
        self._tell_bytes = 0
        self.epoch = 0
        self.on_work: Callable[[Answer], None] = lambda work: None
        self.on_welcome: Callable[[Welcome], None] = lambda welcome: None

    async def open(self, *, timeout_s: float) -> Welcome:
        """Say Hello and wait for the WELCOME. Raises ConnectError naming the endpoint."""
        self._start(self._read(self._link), "reader")
        self._start(self._control.write(), "writer")
        self._say_hello()
        try:
            async with asyncio.timeout(timeout_s):
                welcome = await self._opened
        except TimeoutError:
            raise ConnectError(silence_at(self._endpoint, timeout_s)) from None
        self._start(self._beat(welcome.heartbeat_s), "heartbeat")
        return welcome

    def publish(self, record: Encoded, *, durable: bool, on_end: Callable[[], None]) -> asyncio.Future[Answer]:
        """Send one record under the next sequence number; as `request`.

        on_end: called when the hub has answered or is lost, also where nobody waits for that any more.
        """
        message = Publish(seq=self._last_seq + 1, body=record.body, durable=durable)
        answer = self._send(message, record.frames, on_end=on_end)
        self._last_seq += 1
        return answer

    def request(self, message: ToHub, payload: Sequence[Buffer] = ()) -> asyncio.Future[Answer]:
        """Send one message; the future gets its answer, or HubLostError. Cancelling the future drops the answer, and the
        hub is told where it may still be waiting to give it."""
        answer, request_id = self._send(message, payload), self._last_id
        answer.add_done_callback(lambda _: self._settle(request_id))
        return answer

    def _send(
        self, message: ToHub, payload: Sequence[Buffer], *, on_end: Callable[[], None] | None = None
    ) -> asyncio.Future[Answer]:
        self.check()
        request_id = self._last_id + 1
        frames = encode_message(self._counted(message), request_id, payload)
        self._last_id = request_id
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._pending[request_id] = _Pending(
            message=message, payload=payload, sent_at=self._loop.time(), answer=answer, on_end=on_end
        )
        if self._joined:
            self._lane_of(message).put(frames)
        return answer

    def serve(self, serve: Serve | None) -> asyncio.Future[Answer]:
        """Tell the hub what this worker answers, now and after every break; None for nothing. As `request`."""
        answer = self.request(serve or Serve(kinds=()))
        self._serve = serve
        return answer

    async def lost(self) -> None:
        """Wait until the session has failed, and raise why. Cancellation is safe, any number of tasks may wait."""
        await self._lost.wait()
        self.check()

    def tell_progress(self, step: int, version: Version) -> None:
        """Send the worker's progress now; every later heartbeat repeats it. Raises TypeError for numbers that are no int."""
        self.check()
        ping = Ping(step=step, version=version)
        # Now, and not at the next heartbeat, which must not fail.
        encode_message(ping)
        self._ping = ping
        if self._joined:
            self._send_ping()

    async def close(self) -> None:
        """Say Bye, wait until the hub has handled it and all that went before, and end.

        A hub that says nothing for a second is left at once.
        """
        if self._joined and self._failure is None:
            bye, silent_since = self.request(Bye()), self._loop.time()
            ends_at = silent_since + self._lost_after_s
            while not bye.done() and self._loop.time() < min(silent_since + DRAIN_SILENCE_S, ends_at):
                await asyncio.wait((bye,), timeout=DRAIN_SILENCE_S)
                silent_since = max(silent_since, self._heard_at)
            if not bye.done():
                _log.warning("%s left %s with %d messages unanswered", self._hello.name, self._endpoint, len(self._pending))
        self._fail(ClosedError(f"the client of {self._hello.name!r} is closed: use it inside its `async with` block"))
        if tasks := tuple(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        self._close_data()
        self._link.close()

    def _start(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=f"exchange {self._hello.name} {name}")
        task.add_done_callback(self._task_ended)
        self._tasks.add(task)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, ConnectError):
                self._fail(error)
                return
            _log.error("%s failed", task.get_name(), exc_info=error)
            self._fail(HubLostError(f"{task.get_name()} failed at {self._endpoint!r}: {error!r}"))

    async def _read(self, link: Link) -> None:
        while True:
            multipart = await link.receive()
            if not multipart:
                self._rejoin()
                continue
            for frames in messages_in(multipart):
                try:
                    incoming = self._decoder.decode(frames)
                except WireError as error:
                    _log.warning("bad message from the hub at %s: %s", self._endpoint, error)
                    continue
                self._heard_at = self._loop.time()
                self._take(incoming)

    async def _beat(self, heartbeat_s: float) -> None:
        while True:
            began = self._loop.time()
            await asyncio.sleep(heartbeat_s)
            now = self._loop.time()
            if now - began > 2 * heartbeat_s:
                # This loop was held up, not the hub: what came meanwhile has yet to be read.
                self._heard_at = now
            silent_s = now - self._heard_at
            if silent_s >= max(self._lost_after_s, LOST_HEARTBEATS * heartbeat_s):
                self._fail(HubLostError(f"no sign of life for {silent_s:.1f} s from the hub at {self._endpoint!r}"))
                return
            if self._joined and silent_s >= LOST_HEARTBEATS * heartbeat_s:
                self._rejoin()
            elif not self._control:
                self._send_ping() if self._joined else self._say_hello()

    def _take(self, incoming: Answer) -> None:
        message = incoming.message
        pending = self._pending.get(incoming.request_id)
        match message:
            case Welcome():
                self._join(message)
            case Refused() if not self._joined:
                self._refuse(message)
            case Unknown():
                if self._joined:
                    self._rejoin()
            case Deliver() | Revoke():
                self._count(incoming)
                self.on_work(incoming)
            case Closing():
                self._control.put(encode_message(Bye()))
                self._fail(HubLostError(f"the hub at {self._endpoint!r} has ended"))
            case _:
                self._count(incoming)
                if pending is not None:
                    self._end(incoming.request_id, pending)
                    if not pending.answer.done():
                        pending.answer.set_result(incoming)

    def _say_hello(self) -> None:
        waiting = [item.message.seq for item in self._pending.values() if isinstance(item.message, Publish)]
        hello = msgspec.structs.replace(self._hello, first_seq=min(waiting, default=self._last_seq + 1))
        self._control.put(encode_message(hello))

    def _join(self, welcome: Welcome) -> None:
        if self._joined:
            return
        self._joined = True
        self.epoch = welcome.epoch
        self._received_bytes = self._told_bytes = 0
        self._tell_bytes = welcome.credit_bytes // TELL_FRACTION
        self._hello = msgspec.structs.replace(self._hello, epoch=welcome.epoch)
        if welcome.data_port != self._data_port:
            self._renew_data(welcome)
        if self._serve is not None:
            self._control.put(encode_message(self._serve))
        for request_id, pending in self._pending.items():
            self._lane_of(pending.message).put(encode_message(self._renewed(pending), request_id, pending.payload))
        self._send_ping()
        self.on_welcome(welcome)
        if not self._opened.done():
            self._opened.set_result(welcome)

    def _rejoin(self) -> None:
        """Start over with a hub that may have forgotten this worker; what has no answer is sent after its WELCOME."""
        _log.info("%s says hello again to the hub at %s", self._hello.name, self._endpoint)
        self._joined = False
        self._control.clear()
        self._data.clear()
        self._say_hello()

    def _renew_data(self, welcome: Welcome) -> None:
        """Move to the data lane of a hub that has another than the last, if any."""
        self._close_data()
        self._data, self._data_port = self._control, welcome.data_port
        link = self._open_data(welcome)
        if link is None:
            self._close_data = lambda: None
            return
        self._data = Outbox(link)
        tasks = [self._start(self._read(link), "data reader"), self._start(self._data.write(), "data writer")]

        def close() -> None:
            for task in tasks:
                task.cancel()
            link.close()

        self._close_data = close

    def _lane_of(self, message: ToHub) -> Outbox:
        if isinstance(message, Bye):  # must not overtake what has no answer yet
            waiting = (each.message for each in self._pending.values())
            return self._data if any(isinstance(each, DATA_TO_HUB) for each in waiting) else self._control
        return self._data if isinstance(message, DATA_TO_HUB) else self._control

    def _refuse(self, refusal: Refused) -> None:
        text = f"the hub at {self._endpoint!r} refused {self._hello.name!r} ({refusal.reason}): {refusal.detail}"
        self._fail(HubLostError(text) if self._opened.done() else ConnectError(text))

    def _renewed(self, pending: _Pending) -> ToHub:
        """A message as it is sent after a break, with what is left of its deadline."""
        message = pending.message
        if isinstance(message, Request):
            left_s = message.deadline_s - (self._loop.time() - pending.sent_at)
            message = msgspec.structs.replace(message, deadline_s=max(left_s, LEAST_DEADLINE_S))
        return self._counted(message)

    def _counted(self, message: ToHub) -> ToHub:
        """The message with what this worker has received, where it tells that."""
        if not isinstance(message, Gather | Lease | Request | Reply | Ping):
            return message
        return msgspec.structs.replace(message, received_bytes=self._received_bytes)

    def _count(self, incoming: Answer) -> None:
        """Count a payload, and tell the hub before it takes this worker for one that does not read."""
        if isinstance(incoming.message, Rows | Leased | Answered | Deliver):
            self._received_bytes += sum(frame.nbytes for frame in incoming.payload)
            if self._received_bytes - self._told_bytes > self._tell_bytes:
                self._send_ping()

    def _send_ping(self) -> None:
        self._told_bytes = self._received_bytes
        self._control.put(encode_message(self._counted(self._ping)))

    def _end(self, request_id: int, pending: _Pending) -> None:
        if pending.on_end is not None:
            del self._pending[request_id]
            pending.on_end()

    def _settle(self, request_id: int) -> None:
        pending = self._pending.pop(request_id)
        if pending.answer.cancelled() and self._joined and isinstance(pending.message, Gather | Lease | Request):
            self._lane_of(pending.message).put(encode_message(Cancel(request=request_id)))

    def check(self) -> None:
        """Raise what the session failed with, if it has."""
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    def _fail(self, error: ExchangeError) -> None:
        """End every pending and later request with `error`, unless the session has failed before."""
        if self._failure is not None:
            return
        self._failure = error
        self._lost.set()
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # close() before open() leaves nobody to read it
        for request_id, pending in tuple(self._pending.items()):
            self._end(request_id, pending)
            if not pending.answer.done():
                pending.answer.set_exception(error)
                pending.answer.exception()  # a failure nobody waits for any more is no news
