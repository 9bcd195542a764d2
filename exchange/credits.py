"""Credits: how much a publisher may have sent and not yet been answered, in messages and in bytes."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["CreditWindow"]


class CreditWindow:
    """A window of both kinds of credit, first come first served. One record may take at most all bytes."""

    def __init__(self, *, messages: int, nbytes: int) -> None:
        self._messages = messages
        self._bytes = nbytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, nbytes: int) -> None:
        """Wait for credit for one message of `nbytes`. Cancellation takes none. Any number of tasks may wait."""
        if not self._waiting and self._take(nbytes):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(nbytes)
            raise

    def release(self, nbytes: int) -> None:
        """Give back the credit of one message."""
        self._messages += 1
        self._bytes += nbytes
        while self._waiting:
            wanted, future = self._waiting[0]
            if future.done():
                self._waiting.popleft()
            elif self._take(wanted):
                self._waiting.popleft()
                future.set_result(None)
            else:
                return

    def _take(self, nbytes: int) -> bool:
        if self._messages < 1 or self._bytes < nbytes:
            return False
        self._messages -= 1
        self._bytes -= nbytes
        return True
