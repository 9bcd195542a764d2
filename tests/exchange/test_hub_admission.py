"""The hub on a fake clock: who may join, and what is taken."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import pytest
from hub_answers import accepted, gather, hello, refusal, rows, two
from hypothesis import given, settings

from exchange.config import HubConfig
from exchange.messages import (
    AskStats,
    Bye,
    Goodbye,
    Ping,
    Pong,
    Publish,
    Refused,
    Rows,
    Unknown,
    Welcome,
)
from exchange.stats import HubStats
from exchange.testing import HubDriver, a_rollout_group, rewards_of, step_prompts
from exchange.types import AgentName, Version
from exchange.wire import encode_record

# Who takes part


def test_nothing_is_handled_before_hello() -> None:
    driver = HubDriver()
    for message in (Publish(seq=1, body=b""), gather(), Ping(), AskStats(), Bye()):
        assert driver.ask("stranger", message) == Unknown()


def test_a_worker_of_another_run_is_refused() -> None:
    answer = HubDriver().ask("alpha", hello("alpha", run_id="r0"))
    assert answer == Refused(reason="run_id", detail="this hub serves run 'r', got run_id='r0': is an older run still alive?")


def test_only_members_and_observers_may_join() -> None:
    driver = HubDriver(HubConfig(run_id="r", members=frozenset({"alpha"})))
    assert isinstance(driver.ask("alpha", hello("alpha")), Welcome)
    assert refusal(driver.ask("gamma", hello("gamma"))) == "unknown_member"
    assert isinstance(driver.ask("up", hello("up", observer=True)), Welcome)
    assert isinstance(driver.ask("up", AskStats()), HubStats)
    assert refusal(driver.ask("up", gather())) == "observer"
    assert set(driver.hub.stats().workers) == {"alpha"}


def test_an_observer_takes_no_workers_name_and_so_takes_nothing_along_when_it_leaves() -> None:
    driver = two()
    driver.publish(rewards_of("alpha", 1, "p"))
    driver.ask("alpha", Bye())
    assert refusal(driver.ask("spy", hello("alpha", observer=True))) == "duplicate_name"
    assert rows(driver.ask("beta", gather())) == [1]
    assert isinstance(driver.ask("alpha-2", hello("alpha")), Welcome)


def test_a_living_name_is_not_taken_over_and_a_dead_one_is() -> None:
    driver = two(heartbeat_s=2.0)
    assert refusal(driver.ask("alpha-2", hello("alpha"))) == "duplicate_name"
    driver.clock.advance(5.9)
    assert driver.hub.stats().workers[AgentName("alpha")].state == "suspect"
    assert refusal(driver.ask("alpha-2", hello("alpha"))) == "duplicate_name"
    driver.clock.advance(0.1)
    assert driver.hub.stats().workers[AgentName("alpha")].state == "gone"
    answer = driver.ask("alpha-2", hello("alpha"))
    assert isinstance(answer, Welcome) and answer.epoch == 1
    assert driver.ask("alpha", Ping()) == Unknown(), "the old incarnation is fenced"


def test_heartbeats_keep_a_worker_alive_and_bye_frees_its_name() -> None:
    driver = two(heartbeat_s=2.0)
    for _ in range(10):
        driver.clock.advance(3.0)
        assert driver.ask("alpha", Ping()) == Pong()
    assert refusal(driver.ask("alpha-2", hello("alpha"))) == "duplicate_name"
    assert driver.ask("alpha", Bye()) == Goodbye()
    assert driver.hub.stats().workers[AgentName("alpha")].state == "left"
    assert isinstance(driver.ask("alpha-2", hello("alpha")), Welcome)


def test_a_worker_that_was_silent_comes_back_as_itself() -> None:
    driver = two(heartbeat_s=2.0)
    driver.publish(rewards_of("alpha", 1, "p"))
    driver.clock.advance(100)
    assert driver.hub.stats().workers[AgentName("alpha")].state == "gone"
    again = driver.ask("alpha", hello("alpha", epoch=0, first_seq=1))
    assert isinstance(again, Welcome) and again.epoch == 0
    assert accepted(driver.publish(rewards_of("alpha", 1, "p"), seq=1)).duplicate


def test_one_peer_cannot_have_two_names() -> None:
    assert refusal(two().ask("alpha", hello("gamma"))) == "duplicate_name"


def test_strangers_cannot_fill_the_table_of_members() -> None:
    driver = HubDriver()
    answers = [driver.ask(f"w{i}", hello(f"w{i}")) for i in range(300)]
    assert sum(isinstance(answer, Welcome) for answer in answers) == 256
    assert refusal(answers[-1]) == "full"


def test_progress_is_seen_with_its_age() -> None:
    driver = two()
    driver.ask("alpha", Ping(step=4, version=Version(0, 5)))
    driver.clock.advance(1.5)
    driver.ask("alpha", Ping(step=4, version=Version(0, 5)))
    stats = driver.hub.stats().workers[AgentName("alpha")]
    assert (stats.step, stats.version, stats.since_progress_s, stats.silent_s) == (4, Version(0, 5), 1.5, 0.0)
    assert driver.hub.stats().workers[AgentName("beta")].since_progress_s is None


# What is taken


def test_a_resent_record_is_stored_once_and_answered_alike() -> None:
    driver = two()
    first = accepted(driver.publish(rewards_of("alpha", 1, "p"), seq=1))
    again = accepted(driver.publish(rewards_of("alpha", 1, "p"), seq=1))
    assert (again.cursor, again.duplicate) == (first.cursor, True)
    assert rows(driver.ask("beta", gather())) == [first.cursor]


def test_a_resent_refusal_stays_a_refusal() -> None:
    driver = two()
    for _ in range(2):
        assert refusal(driver.publish(rewards_of("alpha", 1, "p", epoch=3), seq=1)) == "future"
    stats = driver.hub.stats().workers[AgentName("alpha")]
    assert (stats.published, stats.refused, stats.duplicates) == (2, {"future": 1}, 1)


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(1, 13)), st.lists(st.integers(1, 12), max_size=10))
def test_records_in_any_order_are_taken_exactly_once(order: list[int], again: list[int]) -> None:
    driver = two(credit_messages=12)
    for seq in [*order, *again]:
        answer = accepted(driver.publish(rewards_of("alpha", seq, "p"), seq=seq))
        assert answer.seq == seq
    gathered = driver.ask("beta", gather())
    assert len(rows(gathered)) == 12
    stats = driver.hub.stats().workers[AgentName("alpha")]
    assert stats.duplicates == len(again)
    assert stats.published == sum(stats.accepted.values()) + stats.duplicates


def test_a_record_that_comes_back_long_after_its_answer_is_still_known() -> None:
    driver = two(credit_messages=2)
    for seq in range(1, 20):
        accepted(driver.publish(rewards_of("alpha", seq, "p"), seq=seq))
    again = accepted(driver.publish(rewards_of("alpha", 1, "p"), seq=1))
    assert (again.duplicate, again.cursor) == (True, 0), "where it is was forgotten, that it is there was not"
    assert len(rows(driver.ask("beta", gather()))) == 19


def test_sequence_numbers_far_ahead_are_not_remembered() -> None:
    driver = two(credit_messages=4)
    assert refusal(driver.publish(rewards_of("alpha", 1, "p"), seq=9)) == "window"
    with pytest.raises(ValueError, match="seq=-1"):
        Publish(seq=-1, body=b"")
    accepted(driver.publish(rewards_of("alpha", 1, "p"), seq=8))


def test_records_are_fenced_by_epoch() -> None:
    driver = two(heartbeat_s=1.0)
    accepted(driver.publish(rewards_of("alpha", 100, "p")))
    driver.clock.advance(10)
    driver.ask("alpha", hello("other"))  # takes no effect: the peer has a name
    assert isinstance(driver.ask("alpha-2", hello("alpha")), Welcome)
    record = encode_record(rewards_of("alpha", 101, "p", epoch=0))
    assert refusal(driver.ask("alpha-2", Publish(seq=1, body=record.body), record.frames)) == "fenced"
    record = encode_record(rewards_of("alpha", 0, "p", epoch=1))
    accepted(driver.ask("alpha-2", Publish(seq=2, body=record.body), record.frames))
    answer = driver.ask("beta", gather(max_lag=1000))
    assert isinstance(answer, Rows)
    assert [row.lag for row in answer.rows] == [0], "a restarted count makes old rows older, never newer"
    answer = driver.ask("beta", gather())
    assert isinstance(answer, Rows) and [row.lag for row in answer.rows] == [None, 0]
    assert answer.newest[AgentName("alpha")] == Version(1, 0)


@pytest.mark.parametrize(
    ("experience", "reason"),
    [
        (rewards_of("beta", 1, "p"), "not_yours"),
        (rewards_of("alpha", -1, "p"), "invalid"),
        (rewards_of("alpha", 1, "p", epoch=1), "future"),
    ],
)
def test_what_does_not_fit_its_producer_is_refused(experience: object, reason: str) -> None:
    record = encode_record(experience)  # type: ignore[arg-type]
    driver = two()
    assert refusal(driver.ask("alpha", Publish(seq=1, body=record.body), record.frames)) == reason


def test_records_that_are_not_whole_are_refused_one_by_one() -> None:
    driver = two()
    good = encode_record(a_rollout_group("alpha", 1, "p"))
    fields = msgspec.msgpack.decode(encode_record(step_prompts("alpha", 1, "p")).body)
    unknown = msgspec.msgpack.encode(fields | {"type": "critiques"})
    assert refusal(driver.ask("alpha", Publish(seq=1, body=good.body[:-8]), good.frames)) == "malformed"
    assert refusal(driver.ask("alpha", Publish(seq=2, body=unknown))) == "unsupported"
    assert refusal(driver.ask("alpha", Publish(seq=3, body=b"\xc1"))) == "malformed"
    accepted(driver.ask("alpha", Publish(seq=4, body=good.body), good.frames))


def test_a_record_that_would_take_the_whole_memory_is_refused() -> None:
    driver = two(memory_bytes=1 << 20)
    assert refusal(driver.publish(a_rollout_group("alpha", 1, "p", tokens=20_000))) == "too_large"


def test_long_texts_of_strangers_do_not_come_back() -> None:
    record = encode_record(rewards_of("x" * 100_000, 1, "p"))
    answer = two().ask("alpha", Publish(seq=1, body=record.body), record.frames)
    assert isinstance(answer, Refused) and len(answer.detail) < 1100
