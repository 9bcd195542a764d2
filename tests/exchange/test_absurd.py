"""What no honest worker says, and any could: legal messages that must cost the hub, and other workers, nothing."""

from __future__ import annotations

import time

import msgspec
import pytest
from hub_answers import gather, refusal, rows, two
from test_commits import DurableDriver
from test_leases import handed, lease, leased, release, with_rewards
from test_requests import reply, request

from exchange.accounts import MAX_KINDS as MAX_COUNTED_KINDS
from exchange.errors import RecordTooLargeError
from exchange.lease_group import RETRY_S
from exchange.lease_messages import MAX_HELD
from exchange.message_base import MAX_KINDS
from exchange.messages import Commit, Committed, Gather, Lease, Ping, Publish, Serve, Settled, refused
from exchange.testing import HubDriver, a_rollout_group, rewards_of, step_prompts
from exchange.types import AgentName, PromptId
from exchange.wire import MAX_FRAMES, encode_message, encode_record

# Frames


def test_a_record_of_more_frames_than_its_arrays_can_have_is_refused() -> None:
    driver = two()
    record = encode_record(step_prompts("alpha", 1, "p"))
    assert refusal(driver.ask("alpha", Publish(seq=1, body=record.body), [b"x"] * 8000)) == "malformed"
    assert refusal(driver.ask("alpha", Publish(seq=2, body=record.body), [b""] * 2)) == "malformed"
    assert driver.hub.stats().stored == 0
    large = a_rollout_group("alpha", 1, "p", tokens=70_000)
    assert len(encode_record(large).frames) > 2
    driver.publish(large, seq=3)
    assert rows(driver.ask("beta", gather("rollouts"))) == [1]


def test_no_answer_has_more_frames_than_a_reader_takes() -> None:
    with pytest.raises(RecordTooLargeError, match="frames"):
        encode_message(Settled(), 1, [b"x"] * (MAX_FRAMES + 1))


# Filters


def test_a_gather_with_long_filters_costs_no_more_than_its_size() -> None:
    driver = two()
    for step in range(1000):
        driver.publish(rewards_of("alpha", step, f"p{step}"))
    names = [f"n{number}" for number in range(20_000)]
    started = time.process_time()
    assert rows(driver.ask("beta", gather(agents=[*names, "alpha"], min_step=998))) == [999, 1000]
    assert rows(driver.ask("beta", gather(*["rewards"] * 5000, prompt_ids=[*names, "p3"]))) == [4]
    for number in range(8):
        driver.say("beta", gather(prompt_ids=names, min_count=1, deadline_s=9.0, after=1000 + number))
    for step in range(50):
        driver.publish(rewards_of("alpha", step, "p"))
    assert time.process_time() - started < 2.0, "in the square of its size it takes a minute"


@pytest.mark.parametrize("message", [Gather, Lease])
def test_nobody_asks_for_more_kinds_than_there_can_be(message: type[Gather] | type[Lease]) -> None:
    kinds = [f"k{number}" for number in range(MAX_KINDS + 1)]
    fields = {"type": message.__struct_config__.tag, "id": 1, "group": "g", "lease_s": 1.0, "kinds": kinds}
    with pytest.raises(msgspec.ValidationError, match="kinds"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=message)


# Accounts


def test_made_up_kinds_of_requests_are_counted_together() -> None:
    driver = two()
    for number in range(2 * MAX_COUNTED_KINDS):
        kind = f"kind{number}"
        assert driver.ask("beta", Serve(kinds=(kind,))) == Settled()
        driver.say("alpha", request(number, body=msgspec.msgpack.encode({"type": f"{kind}/1"})))
        driver.say("beta", reply(number))
    (pair,) = driver.hub.stats().requests[AgentName("alpha")].pairs.values()
    assert len(pair) == MAX_COUNTED_KINDS + 1
    assert sum(each.answered for each in pair.values()) == 2 * MAX_COUNTED_KINDS


def test_a_kind_of_requests_has_a_name_and_no_book() -> None:
    driver = two()
    long = "k" * 1000
    assert refusal(driver.ask("beta", Serve(kinds=(long,)))) == "invalid"
    body = msgspec.msgpack.encode({"type": f"{long}/1"})
    assert refusal(driver.ask("alpha", request(1, body=body))) == "invalid"


# Leases


def test_a_lease_that_is_asked_for_twice_is_one_and_no_record_is_held_by_nobody() -> None:
    driver = with_rewards(0)
    driver.say("beta", lease(1, deadline_s=20.0))
    driver.say("beta", lease(1, deadline_s=20.0))
    for step in range(2):
        driver.publish(rewards_of("alpha", step, "p"))
    group = driver.hub.stats().groups["judges"]
    assert (group.leased, group.waiting) == (1, 1)
    assert leased(driver.ask("carol", lease(2))) == [(2, 1)]


def test_what_is_remembered_of_a_workers_word_is_bounded() -> None:
    for cursors, detail in ((tuple(range(MAX_HELD + 1)), ""), ((1,), "x" * 2000)):
        with pytest.raises(msgspec.ValidationError, match="at most"):
            release(1, "failed", *cursors, detail=detail)


def test_a_hub_does_not_run_in_circles_for_a_worker_that_cannot_take_what_it_may_have_again() -> None:
    driver = with_rewards(1, heartbeat_s=1.0)
    assert leased(driver.ask("beta", lease(1))) == [(1, 1)]
    driver.say("beta", release(1, "unsupported", 1))
    driver.say("beta", lease(2, deadline_s=60.0))
    # It gives no sign of life from here on, so it is handed nothing.
    driver.clock.advance(max(4.0, 2 * RETRY_S))
    assert handed(driver.hub.tick()) == {}
    deadline = driver.hub.next_deadline()
    assert deadline is not None and deadline > driver.clock()
    driver.say("beta", Ping())
    assert driver.hub.stats().groups["judges"].leased == 1


# Consumers


def test_a_consumer_that_is_told_back_stays_where_it_is_on_disk_too() -> None:
    driver = DurableDriver()
    for seq in range(1, 4):
        driver.send(rewards_of("alpha", seq, "p"), seq)
    driver.commit()
    assert driver.hub.commits is not None
    driver.say("beta", Commit(consumer="judge", cursor=msgspec.convert(3, int)))  # type: ignore[arg-type]
    driver.commit()
    driver.say("beta", Commit(consumer="judge", cursor=msgspec.convert(1, int)))  # type: ignore[arg-type]
    driver.hub.commits.take()
    assert dict(driver.hub.commits.told) == {("beta", "judge"): 3}
    (answer,) = driver.hub.committed()
    assert answer.message == Committed(cursor=msgspec.convert(3, int))  # type: ignore[arg-type]


# Texts


def test_a_text_that_is_no_unicode_is_told_as_far_as_it_is() -> None:
    """Names of files that are no UTF-8 come into errors with lone surrogates, which no message can carry."""
    told = refused("storage", "no space, got path='/data/\udcff'")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told)) == {
        "type": "refused",
        "reason": "storage",
        "detail": "no space, got path='/data/?'",
    }


def test_prompts_that_would_take_the_whole_memory_are_refused() -> None:
    driver = HubDriver(two(memory_bytes=1 << 20).hub.config)
    driver.join("alpha")
    driver.publish(step_prompts("alpha", 0, "p"))
    many = step_prompts("alpha", 1, *(PromptId(str(number)) for number in range(4000)))
    assert refusal(driver.publish(many)) == "too_large"
    assert driver.hub.stats().stored == 1
