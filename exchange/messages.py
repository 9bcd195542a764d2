"""The messages between a worker and the hub.

Every message is a tagged struct, map-encoded; readers ignore fields that they do not know. The id of a request stands in
the fixed header (exchange/wire.py) and comes back in its answer. Payload frames follow what carries a body.

    worker         hub
    Hello     ->   Welcome | Refused     before anything else; again, with the same routing id, after a break
    Publish   ->   Accepted | Refused
    Gather    ->   Rows | Refused        at once, or when min_count rows match, or at the deadline
    Commit    ->   Committed | Refused
    Lease     ->   Leased | Refused      when there is a record for this worker, or at the deadline
    Renew     ->   Settled | Refused     the worker is still at a lease
    Release   ->   Settled | Refused     what became of records of a lease
    Serve     ->   Settled | Refused     from now on these kinds of requests are answered here
    Request   ->   Answered | Refused    when the peer has answered, or why it never will
              <-   Deliver               a peer's request, to the worker that serves its kind
    Reply     ->   Settled               what the handler returned
    Fail      ->   Settled               why there is no reply
              <-   Revoke                a delivered request is over: too late, or no longer wanted
    Cancel    ->                         the answer to a Gather, Lease or Request is no longer wanted
    Ping      ->   Pong                  every heartbeat, and when progress is made
    AskStats  ->   HubStats | Refused
    AskDeadLetters -> DeadLetters | Refused
    Bye       ->   Goodbye
    anything  ->   Unknown               the hub does not know this routing id: say Hello again
              <-   Closing               the hub ends
"""

from __future__ import annotations

from exchange.lease_messages import AskDeadLetters, DeadLetters, Lease, Leased, Release, Renew
from exchange.message_base import RowHeader, Wire, check_kinds, check_name, sayable
from exchange.stats import HubStats
from exchange.types import AgentName, Cursor, Kind, PromptId, Version

__all__ = [
    "Accepted",
    "Answered",
    "AskDeadLetters",
    "AskStats",
    "Bye",
    "Cancel",
    "Closing",
    "Commit",
    "Committed",
    "DeadLetters",
    "Deliver",
    "Fail",
    "Gather",
    "Goodbye",
    "Hello",
    "Lease",
    "Leased",
    "Ping",
    "Pong",
    "Publish",
    "Refused",
    "Release",
    "Renew",
    "Reply",
    "Request",
    "Revoke",
    "RowHeader",
    "Rows",
    "Serve",
    "Settled",
    "ToHub",
    "ToWorker",
    "Unknown",
    "Welcome",
    "refused",
]

# Beyond these a worker's numbers, counted on or summed up, could grow out of what msgpack can say.
MAX_EPOCH = 2**32
MAX_TOKENS = 2**40
# Of a gather: a day.
MAX_DEADLINE_S = 86400.0
# Requests to peers that one worker may have open.
MAX_OPEN_REQUESTS = 16


class Hello(Wire, frozen=True, kw_only=True, tag="hello"):
    """First message of a worker. epoch: of an earlier WELCOME to the same incarnation, None at its first.

    first_seq: the lowest sequence number that a record of this incarnation may still come with.
    observer: may ask for statistics and nothing else, and need not be a member of the run.
    Example: Hello(name="alpha", run_id="r1", epoch=None).
    """

    name: AgentName
    run_id: str
    epoch: int | None = None
    first_seq: int = 1
    observer: bool = False

    def __post_init__(self) -> None:
        check_name("name", self.name)
        if self.first_seq < 1 or not 0 <= (self.epoch or 0) <= MAX_EPOCH:
            raise ValueError(f"sequence numbers count from 1, epochs from 0 to 2^32, got {self.first_seq}, {self.epoch}")


class Welcome(Wire, frozen=True, kw_only=True, tag="welcome"):
    """The worker is a member. epoch: how often its name has come back; older incarnations are fenced.

    credit_*: how much may be published and not yet answered. *_port: of the data and the bulk lane, on the same host; 0
    beside the ipc path, None for a hub without one. Example: Welcome(epoch=0, credit_messages=64,
    credit_bytes=67108864, max_record_bytes=67108864, heartbeat_s=2.0).
    """

    epoch: int
    credit_messages: int
    credit_bytes: int
    max_record_bytes: int
    heartbeat_s: float
    bulk_port: int | None = None
    data_port: int | None = None


class Refused(Wire, frozen=True, kw_only=True, tag="refused"):
    """No to a Hello, a record or a request. Example: Refused(reason="run_id", detail="this hub serves run 'r2', …")."""

    reason: str
    detail: str


def refused(reason: str, detail: str) -> Refused:
    """A refusal whose text stays short, also where it quotes what a stranger sent."""
    return Refused(reason=reason, detail=sayable(detail))


class Publish(Wire, frozen=True, kw_only=True, tag="publish"):
    """One record. seq: counts a worker's records from 1; duplicates are known by it. body: the encoded experience.

    durable: answer when the record is on disk, and not when it is in memory.
    """

    seq: int
    body: bytes
    durable: bool = False

    def __post_init__(self) -> None:
        if self.seq < 1:
            raise ValueError(f"sequence numbers count from 1, got seq={self.seq}")


class Accepted(Wire, frozen=True, kw_only=True, tag="accepted"):
    """The record is in the hub's memory at `cursor`, on its disk if that was asked for. duplicate: it had come before
    (cursor 0: where is forgotten)."""

    seq: int
    cursor: Cursor
    duplicate: bool = False


class Gather(Wire, frozen=True, kw_only=True, tag="gather"):
    """Ask for the rows behind `after` that fit all filters; None means no such filter.

    agents: producers; None means all but the asker. steps: the producer's, inclusive. max_age_s: by the hub's clock.
    max_lag: in versions behind the producer's newest; rows of an earlier epoch never pass it. The answer waits until
    min_count rows match or deadline_s has passed. max_bytes: of the answer, but at least one row.
    latest_only: of the rows that fit, only each producer's newest of a kind on a prompt. received_bytes: of all
    payloads since the WELCOME. consumer: a name whose committed cursor stands in for an `after` of 0. replay: rows that the
    hub's memory has let go come from its disk, in answers of their own, without waiting for min_count.
    Example: Gather(kinds=frozenset({"successes"}), prompt_ids=frozenset({"4f0c…"}), after=17, min_count=1, deadline_s=0.5).
    """

    kinds: frozenset[Kind]
    prompt_ids: frozenset[PromptId] | None = None
    agents: frozenset[AgentName] | None = None
    after: Cursor = Cursor(0)
    min_step: int | None = None
    max_step: int | None = None
    max_age_s: float | None = None
    max_lag: int | None = None
    min_count: int = 0
    deadline_s: float = 0.0
    max_bytes: int = 8 << 20
    latest_only: bool = False
    received_bytes: int = 0
    consumer: str | None = None
    replay: bool = False

    def __post_init__(self) -> None:
        check_kinds(self.kinds)
        if self.consumer is not None:
            check_name("consumer", self.consumer)
        # Also false for what is no number, by which no clock can be set.
        if not self.deadline_s <= MAX_DEADLINE_S:
            raise ValueError(f"`deadline_s` must be <= {MAX_DEADLINE_S:g} seconds, a day, got deadline_s={self.deadline_s}")


class Rows(Wire, frozen=True, kw_only=True, tag="rows"):
    """Answer to Gather. cursor: the next `after`. more: the answer was cut, ask again. newest: of each known producer.

    evicted_to: rows up to this cursor may be missing, as the hub let them go for room or age. gap_to: the same for
    the asked kinds and agents alone, and 0 where no row behind a given `after` (or a consumer's cursor) can be missing.
    """

    rows: tuple[RowHeader, ...]
    cursor: Cursor
    more: bool
    newest: dict[AgentName, Version]
    evicted_to: Cursor
    gap_to: Cursor = Cursor(0)


class Commit(Wire, frozen=True, kw_only=True, tag="commit"):
    """The worker's consumer of this name is done with all rows up to `cursor`. Example: Commit(consumer="judge",
    cursor=17)."""

    consumer: str
    cursor: Cursor

    def __post_init__(self) -> None:
        check_name("consumer", self.consumer)


class Committed(Wire, frozen=True, kw_only=True, tag="committed"):
    """Answer to Commit. cursor: the consumer's now, which never goes back."""

    cursor: Cursor


class Cancel(Wire, frozen=True, kw_only=True, tag="cancel"):
    """The worker no longer waits for the answer to its message with this request id. Has no answer itself."""

    request: int


class Serve(Wire, frozen=True, kw_only=True, tag="serve"):
    """The worker answers requests of these kinds, and of no others; of none when it is empty. Sent again after a break.

    Example: Serve(kinds=("scores",)).
    """

    kinds: tuple[str, ...]


class Request(Wire, frozen=True, kw_only=True, tag="request"):
    """Ask a peer. id: random; with the asker's name it stands for the request wherever it is sent again.

    deadline_s: from its arrival, on the hub's clock. tokens: asked for at most. body: the encoded question, whose tag says
    its kind; its arrays are the payload. received_bytes: as in Gather.
    Example: Request(id=4711, to="beta", deadline_s=30.0, body=b"…").
    """

    id: int
    to: AgentName
    deadline_s: float
    body: bytes
    tokens: int = 0
    received_bytes: int = 0

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)


class Deliver(Wire, frozen=True, kw_only=True, tag="deliver"):
    """A peer's request, with its payload. deadline_s: what is left of it. May come again after a break."""

    asker: AgentName
    id: int
    deadline_s: float
    body: bytes


class Reply(Wire, frozen=True, kw_only=True, tag="reply"):
    """The answer to a delivered request, with its payload. tokens: what it cost. received_bytes: as in Gather."""

    asker: AgentName
    id: int
    body: bytes
    tokens: int = 0
    received_bytes: int = 0

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)


class Fail(Wire, frozen=True, kw_only=True, tag="fail"):
    """A delivered request has no answer: its asker is Refused with this reason, which is "failed" when the handler raised.

    Example: Fail(asker="alpha", id=4711, reason="failed", detail="ValueError: no such prompt").
    """

    asker: AgentName
    id: int
    reason: str
    detail: str


class Settled(Wire, frozen=True, kw_only=True, tag="settled"):
    """The hub has taken a Serve, Reply, Fail, Renew or Release."""


class Answered(Wire, frozen=True, kw_only=True, tag="answered"):
    """The peer's answer to a Request, with its payload."""

    body: bytes


class Revoke(Wire, frozen=True, kw_only=True, tag="revoke"):
    """A delivered request needs no answer any more."""

    asker: AgentName
    id: int


class Ping(Wire, frozen=True, kw_only=True, tag="ping"):
    """Sign of life with the worker's progress; None before its first. received_bytes: as in Gather."""

    step: int | None = None
    version: Version | None = None
    received_bytes: int = 0


class Pong(Wire, frozen=True, kw_only=True, tag="pong"):
    """Answer to Ping."""


class AskStats(Wire, frozen=True, kw_only=True, tag="ask_stats"):
    """Ask for the hub's statistics."""


class Bye(Wire, frozen=True, kw_only=True, tag="bye"):
    """The worker leaves; its name is free at once."""


class Goodbye(Wire, frozen=True, kw_only=True, tag="goodbye"):
    """Answer to Bye: everything sent before it was handled."""


class Unknown(Wire, frozen=True, kw_only=True, tag="unknown"):
    """The hub does not know the sender: it restarted, or another incarnation took the name."""


class Closing(Wire, frozen=True, kw_only=True, tag="closing"):
    """Hub to all members as it ends; they answer Bye."""


ToHub = (
    Hello
    | Publish
    | Gather
    | Commit
    | Lease
    | Renew
    | Release
    | AskDeadLetters
    | Serve
    | Request
    | Reply
    | Fail
    | Cancel
    | Ping
    | AskStats
    | Bye
)
ToWorker = (
    Welcome
    | Refused
    | Accepted
    | Rows
    | Committed
    | Leased
    | DeadLetters
    | Settled
    | Answered
    | Deliver
    | Revoke
    | Pong
    | HubStats
    | Goodbye
    | Unknown
    | Closing
)
# What carries experience goes by the data lane, and what must not overtake it: a heartbeat or an acknowledgement never waits
# behind it. A hub or worker that has no such lane yet uses the control lane for all.
DATA_TO_HUB = (Publish, Request, Reply)
DATA_TO_WORKER = (Rows, Leased, Answered, Deliver, Revoke)


def _check_tokens(tokens: int) -> None:
    if not 0 <= tokens <= MAX_TOKENS:
        raise ValueError(f"`tokens` must be >= 0 and <= 2^40, got tokens={tokens}")
