"""Requests between workers, at the hub: who may ask whom, which are open, and how each of them ends.

A request ends once: answered by its server, refused at the start, or told why no answer will come (too late, server gone,
handler failed). It is known by its asker's name and a random id, so that one that is sent again after a break is joined to
the first, and its server knows it too. What is open is bounded for every asker and server, and held for redelivery.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from exchange.accounts import Accounts
from exchange.arrays import plausible
from exchange.config import Edges
from exchange.members import GONE_HEARTBEATS, Member, Members
from exchange.messages import (
    MAX_OPEN_REQUESTS,
    Answered,
    Deliver,
    Fail,
    Refused,
    Reply,
    Request,
    Revoke,
    Serve,
    Settled,
    ToWorker,
    refused,
)
from exchange.types import AgentName
from exchange.wire import MAX_BODY_BYTES, Buffer, Outgoing, kind_of_tag, tag_of

__all__ = ["Router"]

MAX_OPEN_SERVED = 64
MAX_DEADLINE_S = 3600.0
MAX_KINDS = 32
MAX_KIND_CHARS = 64
# What a server may give as the reason; anything else counts as the first.
FAIL_REASONS = ("failed", "malformed", "not_serving", "too_large")

_Key = tuple[AgentName, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """What one incarnation of a worker answers."""

    member: Member
    peer: bytes
    kinds: frozenset[str]


@dataclass(slots=True, kw_only=True)
class _Job:
    """An open request. request_id: where its answer goes, None after a break until the asker sends it again."""

    asker: Member
    server: Member
    server_peer: bytes
    request: Request
    kind: str
    payload: tuple[Buffer, ...]
    nbytes: int
    deadline: float
    request_id: int | None
    lost: bool = False


class Router:
    """Requests of all members. limit_bytes: of one asker's open requests, and of what a worker may have unread."""

    def __init__(
        self, members: Members, edges: Edges | None, *, limit_bytes: int, max_record_bytes: int, heartbeat_s: float
    ) -> None:
        self._members = members
        self._edges = edges
        self._limit_bytes = limit_bytes
        self._max_record_bytes = max_record_bytes
        self._gone_after_s = GONE_HEARTBEATS * heartbeat_s
        self._served: dict[AgentName, _Served] = {}
        self._jobs: dict[_Key, _Job] = {}
        self._of_asker: defaultdict[AgentName, set[_Key]] = defaultdict(set)
        self._of_server: defaultdict[AgentName, set[_Key]] = defaultdict(set)
        self.accounts = Accounts()

    def __len__(self) -> int:
        return len(self._jobs)

    def handle(
        self,
        member: Member,
        message: Serve | Request | Reply | Fail,
        payload: Sequence[memoryview],
        request_id: int,
        now: float,
    ) -> list[Outgoing]:
        """Everything that one message causes."""
        match message:
            case Serve():
                return self.serve(member, message, request_id)
            case Request():
                return self.ask(member, message, payload, request_id, now)
            case Reply():
                return self.reply(member, message, payload, request_id)
            case Fail():
                return self.fail(member, message, request_id)

    def serve(self, member: Member, serve: Serve, request_id: int) -> list[Outgoing]:
        """Take note of what a worker serves; requests that it has and serves no more are over."""
        if len(serve.kinds) > MAX_KINDS:
            detail = f"a worker may serve {MAX_KINDS} kinds of requests, got {len(serve.kinds)}"
            return [_to(member, refused("too_many", detail), request_id)]
        if max(map(len, serve.kinds), default=1) > MAX_KIND_CHARS:
            detail = f"the name of a kind of requests has at most {MAX_KIND_CHARS} characters"
            return [_to(member, refused("invalid", detail), request_id)]
        self._served[member.name] = _Served(member=member, peer=member.peer, kinds=frozenset(serve.kinds))
        ended = [key for key in self._of_server[member.name] if self._jobs[key].kind not in serve.kinds]
        return [_to(member, Settled(), request_id), *self._end_all(ended, "gone", f"{member.name!r} has stopped serving")]

    def ask(
        self, member: Member, request: Request, payload: Sequence[memoryview], request_id: int, now: float
    ) -> list[Outgoing]:
        """Deliver a new request, or refuse it; one that is open already is joined."""
        member.has_received(request.received_bytes)
        key = (member.name, request.id)
        if key in self._jobs:
            self._jobs[key].request_id = request_id
            self.accounts.duplicate(member.name)
            return []
        nbytes = len(request.body) + sum(map(len, payload))
        kind = kind_of_tag(tag_of(request.body) or "")
        refusal = self._refusal(member, request, kind, nbytes, now)
        if refusal is None and not plausible(payload):
            refusal = refused("malformed", f"only large arrays have frames of their own, got {len(payload)} of {nbytes} bytes")
        if refusal is not None:
            self.accounts.refuse(member.name, refusal.reason)
            return [_to(member, refusal, request_id)]
        server = self._served[request.to].member
        job = _Job(
            asker=member,
            server=server,
            server_peer=server.peer,
            request=request,
            kind=kind,
            payload=tuple(payload),
            nbytes=nbytes,
            deadline=now + request.deadline_s,
            request_id=request_id,
        )
        self._jobs[key] = job
        self._of_asker[member.name].add(key)
        self._of_server[server.name].add(key)
        self.accounts.ask(member.name, server.name, kind, nbytes, request.tokens)
        return [self._deliver(job, now)]

    def reply(self, member: Member, reply: Reply, payload: Sequence[memoryview], request_id: int) -> list[Outgoing]:
        """Hand a server's answer to who waits for it."""
        member.has_received(reply.received_bytes)
        settled = _to(member, Settled(), request_id)
        job = self._job_of(member, (reply.asker, reply.id))
        if job is None:
            return [settled]
        nbytes = len(reply.body) + sum(map(len, payload))
        key = (reply.asker, reply.id)
        if len(reply.body) > MAX_BODY_BYTES or nbytes > self._max_record_bytes:
            detail = f"an answer has at most {self._max_record_bytes} bytes, got {nbytes} from {member.name!r}"
            return [settled, *self._end(key, "too_large", detail)]
        if not plausible(payload):
            detail = f"only large arrays have frames of their own, got {len(payload)} of {nbytes} bytes from {member.name!r}"
            return [settled, *self._end(key, "malformed", detail)]
        if job.asker.unread_bytes > self._limit_bytes:
            return [settled, *self._end(key, "busy", "the answer came while its asker had too much unread")]
        self._close(key)
        self.accounts.answer(reply.asker, member.name, job.kind, nbytes, reply.tokens)
        if job.request_id is None:
            return [settled]
        return [settled, _to(job.asker, Answered(body=reply.body), job.request_id, tuple(payload))]

    def fail(self, member: Member, fail: Fail, request_id: int) -> list[Outgoing]:
        """Tell who waits for it that a request has no answer."""
        key = (fail.asker, fail.id)
        reason = fail.reason if fail.reason in FAIL_REASONS else "failed"
        known = self._job_of(member, key) is not None
        return [_to(member, Settled(), request_id), *(self._end(key, reason, fail.detail) if known else [])]

    def cancel(self, member: Member, request_id: int) -> list[Outgoing]:
        """The asker waits no longer."""
        keys = [key for key in self._of_asker[member.name] if self._jobs[key].request_id == request_id]
        for key in keys:
            self._jobs[key].request_id = None
        return self._end_all(keys, "cancelled", "")

    def joined(self, member: Member, now: float) -> list[Outgoing]:
        """A worker said Hello: redeliver what the same incarnation may not have got; what another had is over.

        Its own requests wait for it to send them again: its process may be a new one.
        """
        for key in self._of_asker[member.name]:
            self._jobs[key].request_id = None
        jobs = {key: self._jobs[key] for key in self._of_server[member.name]}
        over = [key for key, job in jobs.items() if job.server_peer != member.peer]
        again = [self._deliver(job, now) for key, job in jobs.items() if key not in over]
        return [*again, *self._end_all(over, "gone", f"{member.name!r} was started anew")]

    def left(self, member: Member) -> list[Outgoing]:
        """A worker said Bye."""
        self._served.pop(member.name, None)
        asked = list(self._of_asker[member.name])
        for key in asked:
            self._jobs[key].request_id = None
        gone = self._end_all(list(self._of_server[member.name]), "gone", f"{member.name!r} has left")
        return [*gone, *self._end_all([key for key in asked if key in self._jobs], "cancelled", "")]

    def lost(self, peer: bytes) -> None:
        """Something could not be handed to a worker: what it serves is over with the next `due`."""
        member = self._members.of(peer)
        for key in self._of_server[member.name] if member is not None else ():
            self._jobs[key].lost = True

    def due(self, now: float) -> list[Outgoing]:
        """End what is too late, and what has lost its server."""
        late = [key for key, job in self._jobs.items() if job.deadline <= now]
        ended = self._end_all(late, "deadline", "no answer came in time")
        gone = [key for key, job in self._jobs.items() if self._gone_at(job) <= now]
        return ended + self._end_all(gone, "gone", "the worker that was to answer gives no sign of life")

    def next_deadline(self) -> float | None:
        return min((min(job.deadline, self._gone_at(job)) for job in self._jobs.values()), default=None)

    def _gone_at(self, job: _Job) -> float:
        return float("-inf") if job.lost else job.server.heard_at + self._gone_after_s

    def _refusal(self, member: Member, request: Request, kind: str, nbytes: int, now: float) -> Refused | None:
        if not 0 < len(kind) <= MAX_KIND_CHARS or not 0 < request.deadline_s <= MAX_DEADLINE_S:
            limits = f"a tag of at most {MAX_KIND_CHARS} characters and a deadline_s of at most {MAX_DEADLINE_S:g}"
            detail = f"a request has {limits}, got {kind!r}, {request.deadline_s}"
            return refused("invalid", detail)
        if nbytes > self._max_record_bytes or len(request.body) > MAX_BODY_BYTES:
            limits = f"{self._max_record_bytes} bytes here, {MAX_BODY_BYTES} beside its arrays"
            return refused("too_large", f"a request has at most {limits}, got {nbytes} and {len(request.body)}")
        if self._edges is not None and (member.name, request.to, kind) not in self._edges:
            detail = f"this run has no edge for {kind!r} from {request.to!r} to {member.name!r}: its topology must allow it"
            return refused("not_allowed", detail)
        served = self._served.get(request.to)
        if served is None or kind not in served.kinds or served.peer != served.member.peer:
            return refused("not_serving", f"{request.to!r} answers no {kind!r} now")
        if now >= served.member.heard_at + self._gone_after_s:
            return refused("gone", f"{request.to!r} gives no sign of life")
        return self._busy(member, served.member, nbytes)

    def _busy(self, member: Member, server: Member, nbytes: int) -> Refused | None:
        asked, served = self._of_asker[member.name], self._of_server[server.name]
        if len(asked) >= MAX_OPEN_REQUESTS or sum(self._jobs[key].nbytes for key in asked) + nbytes > self._limit_bytes:
            limits = f"{MAX_OPEN_REQUESTS} open requests of {self._limit_bytes} bytes in all"
            return refused("busy", f"a worker may have {limits}, got one more from {member.name!r}")
        if len(served) >= MAX_OPEN_SERVED:
            return refused("busy", f"{server.name!r} has {MAX_OPEN_SERVED} requests to answer: try later")
        if server.unread_bytes > self._limit_bytes:
            return refused("busy", f"{server.name!r} has too much unread: try later")
        return None

    def _deliver(self, job: _Job, now: float) -> Outgoing:
        request = job.request
        message = Deliver(asker=job.asker.name, id=request.id, deadline_s=max(job.deadline - now, 0.0), body=request.body)
        return _to(job.server, message, 0, job.payload)

    def _job_of(self, server: Member, key: _Key) -> _Job | None:
        """The open request that this worker may answer; counts an answer that is for none."""
        job = self._jobs.get(key)
        if job is None or job.server is not server:
            self.accounts.late_replies += 1
            return None
        return job

    def _close(self, key: _Key) -> _Job:
        job = self._jobs.pop(key)
        self._of_asker[job.asker.name].discard(key)
        self._of_server[job.server.name].discard(key)
        return job

    def _end_all(self, keys: Sequence[_Key], reason: str, detail: str) -> list[Outgoing]:
        return [out for key in keys for out in self._end(key, reason, detail)]

    def _end(self, key: _Key, reason: str, detail: str) -> list[Outgoing]:
        """End a request without an answer: tell its asker, if one waits, and its server, unless that knows."""
        job = self._close(key)
        self.accounts.end(job.asker.name, job.server.name, job.kind, reason)
        outgoing = []
        if job.request_id is not None:
            outgoing.append(_to(job.asker, refused(reason, detail), job.request_id))
        if reason in ("deadline", "cancelled") and not job.server.left:
            outgoing.append(_to(job.server, Revoke(asker=job.asker.name, id=job.request.id), 0))
        return outgoing


def _to(member: Member, message: ToWorker, request_id: int, payload: Sequence[Buffer] = ()) -> Outgoing:
    member.sent_bytes += sum(map(len, payload))
    return Outgoing(peer=member.peer, message=message, request_id=request_id, payload=payload)
