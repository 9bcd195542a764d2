"""Waiting that ends when the run is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


async def unless_stopped(stop: asyncio.Event, work: Awaitable[T]) -> T | None:
    """What `work` gives, or None as soon as `stop` is set; the work is then cancelled.

    Raises what the work raises. A computation on a thread cannot be cancelled, only no longer waited for.
    """
    working = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    either: list[asyncio.Future[Any]] = [working, stopped]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopped.cancel()


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Wait `seconds`, less when the run is told to stop."""
    if seconds > 0:
        await unless_stopped(stop, asyncio.sleep(seconds))
