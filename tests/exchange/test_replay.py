"""Subscriptions whose rows memory has let go: they come from the disk, and pass over into memory without a seam."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
from hub_answers import ListDisk, gather, rows
from hypothesis import example, given, settings

from exchange.config import HubConfig
from exchange.hub import Hub
from exchange.messages import Cancel, Gather, Hello, Ping, Publish, Refused, Rows
from exchange.replays import Reading, read_chunk
from exchange.testing import HubDriver, a_rollout_group, rewards_of
from exchange.types import AgentName, AnyExperience, Cursor
from exchange.wire import Outgoing, encode_record


class ReplayDriver(HubDriver):
    """A hub with little memory and a disk, driven by hand; beta subscribes."""

    def __init__(self, **config: object) -> None:
        super().__init__(HubConfig(run_id="r", **({"memory_bytes": 1 << 15} | config)))  # type: ignore[arg-type]
        self.hub = Hub(self.hub.config, clock=self.clock, durable=True)
        self.disk = ListDisk()
        self.answers: list[Outgoing] = []
        self.reading: Reading | None = None
        self.join("alpha", "beta")

    def send(self, experience: AnyExperience) -> None:
        self._seq[experience.agent] = self._seq.get(experience.agent, 0) + 1
        record = encode_record(experience)
        message = Publish(seq=self._seq[experience.agent], body=record.body)
        self.answers += self.say(experience.agent, message, record.frames)

    def commit(self, *, fails: bool = False) -> None:
        assert self.hub.commits is not None
        group = self.hub.commits.take()
        if not fails:
            self.disk.records |= {each.record.cursor: each.record for each in group}
        self.answers += self.hub.commit_failed("full") if fails else self.hub.committed()

    def store(self, *experiences: AnyExperience) -> None:
        for experience in experiences:
            self.send(experience)
            self.commit()

    def take(self) -> bool:
        self.reading = self.reading or self.hub.next_reading()
        return self.reading is not None

    def read(self) -> None:
        assert self.reading is not None
        reading, self.reading = self.reading, None
        self.answers += self.hub.replayed(read_chunk(self.disk, reading))

    def pull(self, message: Gather, peer: str = "beta") -> Rows | None:
        """The answer, once the disk has been read; None when it has to wait."""
        self.answers = self.say(peer, message)
        while not self.rows_of(peer) and self.take():
            self.read()
        found = self.rows_of(peer)
        return found[0] if found else None

    def rows_of(self, peer: str) -> list[Rows]:
        return [out.message for out in self.answers if out.peer == peer.encode() and isinstance(out.message, Rows)]


def subscribe(*kinds: str, **filters: object) -> Gather:
    return gather(*kinds, **{"replay": True, "min_count": 1, "deadline_s": 10.0} | filters)


def groups(count: int, first: int = 0, tokens: int = 40) -> list[AnyExperience]:
    return [a_rollout_group("alpha", first + i, "p", tokens=tokens) for i in range(count)]


def all_rows(driver: ReplayDriver, message: Gather) -> tuple[list[int], list[int]]:
    """Cursors of all rows that come without waiting, and the gaps that were told."""
    seen, gaps, after = list[int](), list[int](), message.after
    while (got := driver.pull(msgspec.structs.replace(message, after=after))) is not None:
        seen += rows(got)
        gaps += [got.gap_to] if got.gap_to else []
        assert got.cursor > after
        after = got.cursor
    return seen, gaps


def test_what_memory_has_let_go_comes_from_the_disk_in_pieces() -> None:
    driver = ReplayDriver()
    driver.store(*groups(30))
    stored = driver.hub.stats().stored
    assert 1 < stored < 28
    for after in (0, 2):
        seen, gaps = all_rows(driver, subscribe("rollouts", after=after, max_bytes=9000))
        assert (seen, gaps) == (list(range(after + 1, 31)), [])
    plain = driver.ask("beta", gather("rollouts", after=2))
    assert isinstance(plain, Rows)
    assert (len(plain.rows), plain.gap_to) == (stored, 30 - stored), "a gather is a matter of memory"
    worker = driver.hub.stats().workers[AgentName("beta")]
    assert worker.delivered == {"alpha": {"rollouts": 30 + 28 + stored}}


def test_filters_and_edges_hold_on_the_disk_as_in_memory() -> None:
    driver = ReplayDriver(edges=frozenset({("beta", "alpha", "rollouts")}))
    for step in range(20):
        driver.store(*groups(1, step), rewards_of("alpha", step, "p"), rewards_of("beta", step, "p"))
    seen, gaps = all_rows(driver, subscribe("rollouts", "rewards", min_step=3))
    assert (seen, gaps) == ([1 + 3 * step for step in range(3, 20)], [])
    assert driver.hub.stats().workers[AgentName("beta")].withheld >= 17
    assert all_rows(driver, subscribe("rollouts", max_lag=1))[0] == [55, 58]


def test_what_the_disk_has_lost_is_told_as_a_gap() -> None:
    driver = ReplayDriver()
    driver.store(*groups(30))
    driver.disk.drop(Cursor(10))
    driver.disk.damaged = {15}
    assert all_rows(driver, subscribe("rollouts", after=5)) == ([*range(11, 15), *range(16, 31)], [15])
    assert all_rows(driver, subscribe("rollouts", after=5, max_bytes=9000))[1] == [10, 15]
    assert all_rows(driver, subscribe("rollouts", after=15)) == (list(range(16, 31)), [])
    assert all_rows(driver, subscribe("rollouts"))[1] == [15], "from the start is from the oldest there is"


def test_what_only_memory_had_is_a_gap_once_it_is_gone() -> None:
    driver = ReplayDriver()
    driver.store(*groups(2))
    driver.send(groups(1, 2)[0])
    driver.commit(fails=True)
    assert all_rows(driver, subscribe("rollouts", after=1)) == ([2, 3], [])
    driver.store(*groups(30, 3))
    assert all_rows(driver, subscribe("rollouts", after=1)) == ([2, *range(4, 34)], [3])
    assert all_rows(driver, subscribe("rollouts", after=3)) == (list(range(4, 34)), [])


def test_one_reading_at_a_time_and_members_take_turns() -> None:
    driver = ReplayDriver()
    driver.join("gamma")
    driver.store(*groups(30))
    driver.answers = []
    for _ in range(3):
        driver.answers += driver.say("beta", subscribe("rollouts", max_bytes=1))
    driver.answers += driver.say("gamma", subscribe("rollouts", max_bytes=1))
    assert driver.hub.stats().waiting_gathers == 4
    assert driver.take() and driver.hub.next_reading() is None
    while driver.take():
        driver.read()
    assert [out.peer for out in driver.answers] == [b"beta", b"gamma", b"beta", b"beta"]


def test_a_reader_who_does_not_read_gets_no_more() -> None:
    driver = ReplayDriver(credit_bytes=10_000)
    driver.store(*groups(30))
    first = driver.pull(subscribe("rollouts", max_bytes=20_000))
    assert first is not None and len(first.rows) == 4
    assert driver.pull(subscribe("rollouts", after=first.cursor)) is None
    driver.say("beta", Ping(received_bytes=1 << 20))
    assert driver.take()
    driver.read()
    assert len(driver.rows_of("beta")) == 1


def test_what_goes_while_a_reader_may_not_be_sent_it_comes_from_the_disk() -> None:
    driver = ReplayDriver(credit_bytes=10_000)
    driver.store(*groups(3))
    assert driver.pull(subscribe("rollouts")) is not None
    assert driver.pull(subscribe("rollouts", after=3)) is None
    driver.store(*groups(30, 3))
    (waited,) = driver.say("beta", Ping(received_bytes=1 << 20))[1:]
    assert isinstance(waited.message, Rows)
    assert (rows(waited.message), waited.message.cursor, waited.message.gap_to) == ([], 3, 0)
    got = driver.pull(subscribe("rollouts", after=3, received_bytes=1 << 20))
    assert got is not None and (rows(got)[0], got.gap_to) == (4, 0)


def test_a_reading_that_nobody_wants_any_more_goes_nowhere() -> None:
    driver = ReplayDriver()
    driver.store(*groups(30))
    for leave in (Cancel(request=1000), Hello(name=AgentName("beta"), run_id="r")):
        driver.request_id = 999
        driver.answers = driver.say("beta", subscribe("rollouts"))
        assert driver.take()
        driver.say("beta", leave)
        driver.request_id = 999  # it is asked for anew, by the same number
        driver.say("beta", subscribe("rollouts", after=4))
        driver.read()
        assert driver.answers == []
        assert driver.take()
        driver.read()
        assert rows(driver.rows_of("beta")[0])[0] == 5


def test_a_disk_that_cannot_be_read_is_told() -> None:
    driver = ReplayDriver()
    driver.store(*groups(30))
    driver.answers = driver.say("beta", subscribe("rollouts"))
    assert driver.take()
    (answer,) = driver.hub.replay_failed("the index failed")
    assert isinstance(answer.message, Refused) and answer.message.reason == "storage"
    assert driver.hub.stats().waiting_gathers == 0


OPERATIONS = st.sampled_from(["large", "large", "small", "other", "commit", "commit", "fail", "pull", "take", "read", "drop"])


@settings(max_examples=25, deadline=None)
@example(script=["large"] * 40)
@example(script=["large", "commit"] * 30 + ["pull", "take", "large", "commit", "read"] * 20)
@given(st.lists(OPERATIONS, max_size=120))
def test_a_subscriber_that_catches_up_misses_nothing_and_gets_nothing_twice(script: list[str]) -> None:
    driver = ReplayDriver()
    seen: list[int] = []
    gaps: list[tuple[int, int]] = []
    published: list[int] = []
    after, asked, lossless = 0, False, True

    def take_answers() -> None:
        nonlocal after, asked
        for got in driver.rows_of("beta"):
            seen.extend(rows(got))
            if got.gap_to:
                gaps.append((after, got.gap_to))
            after, asked = got.cursor, False
        driver.answers = []

    for step, operation in enumerate([*script, *["read", "take", "commit", "pull", "read"] * (2 * len(script) + 4)]):
        match operation:
            case "large" | "small":
                driver.send(a_rollout_group("alpha", step, "p", tokens=60 if operation == "large" else 1))
                published.append(driver.hub._last_cursor)
            case "other":
                driver.send(rewards_of("beta", step, "p"))
            case "commit" | "fail":
                driver.commit(fails=operation == "fail")
                lossless = lossless and operation == "commit"
            case "pull" if not asked:
                asked = True
                driver.answers += driver.say("beta", subscribe("rollouts", after=after, max_bytes=7000))
            case "take":
                driver.take()
            case "read" if driver.reading is not None:
                driver.read()
            case "drop" if driver.disk.records:
                driver.disk.drop(min(driver.disk.records))
                lossless = False
        take_answers()
    assert seen == sorted(set(seen))
    told = {cursor for low, high in gaps for cursor in range(low + 1, high + 1)}
    oldest = min(seen, default=0)
    assert {cursor for cursor in published if cursor >= oldest} - set(seen) <= told
    assert not lossless or (seen == published and not gaps)
