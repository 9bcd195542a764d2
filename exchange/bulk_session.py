"""A worker's conversation on the bulk lane: questions and their answers, over a link that is opened at the first one.

Questions may be asked again at any time, so that a broken link costs nothing but time: when the hub has welcomed the worker
anew, or the link stays silent, it is opened again and what has no answer is sent once more. Whether the hub is there at all
is known on the control lane: when that session fails, so does every question here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from exchange.blob_messages import BulkToHub, BulkToWorker
from exchange.errors import ExchangeError, HubLostError, RefusedError, RequestTimeoutError, WireError
from exchange.messages import Welcome
from exchange.session import Link, Session
from exchange.wire import Buffer, Incoming, MessageDecoder, encode_message

__all__ = ["BulkAnswer", "BulkSession", "OpenBulk", "without_bulk"]

_log = logging.getLogger(__name__)

# A link that is silent for this part of what a worker's patience allows is opened again.
SILENT_PART = 3

BulkAnswer = Incoming[BulkToWorker]
OpenBulk = Callable[[Welcome], Link]


def without_bulk(welcome: Welcome) -> Link:
    """Raises RefusedError: there is no bulk lane to open."""
    raise RefusedError("no_blobs", f"this hub has no bulk lane, got bulk_port={welcome.bulk_port}")


class BulkSession:
    """One worker's bulk lane. open_link: how to reach it. lost_after_s: silence after which a question has failed."""

    def __init__(self, session: Session, open_link: OpenBulk, *, lost_after_s: float) -> None:
        self._session = session
        self._open_link = open_link
        self._lost_after_s = lost_after_s
        self._decoder: MessageDecoder[BulkToWorker] = MessageDecoder(BulkToWorker)
        # Bounded by what the callers have on the way.
        self._outbox: asyncio.Queue[list[Buffer]] = asyncio.Queue()
        self._pending: dict[int, tuple[list[Buffer], asyncio.Future[BulkAnswer]]] = {}
        self._last_id = 0
        self._heard_at = 0.0
        self._reopened = False
        self._broken = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._welcome: Welcome | None = None
        session.on_welcome = self._welcomed

    def ask(self, message: BulkToHub, *payload: Buffer) -> asyncio.Future[BulkAnswer]:
        """Send a question; await the future with `answer`, or cancel it. Raises HubLostError."""
        self._session.check()
        if not self._tasks:
            self._start(self._keep_open(), "keeper")
            self._start(self._session.lost(), "end")
        self._last_id += 1
        request_id, future = self._last_id, asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._pending.pop(request_id, None))
        frames = encode_message(message, request_id, payload)
        self._pending[request_id] = frames, future
        self._outbox.put_nowait(frames)
        return future

    async def answer(self, future: asyncio.Future[BulkAnswer], *, patience_s: float = 0.0) -> BulkAnswer:
        """Wait for an answer for as long as anything comes over the lane, and patience_s before anything has to.

        Raises RequestTimeoutError after lost_after_s of silence, HubLostError. Cancelled, the question is dropped.
        """
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        try:
            while not future.done():
                quiet_since = max(asked_at + patience_s, self._heard_at)
                limit_s = self._lost_after_s if self._reopened else self._lost_after_s / SILENT_PART
                await asyncio.wait((future,), timeout=max(quiet_since + limit_s - loop.time(), 0.0))
                if future.done() or loop.time() < max(quiet_since, self._heard_at) + limit_s:
                    continue
                if self._reopened:
                    raise RequestTimeoutError(
                        f"nothing came over the bulk lane of the hub for {self._lost_after_s:g} s: is its disk stuck?"
                    )
                self._reopened = True
                self._broken.set()
            return future.result()
        finally:
            future.cancel()

    async def close(self) -> None:
        """Drop the link and every question."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _welcomed(self, welcome: Welcome) -> None:
        self._welcome = welcome
        self._broken.set()

    async def _keep_open(self) -> None:
        while True:
            self._broken.clear()
            while not self._outbox.empty():
                self._outbox.get_nowait()
            for frames, _ in self._pending.values():
                self._outbox.put_nowait(frames)
            assert self._welcome is not None  # nobody asks before the session is open
            link = self._open_link(self._welcome)
            tasks = [self._start(self._read(link), "reader"), self._start(self._write(link), "writer")]
            try:
                await self._broken.wait()
            finally:
                for task in tasks:
                    task.cancel()
                    self._tasks.remove(task)
                await asyncio.wait(tasks)
                link.close()
            _log.info("the bulk lane is opened anew with %d questions", len(self._pending))

    async def _write(self, link: Link) -> None:
        while True:
            await link.send(await self._outbox.get())

    async def _read(self, link: Link) -> None:
        while True:
            frames = await link.receive()
            try:
                incoming = self._decoder.decode(frames)
            except WireError as error:
                _log.warning("bad message from the hub on the bulk lane: %s", error)
                continue
            self._heard_at = asyncio.get_running_loop().time()
            self._reopened = False
            _, future = self._pending.get(incoming.request_id, (None, None))
            if future is not None and not future.done():
                future.set_result(incoming)

    def _start(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=f"exchange bulk {name}")
        task.add_done_callback(self._ended)
        self._tasks.append(task)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task has failed, or the control lane's session: so does every question."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, ExchangeError):
            _log.error("%s failed", task.get_name(), exc_info=error)
            error = HubLostError(f"{task.get_name()} failed: {error!r}")
        for _, future in tuple(self._pending.values()):
            if not future.done():
                future.set_exception(type(error)(*error.args))
                future.exception()  # a failure nobody waits for any more is no news
