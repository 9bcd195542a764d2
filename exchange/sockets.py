"""The one place where ZeroMQ contexts and sockets are made; every option is set, and explained, here.

LINGER 0: leaving never waits for a peer; what must arrive is awaited by acknowledgement before (closing a socket, or
    dropping the last reference to a context, otherwise blocks for ever on one unsent message).
IMMEDIATE 1: nothing is queued for a peer that is not there.
ROUTER_MANDATORY 1: a message to a peer that left is an error, not a silent loss. ROUTER_HANDOVER 1: a worker that comes back
    under its routing id takes over from its dead connection.
SNDHWM, RCVHWM: several times the credit window, so that credits and never the high-water mark are the flow control
    (a full ROUTER does not wait for one peer while another has room).
MAXMSGSIZE: largest frame; a larger one costs its sender the connection.
HEARTBEAT_*: a peer that vanished without a word is noticed, and its connection and queues are freed.
RECONNECT_IVL: quick, for a hub that restarts. HANDSHAKE_IVL: strangers who connect and say nothing do not stay.
IPV6: off in libzmq; on only for addresses in brackets, as it changes how interface names are read.
CURVE_*: with keys, both ends prove theirs and nobody else reads or changes anything. ZAP_DOMAIN, ZAP_ENFORCE_DOMAIN: every
    key is asked for, and when nobody answers it is turned away (libzmq otherwise lets any key in).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import zmq

from exchange.doorkeeper import ZAP_DOMAIN, ZAP_ENDPOINT, Doorkeeper
from exchange.errors import EndpointError, GuardError
from exchange.handshake import Handshake
from exchange.keys import HubKeys, WorkerKeys, address_of
from exchange.wire import MAX_RECORD_BYTES, Buffer

__all__ = ["Channel", "GuardedChannel", "bind_channel", "connect_channel"]

# Older ones have faults that can be reached before any key is checked.
LEAST_LIBZMQ = (4, 3, 5)

# As plain numbers: combining pyzmq's enumerations costs more than sending a frame.
NOW = int(zmq.NOBLOCK)
NOW_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
EVENTS, READABLE, WRITABLE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)
# Below this a copy is cheaper than the bookkeeping of a shared buffer.
COPIED_BYTES = 64 << 10
HIGH_WATER_CREDITS = 4
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 6_000
HANDSHAKE_MS = 5_000
RECONNECT_MS, RECONNECT_MAX_MS = 50, 1_000
FRAME_SLACK_BYTES = 64 << 10


class Channel:
    """One socket with a context of its own. One task reads; sends come from one task, or never wait.

    It is a plain socket on the loop of the task that makes it, woken by its file descriptor. (pyzmq's own asyncio sockets
    cost three to five times as much for each message.) The descriptor is edge-triggered: it tells of a change once, and any
    use of the socket may swallow that. So every use here looks for what it may have swallowed before it returns.
    """

    def __init__(self, kind: int, endpoint: str, *, credit_messages: int, frame_bytes: int) -> None:
        _check_library()
        self._context = zmq.Context()
        self._context.linger = 0
        self.socket: zmq.Socket[bytes] = self._context.socket(kind)
        for option, value in _options(endpoint, credit_messages, frame_bytes).items():
            self.socket.setsockopt(option, value)
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._broken = False
        self.handshake: Handshake | None = None
        self._fd = self.socket.FD
        self._loop.add_reader(self._fd, self._look)

    async def receive(self) -> list[memoryview]:
        """Wait for one message. Cancellation loses nothing: a message is taken whole or left in the socket.

        No frames: a watched connection has broken, and what was on its way is lost. Raises what the channel has failed with.
        """
        while (frames := self.receive_now()) is None:
            self._reader = self._loop.create_future()
            self._look()
            try:
                await self._reader
            finally:
                self._reader = None
        return frames

    def receive_now(self) -> list[memoryview] | None:
        """One message that is there already, else None. Raises what the channel has failed with."""
        if self._failure is not None:
            raise self._failure
        if self._broken:
            self._broken = False
            return []
        try:
            frame = self.socket.recv(NOW, copy=False)
        except zmq.Again:
            return None
        frames = [self._first(frame)]
        while frame.more:
            frame = self.socket.recv(NOW, copy=False)
            frames.append(frame.buffer)
        if self._writer is not None:
            self._look()
        return frames

    async def send(self, frames: Sequence[Buffer]) -> None:
        """Wait until the transport takes one message; waits for ever while the peer is away, so give it a deadline."""
        while not self.send_now(frames):
            self._writer = self._loop.create_future()
            self._look()
            try:
                await self._writer
            finally:
                self._writer = None

    def send_now(self, frames: Sequence[Buffer]) -> bool:
        """Hand over one message; False when there is no peer to take it, or its queue is full."""
        last = len(frames) - 1
        try:
            for index, frame in enumerate(frames):
                more = NOW_MORE if index < last else NOW
                if len(frame) < COPIED_BYTES:
                    self.socket.send(frame, more)
                else:
                    self.socket.send(_as_received(frame), more, False)
        except zmq.ZMQError as error:
            # Also in the middle of a message, of which nothing is then sent.
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        finally:
            if self._reader is not None:
                self._look()
        return True

    def send_to(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """The same, for a ROUTER's peer."""
        return self.send_now([peer, *frames])

    def watch_handshake(self, endpoint: str, *, keyed: bool) -> None:
        """Fail with ConnectError when whoever listens turns this socket away, and tell readers when a connection breaks; call
        it before connecting."""
        self.handshake = Handshake(self.socket, endpoint, keyed=keyed, on_break=self._break)
        self.handshake.done.add_done_callback(self._shaken)

    def fail(self, error: BaseException) -> None:
        """Let whoever reads, now or later, end with this error."""
        self._failure = error
        self._wake()

    def close(self) -> None:
        """Close the socket and its context at once."""
        if self.handshake is not None:
            self.handshake.close()
        self._loop.remove_reader(self._fd)
        self.socket.close()
        self._context.term()

    def _first(self, frame: zmq.Frame) -> memoryview:
        return frame.buffer

    def _break(self) -> None:
        self._broken = True
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _shaken(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            self.fail(error)

    def _look(self) -> None:
        """Wake whoever waits for what the socket can do now."""
        events = int(self.socket.get(EVENTS))
        for waiting, event in ((self._reader, READABLE), (self._writer, WRITABLE)):
            if waiting is not None and events & event and not waiting.done():
                waiting.set_result(None)


def _as_received(frame: Buffer) -> Buffer | zmq.Frame:
    """The message that a buffer is all of, where it came from a socket: that goes on as it is, and when a buffer that pyzmq
    lends to libzmq is free again a thread has to be woken."""
    message = frame.obj if isinstance(frame, memoryview) else None
    return message if isinstance(message, zmq.Frame) and len(message) == len(frame) else frame


def connect_channel(
    endpoint: str,
    *,
    routing_id: bytes,
    credit_messages: int,
    frame_bytes: int = MAX_RECORD_BYTES,
    keys: WorkerKeys | None = None,
    watched: bool = False,
) -> Channel:
    """A worker's DEALER. frame_bytes: the most that a frame may have. watched: fail when the first handshake does, and tell
    when the connection breaks.

    Raises EndpointError for what is no address.
    """
    channel = Channel(zmq.DEALER, endpoint, credit_messages=credit_messages, frame_bytes=frame_bytes)
    channel.socket.setsockopt(zmq.ROUTING_ID, routing_id)
    if keys is not None:
        channel.socket.setsockopt(zmq.CURVE_SERVERKEY, keys.hub)
        channel.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        channel.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    if watched:
        channel.watch_handshake(endpoint, keyed=keys is not None)
    try:
        channel.socket.connect(endpoint)
    except zmq.ZMQError as error:
        channel.close()
        raise EndpointError(f"cannot connect, got endpoint={endpoint!r}: {error}; check the address") from error
    return channel


class GuardedChannel(Channel):
    """A hub's ROUTER that only holders of its workers' keys can reach.

    A peer is the address that exchange/keys.py makes of its key's holder and its routing id.
    """

    def __init__(self, endpoint: str, keys: HubKeys, *, credit_messages: int, frame_bytes: int) -> None:
        super().__init__(zmq.ROUTER, endpoint, credit_messages=credit_messages, frame_bytes=frame_bytes)
        questions = self._context.socket(zmq.REP)
        questions.bind(ZAP_ENDPOINT)
        self.doorkeeper = Doorkeeper(questions, keys.holders, on_failure=self.fail)
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self.socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def send_to(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        return self.send_now([peer[1:].partition(b"\0")[2], *frames])

    def close(self) -> None:
        self.doorkeeper.close()
        super().close()

    def _first(self, frame: zmq.Frame) -> memoryview:
        return memoryview(address_of(str(frame.get("User-Id")), frame.bytes))


def bind_channel(
    endpoint: str, *, credit_messages: int, frame_bytes: int = MAX_RECORD_BYTES, keys: HubKeys | None = None
) -> tuple[Channel, str]:
    """The hub's ROUTER and its real endpoint (port 0 becomes the port that was free). Raises EndpointError."""
    if keys is None:
        channel = Channel(zmq.ROUTER, endpoint, credit_messages=credit_messages, frame_bytes=frame_bytes)
    else:
        channel = GuardedChannel(endpoint, keys, credit_messages=credit_messages, frame_bytes=frame_bytes)
    channel.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    channel.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    try:
        channel.socket.bind(endpoint)
    except zmq.ZMQError as error:
        channel.close()
        advice = "choose another port, or port 0 for a free one" if endpoint.startswith("tcp") else "check the path"
        raise EndpointError(f"cannot bind, got endpoint={endpoint!r}: {error}; {advice}") from error
    return channel, channel.socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _check_library() -> None:
    if zmq.zmq_version_info() < LEAST_LIBZMQ:
        least = ".".join(map(str, LEAST_LIBZMQ))
        raise GuardError(f"libzmq {least} or newer is needed, got {zmq.zmq_version()}: install a newer pyzmq")


def _options(endpoint: str, credit_messages: int, frame_bytes: int) -> dict[int, int]:
    return {
        zmq.LINGER: 0,
        zmq.IMMEDIATE: 1,
        zmq.SNDHWM: HIGH_WATER_CREDITS * credit_messages,
        zmq.RCVHWM: HIGH_WATER_CREDITS * credit_messages,
        zmq.MAXMSGSIZE: frame_bytes + FRAME_SLACK_BYTES,
        zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
        zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
        zmq.HEARTBEAT_TTL: HEARTBEAT_TIMEOUT_MS,
        zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
        zmq.RECONNECT_IVL: RECONNECT_MS,
        zmq.RECONNECT_IVL_MAX: RECONNECT_MAX_MS,
        zmq.TCP_KEEPALIVE: 1,
        zmq.IPV6: int("[" in endpoint),
    }
