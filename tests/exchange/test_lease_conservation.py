"""Leases under any order of joins, deaths, expiries, words and evictions: nothing is lost without a trace or done twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hub_answers import ListDisk, hello
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from exchange.config import HubConfig
from exchange.hub import Hub
from exchange.lease_group import MAX_DELIVERIES
from exchange.lease_messages import Outcome
from exchange.lease_recovery import recover_groups
from exchange.messages import Bye, Cancel, Lease, Leased, Ping, Publish, Refused, Release, Renew, Settled, ToHub
from exchange.replays import read_chunk
from exchange.testing import HubDriver, a_rollout_group, rewards_of
from exchange.types import Cursor, Kind
from exchange.wire import Buffer, Outgoing, encode_record

WORKERS = st.sampled_from(["anna", "bert", "carl"])
GROUPS: dict[str, frozenset[Kind]] = {"judges": frozenset({"rewards", "rollouts"}), "critics": frozenset({"rollouts"})}
OUTCOMES = st.sampled_from(["done", "done", "failed", "returned", "unsupported"])
GONE_S = 6.0
# Carl takes records out of their order, as he may not have all of them.
EDGES = frozenset(
    {("carl", "maker", "rollouts")} | {(name, "maker", kind) for name in ("anna", "bert") for kind in GROUPS["judges"]}
)


@dataclass(slots=True)
class Lent:
    """What the model knows of a lease. open: cursors without a word."""

    worker: str
    peer: str
    group: str
    id: int
    lease_s: float
    expires_at: float
    open: set[int] = field(default_factory=set)


class Leasing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = HubDriver(HubConfig(run_id="r", memory_bytes=1 << 15, heartbeat_s=GONE_S / 3, edges=EDGES))
        self.lives = Counter[str]()
        self.heard: dict[str, float] = {}
        self.asked: dict[tuple[str, int], Lease] = {}
        self.lent: list[Lent] = []
        self.done: set[tuple[str, int]] = set()
        self.published = Counter[Kind]()
        self.last_id = 0

    @initialize()
    def begin(self) -> None:
        for name in ("anna", "bert", "carl", "maker"):
            self.say(name, hello(name))
        for name in GROUPS:
            self.lease("anna", name, 1, 1, 0)

    def peer(self, worker: str) -> str:
        return f"{worker}{self.lives[worker]}"

    def say(self, worker: str, message: ToHub, payload: Sequence[Buffer] = ()) -> list[Outgoing]:
        self.heard[worker] = self.driver.clock()
        return self.take_in(self.driver.say(self.peer(worker), message, payload))

    def take_in(self, outgoing: list[Outgoing]) -> list[Outgoing]:
        """Note what was handed out, and that nobody else had it."""
        now = self.driver.clock()
        for out in outgoing:
            if not isinstance(out.message, Leased):
                continue
            asked = self.asked.pop((out.peer.decode(), out.request_id))
            worker = out.peer.decode().rstrip("0123456789")
            cursors = {int(row.cursor) for row in out.message.rows}
            assert len(cursors) == len(out.message.rows) <= asked.count
            assert all(1 <= count <= MAX_DELIVERIES for count in out.message.deliveries)
            assert not {(asked.group, cursor) for cursor in cursors} & self.done, "a done record never comes again"
            for other in self.lent:
                if other.group == asked.group and self.alive(other, now):
                    assert not other.open & cursors, "a record that is held goes to nobody else"
                elif other.group == asked.group:
                    other.open -= cursors
            if cursors:
                lent = Lent(worker, out.peer.decode(), asked.group, asked.id, asked.lease_s, now + asked.lease_s, cursors)
                self.lent.append(lent)
        return outgoing

    def alive(self, lent: Lent, now: float) -> bool:
        same_life = lent.peer == self.peer(lent.worker)
        return same_life and now < lent.expires_at and now < self.heard[lent.worker] + GONE_S

    @rule(kind=st.sampled_from(["rewards", "rollouts"]), size=st.integers(1, 60))
    def publish(self, kind: Kind, size: int) -> None:
        made = rewards_of("maker", 0, "p") if kind == "rewards" else a_rollout_group("maker", 0, "p", tokens=size)
        record = encode_record(made)
        self.published[kind] += 1
        self.say("maker", Publish(seq=self.published.total(), body=record.body), record.frames)

    @rule(
        worker=WORKERS,
        group=st.sampled_from(sorted(GROUPS)),
        count=st.integers(1, 4),
        lease_s=st.integers(1, 10),
        deadline_s=st.sampled_from([0, 5]),
    )
    def lease(self, worker: str, group: str, count: int, lease_s: int, deadline_s: int) -> None:
        self.last_id += 1
        asked = Lease(id=self.last_id, group=group, kinds=GROUPS[group], count=count, lease_s=lease_s, deadline_s=deadline_s)
        self.asked[self.peer(worker), self.driver.request_id + 1] = asked
        self.say(worker, asked)

    @rule(worker=WORKERS)
    def cancel(self, worker: str) -> None:
        waiting = [request_id for peer, request_id in self.asked if peer == self.peer(worker)]
        for request_id in waiting[:1]:
            del self.asked[self.peer(worker), request_id]
            self.say(worker, Cancel(request=request_id))

    @precondition(lambda self: self.lent)
    @rule(data=st.data(), outcome=OUTCOMES)
    def release(self, data: st.DataObject, outcome: Outcome) -> None:
        lent = data.draw(st.sampled_from(self.lent))
        if lent.peer != self.peer(lent.worker):
            return
        if not lent.open:
            return
        some = data.draw(st.sets(st.sampled_from(sorted(lent.open)), min_size=1))
        alive = self.alive(lent, self.driver.clock())
        word = Release(group=lent.group, lease=lent.id, cursors=tuple(map(Cursor, some)), outcome=outcome)
        lent.open -= some
        (answer, *_) = (out.message for out in self.say(lent.worker, word) if out.request_id == self.driver.request_id)
        assert isinstance(answer, Settled if alive else Refused), "a late word is refused, one in time is not"
        if alive and outcome == "done":
            self.done |= {(lent.group, cursor) for cursor in some}

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        lent = data.draw(st.sampled_from(self.lent))
        if lent.peer != self.peer(lent.worker):
            return
        alive = bool(lent.open) and self.alive(lent, self.driver.clock())
        (answer, *_) = (
            out.message for out in self.say(lent.worker, Renew(lease=lent.id)) if out.request_id == self.driver.request_id
        )
        assert isinstance(answer, Settled if alive else Refused)
        lent.expires_at = self.driver.clock() + lent.lease_s if alive else 0.0

    @rule(seconds=st.integers(1, 7), beating=st.sets(WORKERS))
    def wait(self, seconds: int, beating: set[str]) -> None:
        self.driver.clock.advance(seconds)
        self.bury()
        for worker in ("maker", *sorted(beating)):
            self.say(worker, Ping())

    @rule(worker=WORKERS, orderly=st.booleans())
    def start_anew(self, worker: str, orderly: bool) -> None:
        if orderly:
            self.end(worker)
            self.say(worker, Bye())
        elif self.driver.clock() < self.heard[worker] + GONE_S:
            return
        self.forget(worker)
        self.lives[worker] += 1
        self.say(worker, hello(worker))

    def end(self, worker: str) -> None:
        for lent in self.lent:
            if lent.worker == worker:
                lent.expires_at = 0.0

    def forget(self, worker: str) -> None:
        for key in [key for key in self.asked if key[0] == self.peer(worker)]:
            del self.asked[key]

    def bury(self) -> None:
        """The hub looks for who is gone before it hears them again."""
        for worker, heard_at in self.heard.items():
            if self.driver.clock() >= heard_at + GONE_S:
                self.end(worker)
        self.take_in(self.driver.hub.tick())

    @invariant()
    def every_record_is_accounted_for(self) -> None:
        for name, group in self.driver.hub.stats().groups.items():
            assert group.matching == group.done + group.leased + group.waiting + group.dead + group.lost
            assert group.matching == sum(self.published[kind] for kind in GROUPS[name])
            assert group.done == sum(each[0] == name for each in self.done)
            assert min(group.leased, group.waiting, group.dead, group.lost) >= 0

    def teardown(self) -> None:
        """One worker that does everything comes to an end, and then nothing waits."""
        self.driver.clock.advance(100)
        self.bury()
        self.lives["anna"] += 1
        self.say("anna", hello("anna"))
        for group in GROUPS:
            for _ in range(self.published.total() + 1):
                self.lease("anna", group, 4, 5, 0)
                lent = self.lent[-1] if self.lent else None
                if lent is not None and lent.open and lent.id == self.last_id:
                    word = Release(group=group, lease=lent.id, cursors=tuple(map(Cursor, lent.open)), outcome="done")
                    self.done |= {(group, cursor) for cursor in lent.open}
                    lent.open = set()
                    self.say("anna", word)
            left = self.driver.hub.stats().groups[group]
            assert left.leased == left.waiting == 0
        self.every_record_is_accounted_for()


class DurableLeasing(Leasing):
    """The same hub with a disk, which is killed now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = ListDisk()
        self.rows: dict[tuple[str, int], bytes] = {}
        self.driver.hub = Hub(self.driver.hub.config, clock=self.driver.clock, durable=True)

    def take_in(self, outgoing: list[Outgoing]) -> list[Outgoing]:
        """Everything that follows when the disk is quick; an answer to be sent is one that was written before."""
        said = super().take_in(outgoing)
        commits = self.driver.hub.commits
        assert commits is not None
        while len(commits):
            group = commits.take()
            self.disk.records |= {each.record.cursor: each.record for each in group}
            for key, row in commits.leases.rows.items():
                self.rows.pop(key, None)
                self.rows |= {} if row is None else {key: row}
            said += super().take_in(self.driver.hub.committed())
        while (reading := self.driver.hub.next_reading()) is not None:
            said += self.take_in(self.driver.hub.replayed(read_chunk(self.disk, reading)))
        return said

    @rule()
    def kill_the_hub(self) -> None:
        """Who waited asks no more, what was held comes again, and every incarnation joins anew."""
        hub = self.driver.hub
        first = Cursor(hub.stats().cursor + 1)
        self.driver.hub = Hub(hub.config, clock=self.driver.clock, durable=True, first_cursor=first)
        self.driver.hub.recall(
            (), missing_to=Cursor(0), groups=recover_groups(self.rows, self.disk, limit_bytes=hub.config.credit_bytes)
        )
        self.asked.clear()
        for worker in self.heard:
            self.end(worker)
        for worker in self.heard:
            self.say(worker, hello(worker))


@pytest.mark.slow
class TestDurableLeasesAddUp(DurableLeasing.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestLeasesAddUp(Leasing.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
