"""Durable publications: answered after the commit that holds them, once each, refused when the disk fails."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exchange.config import HubConfig
from exchange.hub import Hub
from exchange.messages import Accepted, Bye, Commit, Committed, Gather, Publish, Refused, Rows
from exchange.stats import HubStats
from exchange.testing import HubDriver, a_rollout_group, rewards_of
from exchange.types import AgentName, AnyExperience, Cursor
from exchange.wire import Outgoing, encode_record


class DurableDriver(HubDriver):
    """A driver of a hub with a disk that is driven by hand."""

    def __init__(self, config: HubConfig | None = None) -> None:
        super().__init__(config)
        self.hub = Hub(self.hub.config, clock=self.clock, durable=True)
        self.join("alpha", "beta")

    def send(self, experience: AnyExperience, seq: int, *, durable: bool = True) -> list[Outgoing]:
        record = encode_record(experience)
        return self.say(experience.agent, Publish(seq=seq, body=record.body, durable=durable), record.frames)

    def commit(self) -> list[Outgoing]:
        assert self.hub.commits is not None
        self.hub.commits.take()
        return self.hub.committed()


def assert_conserved(stats: HubStats) -> None:
    """accepted + recalled = stored + evicted + expired + committing, in all and for every producer and kind."""
    accepted = {name: worker.accepted for name, worker in stats.workers.items()}
    shares = [(name, kind, share) for name, kinds in stats.records.items() for kind, share in kinds.items()]
    for name, kind, share in shares:
        there = share.stored + share.evicted + share.expired + share.committing
        assert accepted[name].get(kind, 0) + share.recalled == there
    total = sum(sum(each.values()) for each in accepted.values())
    assert total + stats.recalled == stats.stored + stats.evicted + stats.expired + stats.committing
    assert stats.committing == sum(share.committing for *_, share in shares)
    for worker in stats.workers.values():
        assert worker.published == sum(worker.accepted.values()) + sum(worker.refused.values()) + worker.duplicates


def rows_of(driver: DurableDriver) -> list[int]:
    return rows_in(driver.ask("beta", Gather(kinds=frozenset({"rewards"}))))


def rows_in(rows: object) -> list[int]:
    assert isinstance(rows, Rows)
    return [row.cursor for row in rows.rows]


def test_a_durable_record_is_seen_and_answered_once_it_is_on_disk() -> None:
    driver = DurableDriver()
    assert driver.send(rewards_of("alpha", 0, "p"), 1) == []
    assert rows_of(driver) == []
    (answer,) = driver.commit()
    assert (answer.peer, answer.message) == (b"alpha", Accepted(seq=1, cursor=Cursor(1)))
    assert rows_of(driver) == [1]
    assert driver.commit() == []


def test_an_accepted_record_is_answered_at_once_and_seen_in_its_place() -> None:
    """Readers go by cursors: a record that came later is not shown before one that the disk still has."""
    driver = DurableDriver()
    driver.send(rewards_of("alpha", 0, "p"), 1)
    (answer,) = driver.send(rewards_of("alpha", 1, "p"), 2, durable=False)
    assert answer.message == Accepted(seq=2, cursor=Cursor(2))
    assert rows_of(driver) == []
    assert [out.message for out in driver.commit()] == [Accepted(seq=1, cursor=Cursor(1))]
    assert rows_of(driver) == [1, 2]


def test_a_waiting_reader_is_woken_by_the_commit() -> None:
    driver = DurableDriver()
    assert driver.say("beta", Gather(kinds=frozenset({"rewards"}), min_count=1, deadline_s=9)) == []
    driver.send(rewards_of("alpha", 0, "p"), 1)
    answers = driver.commit()
    assert [(out.peer, type(out.message)) for out in answers] == [(b"alpha", Accepted), (b"beta", Rows)]


def test_a_record_sent_again_before_its_commit_has_one_place_and_two_answers() -> None:
    driver = DurableDriver()
    driver.send(rewards_of("alpha", 0, "p"), 1)
    assert driver.send(rewards_of("alpha", 0, "p"), 1) == []
    assert driver.hub.commits is not None
    driver.hub.commits.take()
    assert driver.send(rewards_of("alpha", 0, "p"), 1) == []  # also while the group is being written
    answers = driver.hub.committed()
    assert [answer.message for answer in answers] == [Accepted(seq=1, cursor=Cursor(1))] * 3
    assert len({answer.request_id for answer in answers}) == 3
    (late,) = driver.send(rewards_of("alpha", 0, "p"), 1)
    assert isinstance(late.message, Accepted) and late.message.duplicate
    assert driver.hub.stats().stored == 1


def test_one_group_at_a_time_in_the_order_of_cursors() -> None:
    driver = DurableDriver()
    for seq in (1, 2, 3):
        driver.send(rewards_of("alpha", seq, "p"), seq)
    assert driver.hub.commits is not None
    group = driver.hub.commits.take()
    driver.send(rewards_of("alpha", 4, "p"), 4)
    assert [each.seq for each in group] == [1, 2, 3]
    assert driver.hub.commits.take() == ()
    assert len(driver.hub.committed()) == 3
    assert [each.seq for each in driver.hub.commits.take()] == [4]


def test_a_failed_commit_refuses_who_waited_also_when_asked_again() -> None:
    driver = DurableDriver()
    driver.send(rewards_of("alpha", 0, "p"), 1)
    driver.send(rewards_of("alpha", 1, "p"), 2, durable=False)
    assert driver.hub.commits is not None
    driver.hub.commits.take()
    (refusal,) = driver.hub.commit_failed("no space left on /x")
    assert isinstance(refusal.message, Refused)
    assert (refusal.message.reason, refusal.message.detail) == ("storage", "no space left on /x")
    (again,) = driver.send(rewards_of("alpha", 0, "p"), 1)
    assert again.message == refusal.message
    assert driver.send(rewards_of("alpha", 2, "p"), 3) == []
    assert rows_of(driver) == [2]  # what was only accepted is kept in memory; what was refused is not seen
    assert len(driver.commit()) == 1
    assert rows_of(driver) == [2, 3]
    assert (driver.hub.commits.committed, driver.hub.commits.failed) == (1, 2)


def test_when_the_disk_is_far_behind_nobody_is_answered_before_it() -> None:
    driver = DurableDriver(HubConfig(run_id="r", credit_bytes=40_000))
    group = a_rollout_group("alpha", 0, "p", completions=8, tokens=256)
    assert len(driver.send(group, 1, durable=False)) == 1
    assert len(driver.send(group, 2, durable=False)) == 1
    assert driver.send(group, 3, durable=False) == []
    assert len(driver.commit()) == 1


def test_a_consumer_has_moved_once_that_is_on_disk() -> None:
    driver = DurableDriver()
    for seq in (1, 2, 3):
        driver.send(rewards_of("alpha", seq, "p"), seq)
    driver.commit()
    judge = Gather(kinds=frozenset({"rewards"}), consumer="judge")
    assert driver.say("beta", Commit(consumer="judge", cursor=Cursor(2))) == []
    assert driver.say("beta", Commit(consumer="judge", cursor=Cursor(1))) == []
    assert driver.hub.commits is not None and len(driver.hub.commits) == 1
    assert len(rows_in(driver.ask("beta", judge))) == 3
    assert driver.hub.commits.take() == ()
    assert driver.hub.commits.told == {(AgentName("beta"), "judge"): 2}
    assert driver.say("beta", Commit(consumer="judge", cursor=Cursor(3))) == []
    assert [out.message for out in driver.hub.committed()] == [Committed(cursor=Cursor(2))] * 2
    assert rows_in(driver.ask("beta", judge)) == [3]
    driver.hub.commits.take()
    (refusal,) = driver.hub.commit_failed("full")
    assert isinstance(refusal.message, Refused) and refusal.message.reason == "storage"
    assert rows_in(driver.ask("beta", judge)) == [3]
    assert driver.say("beta", Commit(consumer="judge", cursor=Cursor(1))) == []
    assert [out.message for out in driver.commit()] == [Committed(cursor=Cursor(2))], "it never goes back"


def test_what_waits_of_consumers_is_bounded() -> None:
    driver = DurableDriver()
    answers = [driver.say("beta", Commit(consumer=f"c{i}", cursor=Cursor(0))) for i in range(65)]
    answers += [driver.say("beta", Commit(consumer="c0", cursor=Cursor(0))) for _ in range(16)]
    refusals = [out.message for each in answers for out in each]
    assert [type(each) for each in refusals] == [Refused, Refused]
    assert len(driver.commit()) == len(answers) - 2


def test_retention_keeps_what_living_consumers_need() -> None:
    driver = DurableDriver()
    for seq in range(1, 10):
        driver.send(rewards_of("alpha", seq, "p"), seq)
    driver.commit()
    assert driver.hub.keep_from() is None
    for name, consumer, cursor in (("beta", "judge", 4), ("beta", "other", 6), ("alpha", "own", 8)):
        driver.say(name, Commit(consumer=consumer, cursor=Cursor(cursor)))
    driver.commit()
    assert driver.hub.keep_from() == 5
    driver.say("beta", Bye())
    assert driver.hub.keep_from() == 9
    driver.clock.advance(100)
    assert driver.hub.keep_from() is None


def test_a_hub_without_a_disk_refuses_durable_records() -> None:
    driver = HubDriver()
    driver.join("alpha")
    record = encode_record(rewards_of("alpha", 0, "p"))
    answer = driver.ask("alpha", Publish(seq=1, body=record.body, durable=True), record.frames)
    assert isinstance(answer, Refused) and answer.reason == "not_durable"


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["send", "again", "accepted", "take", "done", "fail"]), max_size=40))
def test_every_request_is_answered_exactly_once(steps: list[str]) -> None:
    driver = DurableDriver()
    assert driver.hub.commits is not None
    seq, answers = 0, []
    for step in steps:
        assert_conserved(driver.hub.stats())
        if step in ("send", "accepted") or (step == "again" and not seq):
            seq += 1
            answers += driver.send(rewards_of("alpha", seq, "p"), seq, durable=step != "accepted")
        elif step == "again":
            answers += driver.send(rewards_of("alpha", seq, "p"), seq)
        elif step == "take":
            driver.hub.commits.take()
        else:
            answers += driver.hub.committed() if step == "done" else driver.hub.commit_failed("full")
    answers += driver.hub.committed() + driver.commit()
    assert_conserved(driver.hub.stats())
    assert driver.hub.stats().committing == 0
    asked = sum(step in ("send", "again", "accepted") for step in steps)
    assert len(answers) == len({answer.request_id for answer in answers}) == asked
    assert driver.hub.commits.waiting_bytes == 0


def test_a_worker_that_ignores_its_credit_cannot_fill_the_hub_while_the_disk_is_behind() -> None:
    driver = DurableDriver(HubConfig(run_id="r", credit_bytes=1 << 16))
    record = a_rollout_group("alpha", 0, "p", tokens=500)
    answers = [answer for seq in range(1, 100) for answer in driver.send(record, seq)]
    refusals = [out.message for out in answers if isinstance(out.message, Refused)]
    assert refusals and {each.reason for each in refusals} == {"window"}
    assert driver.hub.commits is not None and driver.hub.commits.waiting_bytes < 4 << 16
    driver.commit()
    assert not any(isinstance(out.message, Refused) for out in driver.send(record, 99)), "the same number again is no duplicate"
