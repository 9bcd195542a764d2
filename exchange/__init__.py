"""Typed experience on a message bus: publish it, gather what peers published, know who is how far.

    async with exchange.connect("ipc:///…/hub", name="alpha", run_id="r1") as ex:
        await ex.publish(experience)
        got = await ex.gather(kinds={"successes"}, prompt_ids=ids, after=cursor)

`serve` runs the hub of a run, `memory` one inside this process with the same client.
"""

from exchange.client import Client
from exchange.config import HubConfig
from exchange.connection import connect, new_routing_id
from exchange.endpoints import private_ipc_dir
from exchange.errors import ExchangeError, GapError, HubLostError, RefusedError
from exchange.memory import MemoryHub, memory
from exchange.rows import Gathered, Receipt, Row
from exchange.server import serve
from exchange.stats import HubStats
from exchange.subscription import Subscription
from exchange.types import Cursor

__all__ = [
    "Client",
    "Cursor",
    "ExchangeError",
    "GapError",
    "Gathered",
    "HubConfig",
    "HubLostError",
    "HubStats",
    "MemoryHub",
    "Receipt",
    "RefusedError",
    "Row",
    "Subscription",
    "connect",
    "memory",
    "new_routing_id",
    "private_ipc_dir",
    "serve",
]
