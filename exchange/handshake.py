"""What the transport tells a worker of its connection to a hub.

One that is turned away is otherwise silence: sends succeed and nothing arrives. And one that breaks is mended behind the
worker's back, without what was on its way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from exchange.errors import ConnectError

__all__ = ["Handshake"]

# A connection that ends in the middle may be a hub's that is just being killed. A hub with another key, or none where
# there should be one, ends them all, some 50 ms apart; it does not tell why.
BROKEN_OFF = 3
EVENTS = int(
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


class Handshake:
    """Watches one socket's connection until `close`, or until its first handshake will not succeed.

    done: ends with ConnectError when there is no use in waiting. keyed: whether the worker has keys. on_break: called when
    a connection that stood has broken.
    """

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, *, keyed: bool, on_break: Callable[[], None]) -> None:
        self._watched = socket
        self._endpoint = endpoint
        self._keyed = keyed
        self._on_break = on_break
        self._broken_off = 0
        self._monitor = socket.get_monitor_socket(EVENTS)
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._fd = self._monitor.FD
        self._loop.add_reader(self._fd, self._look)
        self._look()  # the descriptor tells nothing to who has never looked

    def close(self) -> None:
        """Stop watching; `done` is cancelled if nothing is known yet."""
        self.done.cancel()
        self._end()

    def _look(self) -> None:
        while not self._monitor.closed and int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            self._take(int(recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]))

    def _take(self, event: int) -> None:
        if self.done.done():
            if event == zmq.EVENT_DISCONNECTED:
                self._on_break()
            return
        if event == zmq.EVENT_DISCONNECTED:
            return
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.done.set_result(None)
            return
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._fail("does not know this key: is its public key in the hub's directory, and was the hub started after that?")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._broken_off < BROKEN_OFF - 1:
            self._broken_off += 1
            return
        elif self._keyed:
            self._fail("has another key than the one in hub.key, or uses no keys, or it is no hub")
        else:
            self._fail("wants keys, or it is no hub: connect with keys=")
        self._end()

    def _fail(self, cause: str) -> None:
        self.done.set_exception(ConnectError(f"what listens there {cause} (got endpoint={self._endpoint!r})"))

    def _end(self) -> None:
        if not self._monitor.closed:
            self._loop.remove_reader(self._fd)
            self._watched.disable_monitor()
            self._monitor.close()
