"""What a worker has to send: in order, together where it waits, and at once where it is much."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from exchange.wire import JOINED_BYTES, Buffer, grouped, join, joined

__all__ = ["Outbox", "Sender"]


class Sender(Protocol):
    """What takes frames for the hub."""

    async def send(self, frames: Sequence[Buffer]) -> None:
        """Wait until the transport takes one multipart."""
        ...

    def send_now(self, frames: Sequence[Buffer]) -> bool:
        """Hand over one multipart without waiting; False when the transport does not take it now."""
        ...


class Outbox:
    """The queue before one sender. Not bounded here: the credit window bounds records, the client what it asks."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._waiting: list[Sequence[Buffer]] = []
        self._nbytes = 0
        self._filled = asyncio.Event()
        self._blocked = False

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return self._blocked or bool(self._waiting)

    def put(self, frames: list[Buffer]) -> None:
        """Queue one message. A multipart that is full goes without the writer's turn: a worker that encodes many records in one
        go would else keep the hub idle meanwhile."""
        self._waiting.append(frames)
        self._nbytes += sum(map(len, frames))
        if self._nbytes >= JOINED_BYTES and not self._blocked:
            self._send_now()
        if self._waiting:
            self._filled.set()

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting, self._nbytes = [], 0

    async def write(self) -> None:
        """Send what is put, for ever; one task runs it."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._waiting:
                for multipart in joined(self._take()):
                    self._blocked = True
                    await self._sender.send(multipart)
                    self._blocked = False

    def _send_now(self) -> None:
        messages, sent = self._take(), 0
        for together in grouped(messages):
            if not self._sender.send_now(join(together)):
                self._waiting = messages[sent:]
                return
            sent += len(together)

    def _take(self) -> list[Sequence[Buffer]]:
        waiting = self._waiting
        self.clear()
        return waiting
