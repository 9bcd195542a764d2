"""The exchange inside one process: the same hub, client and bytes, and no sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Unpack

from exchange.blob_server import BulkLane
from exchange.blob_service import BlobService
from exchange.blobs import BlobStore
from exchange.client import Client
from exchange.config import HubConfig
from exchange.connection import Timeouts, new_routing_id, open_client
from exchange.hub import Hub
from exchange.kinds import Kinds
from exchange.messages import Hello
from exchange.service import HubService
from exchange.stats import HubStats
from exchange.types import AgentName, Experience
from exchange.wire import Buffer

__all__ = ["MemoryHub", "memory"]

# Answers that a worker has not read: more than a worker can be owed by its credit and its gathers.
UNREAD_ANSWERS = 4096


class MemoryHub:
    """A hub on the running event loop; `memory` makes it, and ends it when its block ends."""

    def __init__(self, config: HubConfig, *, clock: Callable[[], float]) -> None:
        self._config = config
        self._control, self._bulk = _Lane(), _Lane()
        self._hub = Hub(config, clock=clock)
        self._service = HubService(self._hub, clock=clock, send=self._control.send)
        store = BlobStore(None, blob_bytes=config.blob_bytes, clock=clock)
        self._blobs = BlobService(store, present=self._hub.present, send=self._bulk.send, same_host=True)
        self._hub.bulk = BulkLane(0, self._blobs)

    def connect(
        self,
        name: str,
        *,
        run_id: str | None = None,
        types: Collection[type[Experience]] = (),
        observer: bool = False,
        **timeouts: Unpack[Timeouts],
    ) -> AbstractAsyncContextManager[Client]:
        """As exchange.connect, always as a new incarnation; run_id: the hub's own unless given."""
        run_id = self._config.run_id if run_id is None else run_id
        peer = new_routing_id()
        return open_client(
            _MemoryLink(self._receive, self._control, peer),
            Hello(name=AgentName(name), run_id=run_id, observer=observer),
            endpoint=f"memory://{self._config.run_id}",
            kinds=Kinds(types),
            open_bulk=lambda _: _MemoryLink(self._blobs.receive, self._bulk, peer),
            **timeouts,
        )

    def stats(self) -> HubStats:
        """What the hub has counted so far."""
        return self._hub.stats()

    def tick(self) -> None:
        """Answer what is due; only a hub on a fake clock needs to be told."""
        self._service.tick()

    def _receive(self, peer: bytes, frames: Sequence[memoryview]) -> None:
        self._service.receive([(peer, frames)])

    async def close(self) -> None:
        """End the hub: workers are told."""
        self._service.close()
        await self._blobs.close()


class _Lane:
    """What the hub has sent to each worker and they have not read."""

    def __init__(self) -> None:
        self._inboxes: dict[bytes, asyncio.Queue[list[memoryview]]] = {}

    def attach(self, peer: bytes) -> asyncio.Queue[list[memoryview]]:
        """The queue in which `peer` finds what the hub sends it."""
        return self._inboxes.setdefault(peer, asyncio.Queue(UNREAD_ANSWERS))

    def detach(self, peer: bytes) -> None:
        self._inboxes.pop(peer, None)

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        inbox = self._inboxes.get(peer)
        if inbox is None or inbox.full():
            return False
        inbox.put_nowait([memoryview(frame) for frame in frames])
        return True


class _MemoryLink:
    def __init__(self, receive: Callable[[bytes, Sequence[memoryview]], None], lane: _Lane, peer: bytes) -> None:
        self._receive = receive
        self._lane = lane
        self._peer = peer
        self._inbox = lane.attach(peer)

    async def send(self, frames: Sequence[Buffer]) -> None:
        self.send_now(frames)

    def send_now(self, frames: Sequence[Buffer]) -> bool:
        self._receive(self._peer, [memoryview(frame) for frame in frames])
        return True

    async def receive(self) -> list[memoryview]:
        return await self._inbox.get()

    def close(self) -> None:
        self._lane.detach(self._peer)


@asynccontextmanager
async def memory(config: HubConfig | None = None, *, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[MemoryHub]:
    """A hub inside this process; `hub.connect(name)` gives the same client as `exchange.connect`.

    It has no disk: a durable record is refused ("not_durable"). clock: monotonic seconds, by which ages, leases and
    deadlines are counted; on one that is no real clock `hub.tick()` answers what is due. Clients are to be left first: the
    end of the block tells those that are there that the hub has ended.
    """
    hub = MemoryHub(HubConfig(run_id="memory") if config is None else config, clock=clock)
    try:
        yield hub
    finally:
        await hub.close()
