"""The same exchange three ways: inside the process, over ipc, over loopback tcp."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol, Unpack

import pytest

import exchange
from exchange.connection import Timeouts

Types = Collection[type[exchange.Experience]]


class Connect(Protocol):
    """Connects a worker to the hub under test."""

    def __call__(
        self, name: str, *, run_id: str = "r", types: Types = (), observer: bool = False, **timeouts: Unpack[Timeouts]
    ) -> AbstractAsyncContextManager[exchange.Client]: ...


Serving = Callable[..., AbstractAsyncContextManager[Connect]]


@asynccontextmanager
async def in_memory(**config: object) -> AsyncIterator[Connect]:
    async with exchange.memory(exchange.HubConfig(run_id="r", **config)) as hub:  # type: ignore[arg-type]
        yield hub.connect


@asynccontextmanager
async def served(endpoint: str, **config: object) -> AsyncIterator[Connect]:
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    settings = exchange.HubConfig(run_id="r", **config)  # type: ignore[arg-type]
    serving = asyncio.create_task(exchange.serve(endpoint, settings, stop=stop, on_ready=ready.set_result))
    await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    real_endpoint = ready.result()

    def connect(
        name: str, *, run_id: str = "r", types: Types = (), observer: bool = False, **timeouts: Unpack[Timeouts]
    ) -> AbstractAsyncContextManager[exchange.Client]:
        return exchange.connect(real_endpoint, name=name, run_id=run_id, types=types, observer=observer, **timeouts)

    try:
        yield connect
    finally:
        stop.set()
        await serving


@asynccontextmanager
async def over_ipc(**config: object) -> AsyncIterator[Connect]:
    directory = exchange.private_ipc_dir()
    try:
        async with served(f"ipc://{directory}/hub", **config) as connect:
            yield connect
    finally:
        shutil.rmtree(directory)


def over_tcp(**config: object) -> AbstractAsyncContextManager[Connect]:
    return served("tcp://127.0.0.1:0", **config)


@pytest.fixture(params=[in_memory, over_ipc, over_tcp], ids=["memory", "ipc", "tcp"])
def serving(request: pytest.FixtureRequest) -> Serving:
    """Starts the hub under test: `async with serving(**hub_config) as connect`."""
    chosen: Serving = request.param
    return chosen
