"""A worker's conversation with the hub: handshake, requests and their answers, heartbeat, and coming back.

Three tasks live as long as the session. The reader is the only one to read the link, the writer the only one to write it;
the heartbeat notices a silent hub. A hub that restarts answers Unknown; the session then says Hello again and sends once
more what was not answered (the hub knows duplicates by their sequence number). When the hub stays silent, every pending and
later request fails with HubLostError.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from exchange.errors import ClosedError, ConnectError, ExchangeError, HubLostError, WireError
from exchange.messages import (
    Bye,
    Cancel,
    Closing,
    Gather,
    Hello,
    Ping,
    Publish,
    Refused,
    Rows,
    ToHub,
    ToWorker,
    Unknown,
    Welcome,
)
from exchange.types import Version
from exchange.wire import Buffer, Encoded, Incoming, encode_message, worker_decoder

__all__ = ["Answer", "Link", "Session"]

_log = logging.getLogger(__name__)

LOST_HEARTBEATS = 3
# How long a leaving worker waits for a hub that says nothing.
DRAIN_SILENCE_S = 1.0

Answer = Incoming[ToWorker]


class Link(Protocol):
    """What carries frames between one worker and the hub."""

    async def send(self, frames: Sequence[Buffer]) -> None: ...

    async def receive(self) -> list[memoryview]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    message: ToHub
    frames: list[Buffer]
    answer: asyncio.Future[Answer]


class Session:
    """One incarnation of one worker. lost_after_s: silence after which the hub counts as lost."""

    def __init__(self, link: Link, hello: Hello, *, endpoint: str, lost_after_s: float) -> None:
        self._link = link
        self._hello = hello
        self._endpoint = endpoint
        self._lost_after_s = lost_after_s
        self._loop = asyncio.get_running_loop()
        self._decoder = worker_decoder()
        # Not bounded here: the credit window bounds records, the client gathers, and there is one ping and one Hello.
        self._outbox: asyncio.Queue[list[Buffer]] = asyncio.Queue()
        self._pending: dict[int, _Pending] = {}
        self._last_id = 0
        self._last_seq = hello.first_seq - 1
        self._opened: asyncio.Future[Welcome] = self._loop.create_future()
        self._joined = False
        self._heard_at = self._loop.time()
        self._failure: ExchangeError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ping = Ping()
        self.epoch = 0
        self.received_bytes = 0

    async def open(self, *, timeout_s: float) -> Welcome:
        """Say Hello and wait for the WELCOME. Raises ConnectError naming the endpoint."""
        self._start(self._read(), "reader")
        self._start(self._write(), "writer")
        self._say_hello()
        try:
            async with asyncio.timeout(timeout_s):
                welcome = await self._opened
        except TimeoutError:
            raise ConnectError(
                f"no WELCOME within {timeout_s:g} s, got endpoint={self._endpoint!r}: does a hub of this run listen there?"
            ) from None
        self._start(self._beat(welcome.heartbeat_s), "heartbeat")
        return welcome

    def publish(self, record: Encoded, *, durable: bool = False) -> asyncio.Future[Answer]:
        """Send one record under the next sequence number; as `request`."""
        answer = self.request(Publish(seq=self._last_seq + 1, body=record.body, durable=durable), record.frames)
        self._last_seq += 1
        return answer

    def request(self, message: ToHub, payload: Sequence[Buffer] = ()) -> asyncio.Future[Answer]:
        """Send one message; the future gets its answer, or HubLostError. Cancelling the future drops the answer, and the
        hub is told where it may still be waiting to give it."""
        self._check()
        request_id = self._last_id + 1
        frames = encode_message(message, request_id, payload)
        self._last_id = request_id
        answer: asyncio.Future[Answer] = self._loop.create_future()
        answer.add_done_callback(lambda _: self._settle(request_id))
        self._pending[request_id] = _Pending(message=message, frames=frames, answer=answer)
        if self._joined:
            self._outbox.put_nowait(frames)
        return answer

    def tell_progress(self, step: int, version: Version) -> None:
        """Send the worker's progress now; every later heartbeat repeats it."""
        self._check()
        self._ping = Ping(step=step, version=version)
        if self._joined:
            self._send_ping()

    async def close(self) -> None:
        """Say Bye, wait until the hub has handled it and all that went before, and end.

        A hub that says nothing for a second is left at once.
        """
        if self._joined and self._failure is None:
            bye, silent_since = self.request(Bye()), self._loop.time()
            while not bye.done() and self._loop.time() - silent_since < DRAIN_SILENCE_S:
                await asyncio.wait((bye,), timeout=DRAIN_SILENCE_S)
                silent_since = max(silent_since, self._heard_at)
            if not bye.done():
                _log.warning("%s left %s with %d messages unanswered", self._hello.name, self._endpoint, len(self._pending))
        self._fail(ClosedError(f"the client of {self._hello.name!r} is closed: use it inside its `async with` block"))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._link.close()

    def _start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=f"exchange {self._hello.name} {name}")
        task.add_done_callback(self._task_ended)
        self._tasks.append(task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)
            self._fail(HubLostError(f"{task.get_name()} failed at {self._endpoint!r}: {error!r}"))

    async def _write(self) -> None:
        while True:
            await self._link.send(await self._outbox.get())

    async def _read(self) -> None:
        while True:
            frames = await self._link.receive()
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
            elif self._outbox.empty():
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
            case Closing():
                self._outbox.put_nowait(encode_message(Bye()))
                self._fail(HubLostError(f"the hub at {self._endpoint!r} has ended"))
            case _:
                if isinstance(message, Rows):
                    self.received_bytes += sum(frame.nbytes for frame in incoming.payload)
                if pending is not None and not pending.answer.done():
                    pending.answer.set_result(incoming)

    def _say_hello(self) -> None:
        waiting = [item.message.seq for item in self._pending.values() if isinstance(item.message, Publish)]
        hello = msgspec.structs.replace(self._hello, first_seq=min(waiting, default=self._last_seq + 1))
        self._outbox.put_nowait(encode_message(hello))

    def _join(self, welcome: Welcome) -> None:
        if self._joined:
            return
        self._joined = True
        self.epoch = welcome.epoch
        self.received_bytes = 0
        self._hello = msgspec.structs.replace(self._hello, epoch=welcome.epoch)
        for pending in self._pending.values():
            self._outbox.put_nowait(pending.frames)
        self._send_ping()
        if not self._opened.done():
            self._opened.set_result(welcome)

    def _rejoin(self) -> None:
        """Start over with a hub that may have forgotten this worker; what has no answer is sent after its WELCOME."""
        _log.info("%s says hello again to the hub at %s", self._hello.name, self._endpoint)
        self._joined = False
        while not self._outbox.empty():
            self._outbox.get_nowait()
        self._say_hello()

    def _refuse(self, refusal: Refused) -> None:
        text = f"the hub at {self._endpoint!r} refused {self._hello.name!r} ({refusal.reason}): {refusal.detail}"
        self._fail(HubLostError(text) if self._opened.done() else ConnectError(text))

    def _send_ping(self) -> None:
        self._outbox.put_nowait(encode_message(msgspec.structs.replace(self._ping, received_bytes=self.received_bytes)))

    def _settle(self, request_id: int) -> None:
        pending = self._pending.pop(request_id)
        if not pending.answer.cancelled():
            pending.answer.exception()  # a failure nobody waits for any more is no news
        elif self._joined and isinstance(pending.message, Gather):
            self._outbox.put_nowait(encode_message(Cancel(request=request_id)))

    def _check(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    def _fail(self, error: ExchangeError) -> None:
        """End every pending and later request with `error`, unless the session has failed before."""
        if self._failure is not None:
            return
        self._failure = error
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # close() before open() leaves nobody to read it
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(error)
