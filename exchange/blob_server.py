"""The bulk lane of a served hub: a socket, a context and a thread of its own, so that neither a disk that stalls nor blobs
on the move hold up heartbeats."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from exchange.blob_messages import BULK_CREDIT, PIECE_BYTES
from exchange.blob_service import BlobService
from exchange.blobs import BlobStore
from exchange.endpoints import lane_endpoint, lane_port
from exchange.errors import ExchangeError
from exchange.guard import bind_guarded
from exchange.keys import HubKeys
from exchange.sockets import Channel
from exchange.stats import BlobStats

__all__ = ["BulkLane", "bulk_lane"]

_log = logging.getLogger(__name__)

# Under a flood the socket is always readable; timers and checks get a turn after so many messages.
MESSAGES_PER_TURN = 8


class BulkLane:
    """What the hub's own thread sees of the bulk lane. port: where workers find it, 0 beside the hub's ipc path."""

    def __init__(self, port: int, service: BlobService) -> None:
        self.port = port
        self._service = service

    def stats(self) -> BlobStats:
        """Counts so far."""
        return self._service.stats()


@contextmanager
def bulk_lane(
    endpoint: str,
    store: BlobStore,
    *,
    present: Callable[[bytes], bool],
    on_failure: Callable[[BaseException], object],
    keys: HubKeys | None = None,
) -> Iterator[BulkLane]:
    """Serve blobs beside the hub at `endpoint` inside this block, in a thread; closes the store.

    present: called in that thread, as is on_failure, with what it failed with. keys: of the hub. Leaving the block ends
    transfers where they are. Raises EndpointError, GuardError, and in the end what the thread failed with.
    """
    thread = _BulkThread(endpoint, store, present, on_failure, keys)
    lane = thread.begin()
    try:
        yield lane
    finally:
        thread.end()


class _BulkThread:
    def __init__(
        self,
        endpoint: str,
        store: BlobStore,
        present: Callable[[bytes], bool],
        on_failure: Callable[[BaseException], object],
        keys: HubKeys | None,
    ) -> None:
        self._endpoint = endpoint
        self._store = store
        self._present = present
        self._on_failure = on_failure
        self._keys = keys
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="exchange bulk lane", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._lane: BulkLane | None = None
        self._failure: BaseException | None = None

    def begin(self) -> BulkLane:
        self._thread.start()
        self._ready.wait()
        if self._lane is None:
            self._thread.join()
            assert self._failure is not None
            raise self._failure
        return self._lane

    def end(self) -> None:
        if self._loop is not None and self._stop is not None:
            with suppress(RuntimeError):  # the thread has ended its loop by itself
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as failure:  # told by `begin` or `end`, in the hub's thread
            self._failure = failure
            if self._lane is not None:
                _log.exception("the bulk lane of the hub at %s failed", self._endpoint)
                self._on_failure(failure)
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            at = lane_endpoint(self._endpoint, "bulk", 0)
            channel, real_endpoint = await bind_guarded(at, self._keys, credit_messages=BULK_CREDIT, frame_bytes=PIECE_BYTES)
        except ExchangeError:
            self._store.close()
            raise
        same_host = real_endpoint.startswith("ipc")
        service = BlobService(self._store, present=self._present, send=channel.send_to, same_host=same_host)
        self._lane = BulkLane(lane_port(real_endpoint), service)
        self._ready.set()
        reader = asyncio.create_task(_read(channel, service), name="exchange bulk reader")
        stopped = asyncio.create_task(self._stop.wait(), name="exchange bulk stop")
        try:
            await asyncio.wait((reader, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()
            stopped.cancel()
            await asyncio.wait((reader, stopped))
            await service.close()
            channel.close()
        if not reader.cancelled():
            reader.result()


async def _read(channel: Channel, service: BlobService) -> None:
    while True:
        for _ in range(MESSAGES_PER_TURN):
            peer, *frames = await channel.receive()
            service.receive(bytes(peer), frames)
        await asyncio.sleep(0)
