"""Waiting for, and looking at, real processes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import psutil

HANG_S = 30.0


def alive(pid: int) -> bool:
    """Whether there is a process of this number that still runs."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def stranger() -> AsyncIterator[int]:
    """A child of the test that no run may touch; its process id."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
    try:
        yield process.pid
    finally:
        process.kill()
        await process.wait()


async def eventually(condition: Callable[[], object], *, within_s: float = HANG_S) -> None:
    """Return once the condition holds; TimeoutError when it has not after `within_s`. Processes cannot set events."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
