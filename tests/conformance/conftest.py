"""The same exchange four ways: inside the process, over ipc, over loopback tcp, and there with keys."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from typing import Protocol, Unpack

import pytest
import zmq

import exchange
from exchange.connection import Timeouts
from exchange.keys import Holder
from exchange.types import AgentName

WORKERS = ("alpha", "beta", "gamma", "delta", "a", "b", "c", "d", "maker", "old", "new", "judge", "slow", "fast")
OBSERVERS = ("up", "watcher")
Types = Collection[type[exchange.Experience]]


class Connect(Protocol):
    """Connects a worker to the hub under test."""

    def __call__(
        self, name: str, *, run_id: str = "r", types: Types = (), observer: bool = False, **timeouts: Unpack[Timeouts]
    ) -> AbstractAsyncContextManager[exchange.Client]: ...


Serving = Callable[..., AbstractAsyncContextManager[Connect]]


@cache
def some_keys() -> tuple[exchange.HubKeys, dict[str, exchange.WorkerKeys]]:
    """A hub's keys, and those of everybody who takes part in these tests."""
    public, secret = zmq.curve_keypair()
    pairs = {name: zmq.curve_keypair() for name in (*WORKERS, *OBSERVERS)}
    holders = {pair[0]: Holder(name=AgentName(name), observer=name in OBSERVERS) for name, pair in pairs.items()}
    workers = {name: exchange.WorkerKeys(public=pair[0], secret=pair[1], hub=public) for name, pair in pairs.items()}
    return exchange.HubKeys(public=public, secret=secret, holders=holders), workers


@asynccontextmanager
async def in_memory(**config: object) -> AsyncIterator[Connect]:
    async with exchange.memory(exchange.HubConfig(run_id="r", **config)) as hub:  # type: ignore[arg-type]
        yield hub.connect


@asynccontextmanager
async def served(endpoint: str, keyed: bool, **config: object) -> AsyncIterator[Connect]:
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    settings = exchange.HubConfig(run_id="r", **config)  # type: ignore[arg-type]
    hub_keys, worker_keys = some_keys() if keyed else (None, dict[str, exchange.WorkerKeys]())
    serving = asyncio.create_task(exchange.serve(endpoint, settings, stop=stop, on_ready=ready.set_result, keys=hub_keys))
    await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    real_endpoint = ready.result()

    def connect(
        name: str, *, run_id: str = "r", types: Types = (), observer: bool = False, **timeouts: Unpack[Timeouts]
    ) -> AbstractAsyncContextManager[exchange.Client]:
        keys = worker_keys[name] if keyed else None
        return exchange.connect(real_endpoint, name=name, run_id=run_id, types=types, observer=observer, keys=keys, **timeouts)

    try:
        yield connect
    finally:
        stop.set()
        await serving


@asynccontextmanager
async def over_ipc(**config: object) -> AsyncIterator[Connect]:
    directory = exchange.private_ipc_dir()
    try:
        async with served(f"ipc://{directory}/hub", False, **config) as connect:
            yield connect
    finally:
        shutil.rmtree(directory)


def over_tcp(**config: object) -> AbstractAsyncContextManager[Connect]:
    return served("tcp://127.0.0.1:0", False, **config)


def over_tcp_with_keys(**config: object) -> AbstractAsyncContextManager[Connect]:
    return served("tcp://127.0.0.1:0", True, **config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`serving` starts the hub under test: `async with serving(**hub_config) as connect`."""
    if "serving" in metafunc.fixturenames:
        # Keys are a matter of the transport: one file for each of its lanes is enough.
        keyed = metafunc.module.__name__.rpartition(".")[2] in ("test_exchange", "test_blobs")
        carriers = {"memory": in_memory, "ipc": over_ipc, "tcp": over_tcp} | ({"keys": over_tcp_with_keys} if keyed else {})
        metafunc.parametrize("serving", carriers.values(), ids=carriers.keys())
