"""The hub as a process: a ROUTER for control and one for data, each read by one task, and the bulk lane in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from exchange.blob_server import bulk_lane
from exchange.blobs import BlobStore
from exchange.config import HubConfig
from exchange.disk import DiskStore
from exchange.disk_settings import DiskSettings
from exchange.endpoints import check_endpoint, claim, lane_endpoint, lane_port
from exchange.guard import bind_guarded
from exchange.hub import Hub
from exchange.keys import HubKeys
from exchange.lease_recovery import recover_groups
from exchange.replays import load_or_log
from exchange.segments import SEGMENT_BYTES
from exchange.service import HubService
from exchange.sockets import Channel
from exchange.stats import HubStats
from exchange.types import Cursor

__all__ = ["serve"]

# Under a flood the socket is always readable; other tasks of the loop get a turn after so many.
MULTIPARTS_PER_TURN = 16
BYTES_PER_TURN = 512 << 10
BLOBS = "blobs"
# How long an ending hub waits for workers to take their leave.
FAREWELL_S = 0.5
# Cursors begin at the wall clock, so those of a restarted hub are higher: it stores fewer than 2^20 records in a ms.
CURSOR_BITS_PER_MS = 20
# Retention removes whole segments: a small disk is not to lose half of its records at once.
LEAST_SEGMENTS = 8


async def serve(
    endpoint: str,
    config: HubConfig,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[str], None] | None = None,
    directory: Path | None = None,
    keys: HubKeys | None = None,
) -> HubStats:
    """Serve one run's exchange until `stop` is set; returns the final statistics.

    Then, as after cancellation, the workers are told, and what was admitted is on disk or was refused when this ends.

    endpoint: ipc:// in a private directory, or tcp:// on loopback (port 0 takes a free one); with keys, tcp:// on any
    interface. keys: whose holders alone may connect, each under its own name. on_ready: called with the real endpoint once
    workers can connect. directory: where records are kept over the hub's death; a hub that is started again on it takes up its
    records and its workers.
    Raises EndpointError, StorageError for a directory that is damaged or that another hub or run holds, and GuardError when
    keys do not keep strangers out, or fail. Cancellation leaves nothing bound.
    """
    check_endpoint(endpoint, keyed=keys is not None)
    with ExitStack() as resources:
        resources.enter_context(claim(endpoint))
        store = resources.enter_context(_store(directory, config))
        hub = _hub(config, store)
        control, real_endpoint = await bind_guarded(endpoint, keys, credit_messages=config.credit_messages)
        resources.callback(control.close)
        at = lane_endpoint(endpoint, "data", 0)
        data, data_endpoint = await bind_guarded(at, keys, credit_messages=config.credit_messages)
        resources.callback(data.close)
        blobs = BlobStore(None if directory is None else directory / BLOBS, blob_bytes=config.blob_bytes, clock=time.monotonic)
        call = asyncio.get_running_loop().call_soon_threadsafe
        lane = bulk_lane(endpoint, blobs, present=hub.present, on_failure=lambda error: call(control.fail, error), keys=keys)
        hub.bulk = resources.enter_context(lane)
        hub.data_port = lane_port(data_endpoint)
        service = HubService(hub, clock=time.monotonic, send=control.send_to, send_data=data.send_to, log=store)
        try:
            if on_ready is not None:
                on_ready(real_endpoint)
            await _read_until(stop, (control, data), service)
            await service.flush()
            await _part(control, service)
        finally:
            await service.finish()
        return hub.stats()


@contextmanager
def _store(directory: Path | None, config: HubConfig) -> Iterator[DiskStore | None]:
    if directory is None:
        yield None
        return
    settings = DiskSettings(
        segment_bytes=min(SEGMENT_BYTES, max(config.disk_bytes // LEAST_SEGMENTS, 1)),
        max_bytes=config.disk_bytes,
        hard_bytes=2 * config.disk_bytes,
        max_age_s=config.max_age_s,
        reach=2 * config.credit_messages,
    )
    store = DiskStore.open(directory, run_id=config.run_id, settings=settings)
    try:
        yield store
    finally:
        store.close()


def _hub(config: HubConfig, store: DiskStore | None) -> Hub:
    """A hub that goes on where the store ends."""
    by_clock = Cursor(time.time_ns() // 1_000_000 << CURSOR_BITS_PER_MS)
    if store is None:
        return Hub(config, first_cursor=by_clock)
    first_cursor = max(by_clock, Cursor(store.newest + 1))
    consumers = {key: told.cursor for key, told in store.consumers.items()}
    hub = Hub(config, first_cursor=first_cursor, durable=True, known=store.incarnations, consumers=consumers)
    hub.disk = store.stats()
    latest = store.latest(config.memory_bytes)
    complete = len(latest) == hub.disk.records
    missing_to = store.dropped_to if complete or not latest else Cursor(latest[0].cursor - 1)
    records = []
    for found in latest:
        record = load_or_log(store, found)
        if record is None:
            missing_to = found.cursor
        else:
            records.append(record)
    groups = recover_groups(store.leases, store, limit_bytes=config.credit_bytes)
    hub.recall(records, missing_to=missing_to, groups=groups)
    return hub


async def _read_until(stop: asyncio.Event, channels: Sequence[Channel], service: HubService) -> None:
    readers = [asyncio.create_task(_read(channel, service), name="exchange hub reader") for channel in channels]
    stopped = asyncio.create_task(stop.wait(), name="exchange hub stop")
    try:
        await asyncio.wait((*readers, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (*readers, stopped):
            task.cancel()
        await asyncio.wait((*readers, stopped))
    for reader in readers:
        if not reader.cancelled():
            reader.result()


async def _part(channel: Channel, service: HubService) -> None:
    """Tell the workers that the hub ends, and read until each has said Bye: a message that arrives together with the
    end of its connection is lost to who has not read it."""
    service.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(FAREWELL_S):
            while service.hub.attended():
                service.receive(await _turn(channel))


async def _read(channel: Channel, service: HubService) -> None:
    while True:
        service.receive(await _turn(channel))
        await asyncio.sleep(0)


async def _turn(channel: Channel) -> list[tuple[bytes, Sequence[memoryview]]]:
    """What is there, with its senders: one multipart at least, and not so much that answers and other tasks wait for long."""
    multiparts = [await channel.receive()]
    nbytes = sum(map(len, multiparts[0]))
    while nbytes < BYTES_PER_TURN and len(multiparts) < MULTIPARTS_PER_TURN:
        another = channel.receive_now()
        if another is None:
            break
        multiparts.append(another)
        nbytes += sum(map(len, another))
    return [(bytes(peer), frames) for peer, *frames in multiparts]
