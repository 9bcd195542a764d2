"""The hub as a process: a ROUTER, read by one task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from exchange.config import HubConfig
from exchange.endpoints import check_endpoint, claim
from exchange.hub import Hub
from exchange.service import HubService
from exchange.sockets import Channel, bind_channel
from exchange.stats import HubStats
from exchange.types import Cursor

__all__ = ["serve"]

# Under a flood the socket is always readable; other tasks of the loop get a turn after so many messages.
MESSAGES_PER_TURN = 32
# How long an ending hub waits for workers to take their leave.
FAREWELL_S = 0.5
# Cursors begin at the wall clock, so those of a restarted hub are higher: it stores fewer than 2^20 records in a ms.
CURSOR_BITS_PER_MS = 20


async def serve(
    endpoint: str,
    config: HubConfig,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[str], None] | None = None,
) -> HubStats:
    """Serve one run's exchange until `stop` is set; returns the final statistics.

    endpoint: ipc:// in a private directory, or tcp:// on loopback (port 0 takes a free one). on_ready: called with the
    real endpoint once workers can connect. Raises EndpointError. Cancellation leaves nothing bound.
    """
    check_endpoint(endpoint)
    with claim(endpoint):
        channel, real_endpoint = bind_channel(endpoint, credit_messages=config.credit_messages)
        hub = Hub(config, first_cursor=Cursor(time.time_ns() // 1_000_000 << CURSOR_BITS_PER_MS))
        service = HubService(hub, clock=time.monotonic, send=channel.send_now)
        try:
            if on_ready is not None:
                on_ready(real_endpoint)
            await _read_until(stop, channel, service)
            await _part(channel, service)
        finally:
            service.close()
            channel.close()
        return hub.stats()


async def _read_until(stop: asyncio.Event, channel: Channel, service: HubService) -> None:
    reader = asyncio.create_task(_read(channel, service), name="exchange hub reader")
    stopped = asyncio.create_task(stop.wait(), name="exchange hub stop")
    try:
        await asyncio.wait((reader, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        reader.cancel()
        stopped.cancel()
        await asyncio.wait((reader, stopped))
    if not reader.cancelled():
        reader.result()


async def _part(channel: Channel, service: HubService) -> None:
    """Tell the workers that the hub ends, and read until each has said Bye: a message that arrives together with the
    end of its connection is lost to who has not read it."""
    service.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(FAREWELL_S):
            while service.hub.attended():
                peer, *frames = await channel.receive()
                service.receive(bytes(peer), frames)


async def _read(channel: Channel, service: HubService) -> None:
    while True:
        for _ in range(MESSAGES_PER_TURN):
            peer, *frames = await channel.receive()
            service.receive(bytes(peer), frames)
        await asyncio.sleep(0)
