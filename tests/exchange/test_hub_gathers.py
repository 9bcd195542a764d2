"""The hub on a fake clock: who gets which rows, and when."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import msgspec
import pytest
from hub_answers import gather, refusal, rows, two
from hypothesis import given, settings
from mutations import sealed

from exchange.errors import WireError
from exchange.messages import (
    Accepted,
    Bye,
    Ping,
    Pong,
    Publish,
    Rows,
)
from exchange.testing import a_rollout_group, a_success, rewards_of, step_prompts
from exchange.types import AgentName, Cursor, PromptId, Version
from exchange.wire import Outgoing, encode_record, hub_decoder


def test_filters_are_exact_on_typed_fields() -> None:
    driver = two()
    driver.join("gamma")
    for step, prompt in enumerate(("prompt/1", "prompt/10", "prompt/2")):
        driver.publish(rewards_of("alpha", step, prompt))
        driver.publish(a_success("beta", step, prompt))
    ask = driver.ask
    assert rows(ask("gamma", gather("rewards", prompt_ids=["prompt/1"]))) == [1]
    assert rows(ask("gamma", gather("rewards", "successes", prompt_ids=["prompt/10", "prompt/2"]))) == [3, 4, 5, 6]
    assert rows(ask("gamma", gather("rewards", "successes", agents=["beta"]))) == [2, 4, 6]
    assert rows(ask("gamma", gather("successes", min_step=1, max_step=1))) == [4]
    assert rows(ask("gamma", gather("rewards", after=3))) == [5]
    assert rows(ask("gamma", gather("rollouts"))) == []
    assert rows(ask("gamma", gather("rewards", prompt_ids=[]))) == []


def test_own_rows_come_only_when_asked_for_by_name() -> None:
    driver = two()
    driver.publish(rewards_of("alpha", 1, "p"))
    assert rows(driver.ask("alpha", gather())) == []
    assert rows(driver.ask("alpha", gather(agents=["alpha"]))) == [1]


def test_lag_is_counted_against_the_producers_newest_version() -> None:
    driver = two()
    for step in (3, 5, 4):
        driver.publish(rewards_of("alpha", step, "p"))
    driver.ask("alpha", Ping(step=7, version=Version(0, 7)))
    driver.ask("beta", Ping(step=100, version=Version(0, 100)))
    answer = driver.ask("beta", gather())
    assert isinstance(answer, Rows)
    assert [row.lag for row in answer.rows] == [4, 2, 3]
    assert rows(driver.ask("beta", gather(max_lag=3))) == [2, 3]
    assert rows(driver.ask("beta", gather(max_lag=0))) == []
    assert answer.newest == {"alpha": Version(0, 7), "beta": Version(0, 100)}


def test_age_runs_on_the_hubs_clock() -> None:
    driver = two(max_age_s=100.0)
    driver.publish(rewards_of("alpha", 1, "p"))
    driver.clock.advance(30)
    driver.publish(rewards_of("alpha", 2, "p"))
    driver.clock.advance(10)
    answer = driver.ask("beta", gather())
    assert isinstance(answer, Rows)
    assert [row.age_s for row in answer.rows] == [40.0, 10.0]
    assert rows(driver.ask("beta", gather(max_age_s=20.0))) == [2]
    driver.clock.advance(70)
    assert rows(driver.ask("beta", gather())) == [2]
    stats = driver.hub.stats()
    assert (stats.stored, stats.expired) == (1, 1)


def test_no_row_crosses_where_there_is_no_edge() -> None:
    edges = frozenset({("beta", "alpha", "successes"), ("alpha", "beta", "rewards")})
    driver = two(members=frozenset({"alpha", "beta"}), edges=edges)
    driver.publish(rewards_of("alpha", 1, "p"))
    driver.publish(a_success("alpha", 1, "p"))
    driver.publish(step_prompts("alpha", 1, "p"))
    got = driver.ask("beta", gather("rewards", "successes", "prompts", agents=["alpha", "beta"]))
    assert rows(got) == [2, 3], "successes have an edge, prompts need none"
    assert driver.hub.stats().workers[AgentName("beta")].withheld == 1
    assert rows(driver.ask("alpha", gather("rewards", agents=["alpha"]))) == [1], "one's own rows are no disclosure"
    waiting = driver.say("beta", gather("rewards", min_count=1, deadline_s=5.0))
    assert waiting == []
    driver.publish(rewards_of("alpha", 2, "p"))
    driver.clock.advance(5)
    (answer,) = driver.hub.tick()
    assert rows(answer.message) == []


def test_a_gather_waits_for_its_rows_and_no_longer() -> None:
    driver = two()
    assert driver.say("beta", gather("successes", prompt_ids=["q"], min_count=2, deadline_s=10.0)) == []
    assert driver.hub.next_deadline() == driver.clock.now + 10
    driver.publish(a_success("alpha", 1, "q"))
    driver.publish(a_success("alpha", 1, "p"))
    driver.publish(rewards_of("alpha", 1, "q"))
    record = encode_record(a_success("alpha", 2, "q"))
    out = driver.say("alpha", Publish(seq=4, body=record.body), record.frames)
    assert [type(item.message) for item in out] == [Accepted, Rows]
    assert rows(out[1].message) == [1, 4]
    assert driver.hub.next_deadline() is None


def test_at_the_deadline_fewer_rows_are_an_answer() -> None:
    driver = two()
    driver.publish(rewards_of("alpha", 1, "p"))
    driver.say("beta", gather(min_count=2, deadline_s=10.0))
    driver.clock.advance(9.9)
    assert driver.hub.tick() == []
    driver.clock.advance(0.1)
    (answer,) = driver.hub.tick()
    assert rows(answer.message) == [1]


@pytest.mark.parametrize("deadline_s", [float("nan"), float("inf"), 86401.0])
def test_a_deadline_by_which_no_clock_can_be_set_is_refused(deadline_s: float) -> None:
    with pytest.raises(ValueError, match="`deadline_s` must be <= 86400 seconds"):
        gather(deadline_s=deadline_s)
    hostile = msgspec.msgpack.encode({"type": "gather", "kinds": ["rewards"], "min_count": 1, "deadline_s": deadline_s})
    with pytest.raises(WireError, match="deadline_s"):
        hub_decoder().decode([memoryview(frame) for frame in sealed(hostile)])


def test_a_gather_of_a_worker_that_left_is_forgotten() -> None:
    driver = two()
    driver.say("beta", gather(min_count=1, deadline_s=10.0))
    driver.ask("beta", Bye())
    record = encode_record(rewards_of("alpha", 1, "p"))
    assert len(driver.say("alpha", Publish(seq=1, body=record.body), record.frames)) == 1
    assert driver.hub.stats().waiting_gathers == 0


def test_a_worker_may_not_pile_up_gathers() -> None:
    driver = two()
    answers = [driver.say("beta", gather(min_count=1, deadline_s=10.0)) for _ in range(17)]
    assert answers[:16] == [[]] * 16
    assert refusal(answers[16][0].message) == "too_many"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=30), st.integers(200, 3000))
def test_the_cursor_skips_nothing_and_repeats_nothing(bursts: list[int], max_bytes: int) -> None:
    driver = two()
    seen: list[int] = []
    cursor = Cursor(0)
    published = 0
    for burst in bursts:
        for _ in range(burst):
            published += 1
            driver.publish(rewards_of("alpha", published, f"p{published % 3}"))
        answer = driver.ask("beta", gather(after=cursor, max_bytes=max_bytes))
        assert isinstance(answer, Rows)
        assert answer.rows, "an answer always makes headway"
        assert len(answer.rows) == 1 or sum(len(row.body) + row.nbytes for row in answer.rows) <= max_bytes
        seen += rows(answer)
        cursor = answer.cursor
    while (answer := driver.ask("beta", gather(after=cursor, max_bytes=max_bytes))) and rows(answer):
        seen += rows(answer)
        cursor = answer.cursor  # type: ignore[union-attr]
    assert seen == list(range(1, published + 1))
    assert all(a < b for a, b in pairwise(seen))


def test_an_answer_never_outgrows_its_header() -> None:
    driver = two()
    for step in range(3000):
        driver.publish(rewards_of("alpha", step, "p"))
    answer = driver.ask("beta", gather())
    assert isinstance(answer, Rows) and answer.more
    assert len(msgspec.msgpack.encode(answer)) < 256 << 10


def test_a_worker_that_reads_nothing_is_sent_no_more() -> None:
    driver = two(credit_bytes=1 << 20, memory_bytes=64 << 20)
    for step in range(8):
        driver.publish(a_rollout_group("alpha", step, "p", tokens=4000))
    sent = 0
    for _ in range(100):
        answer = driver.ask("beta", gather("rollouts"))
        assert isinstance(answer, Rows)
        sent += sum(row.nbytes for row in answer.rows)
    assert sent < (1 << 20) + (8 << 20)
    assert isinstance(answer, Rows) and not answer.rows
    assert answer.more and answer.cursor == 0, "nothing is lost by asking"
    assert driver.say("beta", gather("rollouts", deadline_s=10.0)) == []
    (pong, late) = driver.say("beta", Ping(received_bytes=sent + 10_000))
    assert isinstance(pong.message, Pong) and len(rows(late.message)) == 8


def test_a_worker_that_was_overtaken_by_its_own_ping_has_still_read_what_that_said() -> None:
    driver = two(credit_bytes=1 << 20, memory_bytes=64 << 20)
    for step in range(8):
        driver.publish(a_rollout_group("alpha", step, "p", tokens=4000))
    assert len(rows(driver.ask("beta", gather("rollouts")))) == 8
    assert rows(driver.ask("beta", gather("rollouts"))) == []
    driver.say("beta", Ping(received_bytes=1 << 40))
    assert len(rows(driver.ask("beta", gather("rollouts", received_bytes=0)))) == 8
    assert rows(driver.ask("beta", gather("rollouts"))) == [], "more than all that it was sent it cannot have received"


def test_the_memory_is_bounded_and_every_record_is_accounted_for() -> None:
    driver = two(memory_bytes=1 << 20, max_age_s=50.0)
    for step in range(300):
        driver.publish(a_rollout_group("alpha", step, f"p{step}", tokens=100))
        driver.clock.advance(1)
        assert driver.hub.stats().stored_bytes <= 1 << 20
    driver.publish(rewards_of("alpha", 1, "p", epoch=9))
    driver.publish(rewards_of("alpha", 1, "p"), seq=1)
    stats = driver.hub.stats()
    worker = stats.workers[AgentName("alpha")]
    assert stats.evicted > 0 or stats.expired > 0
    assert sum(worker.accepted.values()) == stats.stored + stats.evicted + stats.expired == 300
    assert worker.published == sum(worker.accepted.values()) + sum(worker.refused.values()) + worker.duplicates
    answer = driver.ask("beta", gather("rollouts"))
    assert isinstance(answer, Rows) and answer.evicted_to == 300 - stats.stored


def test_a_lost_peer_is_gone_and_its_gathers_with_it() -> None:
    driver = two()
    driver.say("beta", gather(min_count=1, deadline_s=10.0))
    driver.hub.undeliverable(b"beta")
    stats = driver.hub.stats()
    assert (stats.undeliverable, stats.waiting_gathers) == (1, 0)
    assert stats.workers[AgentName("beta")].state == "gone"


def test_rows_of_many_records_share_frames() -> None:
    driver = two()
    for step in range(20):
        driver.publish(a_rollout_group("alpha", step, "p", tokens=100))
    (out,) = driver.say("beta", gather("rollouts"))
    assert isinstance(out, Outgoing) and len(out.payload) == 1
    assert isinstance(out.message, Rows) and len(out.message.rows) == 20
    assert all(row.offset % 64 == 0 for row in out.message.rows)


def test_prompts_are_found_by_each_of_their_ids() -> None:
    driver = two()
    driver.publish(step_prompts("alpha", 1, "p", "q"))
    assert rows(driver.ask("beta", gather("prompts", prompt_ids=[PromptId("q")]))) == [1]
