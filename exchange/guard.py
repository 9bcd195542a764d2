"""Binds a hub's sockets, and with keys proves before anybody is told of it that strangers stay outside."""

from __future__ import annotations

import asyncio

import zmq
from zmq.utils import z85

from exchange.endpoints import loopback_of
from exchange.errors import ConnectError, GuardError
from exchange.keys import HubKeys, WorkerKeys
from exchange.sockets import Channel, GuardedChannel, bind_channel, connect_channel
from exchange.wire import MAX_RECORD_BYTES

__all__ = ["bind_guarded"]

PROOF_S = 10.0


async def bind_guarded(
    endpoint: str, keys: HubKeys | None, *, credit_messages: int, frame_bytes: int = MAX_RECORD_BYTES
) -> tuple[Channel, str]:
    """As bind_channel. With keys, waits until a new key was turned away, and let in once it was admitted for a moment.

    Raises EndpointError, and GuardError when the proof fails. Cancellation leaves nothing bound.
    """
    channel, real_endpoint = bind_channel(endpoint, keys=keys, credit_messages=credit_messages, frame_bytes=frame_bytes)
    if keys is None or not isinstance(channel, GuardedChannel):
        return channel, real_endpoint
    try:
        async with asyncio.timeout(PROOF_S):
            await _prove(channel, keys, loopback_of(real_endpoint))
    except TimeoutError:
        channel.close()
        raise GuardError(f"the hub cannot reach itself within {PROOF_S:g} s, got endpoint={real_endpoint!r}") from None
    except BaseException:
        channel.close()
        raise
    return channel, real_endpoint


async def _prove(channel: GuardedChannel, keys: HubKeys, endpoint: str) -> None:
    public, secret = zmq.curve_keypair()
    stranger = WorkerKeys(public=public, secret=secret, hub=keys.public)
    if await _gets_in(stranger, endpoint):
        raise GuardError(f"a stranger's key gets in, got endpoint={endpoint!r}: is the transport built with CURVE?")
    admitted = channel.doorkeeper.admitted
    admitted[z85.decode(public)] = "proof"
    try:
        if not await _gets_in(stranger, endpoint):
            raise GuardError(f"a key that is known does not get in, got endpoint={endpoint!r}")
    finally:
        del admitted[z85.decode(public)]


async def _gets_in(keys: WorkerKeys, endpoint: str) -> bool:
    probe = connect_channel(endpoint, routing_id=b"\1proof", keys=keys, credit_messages=1, watched=True)
    try:
        assert probe.handshake is not None
        await probe.handshake.done
    except ConnectError:
        return False
    finally:
        probe.close()
    return True
