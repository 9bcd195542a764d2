"""Ways to a client: over a socket, or over any link."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypedDict, Unpack

from exchange.blob_messages import BULK_CREDIT, PIECE_BYTES
from exchange.bulk_session import OpenBulk, without_bulk
from exchange.client import Client
from exchange.endpoints import check_endpoint, check_reachable, lane_endpoint
from exchange.keys import WorkerKeys, routing_id_of
from exchange.kinds import Kinds
from exchange.messages import Hello, Welcome
from exchange.session import Link, OpenData, Session
from exchange.sockets import connect_channel
from exchange.types import AgentName, Experience

__all__ = ["Timeouts", "connect", "new_routing_id", "open_client"]

# Before the WELCOME nobody knows the credit; the socket's high-water mark is set from this.
ASSUMED_CREDIT_MESSAGES = 256
REQUEST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0


class Timeouts(TypedDict, total=False):
    """request_timeout_s (30): how long one request, or the hub's silence, may last. connect_timeout_s (10): for the WELCOME."""

    request_timeout_s: float
    connect_timeout_s: float


@asynccontextmanager
async def connect(
    endpoint: str,
    *,
    name: str,
    run_id: str,
    types: Collection[type[Experience]] = (),
    observer: bool = False,
    identity: bytes | None = None,
    first_seq: int = 1,
    keys: Path | WorkerKeys | None = None,
    **timeouts: Unpack[Timeouts],
) -> AsyncIterator[Client]:
    """A client of the hub at `endpoint`; waits for its WELCOME, also where the hub has yet to start.

    Leaving the block, also by cancellation, waits for the hub to have everything (not for its disk: that is what
    `ack="durable"` is for) and says Bye; a hub that says nothing for a second is left. run_id: as the hub's.
    types: kinds of experience of the project's own that are published or read here. observer: may only ask for statistics.
    identity, first_seq: for a worker that outlives its process. With the `new_routing_id()` that it keeps on disk it comes
    back as the same incarnation, in the same epoch; numbered from the first record that was not acknowledged, whatever it
    publishes again is stored once.
    keys: the directory with `name`'s pair and hub.key, or these keys; needed where the hub has keys.
    Raises EndpointError, KeysError, ValueError for types that cannot be registered, and ConnectError when no WELCOME comes in
    time, the hub refuses, or the transport turns this worker away.
    """
    check_endpoint(endpoint, keyed=keys is not None)
    check_reachable(endpoint)
    kinds = Kinds(types)
    routing_id = new_routing_id() if identity is None else identity
    if isinstance(keys, Path):
        keys = WorkerKeys.load(keys, name)
    if keys is not None:
        routing_id = routing_id_of(routing_id, keys)
    credit = ASSUMED_CREDIT_MESSAGES
    link = connect_channel(endpoint, routing_id=routing_id, credit_messages=credit, keys=keys, watched=True)
    hello = Hello(name=AgentName(name), run_id=run_id, observer=observer, first_seq=first_seq)

    def open_bulk(welcome: Welcome) -> Link:
        if welcome.bulk_port is None:
            return without_bulk(welcome)
        bulk = lane_endpoint(endpoint, "bulk", welcome.bulk_port)
        return connect_channel(bulk, routing_id=routing_id, credit_messages=BULK_CREDIT, frame_bytes=PIECE_BYTES, keys=keys)

    def open_data(welcome: Welcome) -> Link | None:
        if welcome.data_port is None:
            return None
        data = lane_endpoint(endpoint, "data", welcome.data_port)
        credit_messages = welcome.credit_messages
        return connect_channel(data, routing_id=routing_id, credit_messages=credit_messages, keys=keys, watched=True)

    async with open_client(
        link, hello, endpoint=endpoint, kinds=kinds, open_data=open_data, open_bulk=open_bulk, **timeouts
    ) as client:
        yield client


@asynccontextmanager
async def open_client(
    link: Link,
    hello: Hello,
    *,
    endpoint: str,
    kinds: Kinds,
    open_bulk: OpenBulk,
    open_data: OpenData = lambda welcome: None,
    **timeouts: Unpack[Timeouts],
) -> AsyncIterator[Client]:
    """A client over any link; closes the link in the end. open_*: a link to another lane of the hub, when it is needed."""
    unknown = timeouts.keys() - Timeouts.__annotations__.keys()
    if unknown:
        raise TypeError(f"timeouts are {', '.join(Timeouts.__annotations__)}, got {', '.join(sorted(unknown))}")
    request_timeout_s = timeouts.get("request_timeout_s", REQUEST_TIMEOUT_S)
    session = Session(link, hello, endpoint=endpoint, lost_after_s=request_timeout_s, open_data=open_data)
    client = Client(session, name=hello.name, kinds=kinds, request_timeout_s=request_timeout_s, open_bulk=open_bulk)
    try:
        await client.open(timeout_s=timeouts.get("connect_timeout_s", CONNECT_TIMEOUT_S))
        yield client
    finally:
        await client.close()


def new_routing_id() -> bytes:
    """A routing id for one incarnation: 16 bytes, the first of which ZeroMQ wants not to be 0."""
    return b"\1" + os.urandom(15)
