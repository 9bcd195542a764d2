"""Typed experience on a message bus: publish it, gather what peers published, ask them, know who is how far.

    async with exchange.connect("ipc:///…/hub", name="alpha", run_id="r1", types=[Critique]) as ex:
        await ex.publish(experience)
        got = await ex.gather(kinds={"successes"}, prompt_ids=ids, after=cursor)
        async for row in ex.subscribe(kinds={"critiques"}, name="judge"): ...
        async with ex.lease(group="judges", kinds={"critiques"}) as batch: ...
        ref = await ex.send_blob(weights)
        scored = await ex.request(ScoreRequest(...), to="beta", timeout_s=30.0)

`types` are kinds of experience of one's own (exchange/kinds.py), beside the four that come with the package. `serve` runs the
hub of a run, `memory` one inside this process with the same client. docs/exchange.md says what is guaranteed.
"""

from exchange.client import Client
from exchange.config import HubConfig
from exchange.connection import connect, new_routing_id
from exchange.endpoints import private_ipc_dir
from exchange.errors import (
    BlobError,
    ClosedError,
    ConnectError,
    EndpointError,
    ExchangeError,
    GapError,
    GuardError,
    HubLostError,
    KeysError,
    LeaseLostError,
    RecordTooLargeError,
    RefusedError,
    RequestFailedError,
    RequestTimeoutError,
    StorageError,
)
from exchange.keys import HubKeys, WorkerKeys, make_keys
from exchange.lease_messages import DeadLetter
from exchange.leasing import Batch
from exchange.log import LoggedRow, RecordLog
from exchange.memory import MemoryHub, memory
from exchange.requests import PeerReply, PeerRequest, SampleReply, SampleRequest, ScoreReply, ScoreRequest
from exchange.rows import Gathered, RawRow, Receipt, Row
from exchange.server import serve
from exchange.stats import BlobStats, GroupStats, HubStats
from exchange.subscription import Subscription
from exchange.types import (
    START,
    AgentName,
    BlobRef,
    Cursor,
    Experience,
    GroupRewards,
    Kind,
    Message,
    PromptExperience,
    PromptId,
    RolloutGroup,
    StepPrompts,
    VerifiedSuccesses,
    Version,
)

__all__ = [
    "START",
    "AgentName",
    "Batch",
    "BlobError",
    "BlobRef",
    "BlobStats",
    "Client",
    "ClosedError",
    "ConnectError",
    "Cursor",
    "DeadLetter",
    "EndpointError",
    "ExchangeError",
    "Experience",
    "GapError",
    "Gathered",
    "GroupRewards",
    "GroupStats",
    "GuardError",
    "HubConfig",
    "HubKeys",
    "HubLostError",
    "HubStats",
    "KeysError",
    "Kind",
    "LeaseLostError",
    "LoggedRow",
    "MemoryHub",
    "Message",
    "PeerReply",
    "PeerRequest",
    "PromptExperience",
    "PromptId",
    "RawRow",
    "Receipt",
    "RecordLog",
    "RecordTooLargeError",
    "RefusedError",
    "RequestFailedError",
    "RequestTimeoutError",
    "RolloutGroup",
    "Row",
    "SampleReply",
    "SampleRequest",
    "ScoreReply",
    "ScoreRequest",
    "StepPrompts",
    "StorageError",
    "Subscription",
    "VerifiedSuccesses",
    "Version",
    "WorkerKeys",
    "connect",
    "make_keys",
    "memory",
    "new_routing_id",
    "private_ipc_dir",
    "serve",
]
