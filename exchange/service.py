"""Feeds a hub with frames and the clock, and sends what it answers. The transport is a function that never waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from exchange.errors import ProtocolError, RecordTooLargeError, WireError
from exchange.hub import Hub
from exchange.messages import refused
from exchange.wire import Buffer, Outgoing, encode_message, hub_decoder

__all__ = ["HubService"]

_log = logging.getLogger(__name__)

SendNow = Callable[[bytes, Sequence[Buffer]], bool]


class HubService:
    """A hub that lives on the running event loop. send: hands frames to a peer's transport, False when it cannot."""

    def __init__(self, hub: Hub, *, clock: Callable[[], float], send: SendNow) -> None:
        self.hub = hub
        self._clock = clock
        self._send = send
        self._decoder = hub_decoder()
        self._timer: asyncio.TimerHandle | None = None

    def receive(self, peer: bytes, frames: Sequence[memoryview]) -> None:
        """Handle one message of `peer`, readable or not."""
        try:
            incoming = self._decoder.decode(frames)
        except WireError as error:
            self.hub.bad_frame(frames, error)
            _log.warning("bad message from peer %s: %s", peer.hex(), error)
            if isinstance(error, ProtocolError):
                self._deliver([Outgoing(peer=peer, message=refused("protocol", str(error)))])
            return
        self._deliver(self.hub.handle(peer, incoming))
        self._arm()

    def tick(self) -> None:
        """Answer what is due by the clock."""
        self._timer = None
        self._deliver(self.hub.tick())
        self._arm()

    def close(self) -> None:
        """Tell every worker that the hub ends."""
        if self._timer is not None:
            self._timer.cancel()
        self._deliver(self.hub.close())

    def _deliver(self, outgoing: Iterable[Outgoing]) -> None:
        for item in outgoing:
            frames = self._encode(item)
            if not self._send(item.peer, frames):
                self.hub.undeliverable(item.peer)

    def _encode(self, item: Outgoing) -> list[Buffer]:
        try:
            return encode_message(item.message, item.request_id, item.payload)
        except RecordTooLargeError as error:
            return encode_message(refused("too_large", str(error)), item.request_id)

    def _arm(self) -> None:
        """Have `tick` called at the hub's next deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.hub.next_deadline()
        if deadline is not None:
            delay_s = max(deadline - self._clock(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.tick)
