"""The hub's side of leases, on a fake clock."""

from __future__ import annotations

import msgspec
import pytest
from hub_answers import hello, refusal, two

from exchange.lease_group import MAX_UNREADABLE, RETRY_S
from exchange.lease_messages import MAX_HELD
from exchange.leases import MAX_GROUPS, MAX_WAITING
from exchange.messages import AskDeadLetters, Bye, Cancel, DeadLetters, Lease, Leased, Ping, Release, Renew, Settled
from exchange.testing import HubDriver, a_rollout_group, rewards_of
from exchange.types import Cursor
from exchange.wire import Outgoing

GONE_S = 6.0


def lease(number: int = 1, **changes: object) -> Lease:
    plain = Lease(id=number, group="judges", kinds=frozenset({"rewards"}), lease_s=30.0)
    return msgspec.structs.replace(plain, **changes)


def release(number: int, outcome: str, *cursors: int, detail: str = "") -> Release:
    fields = {"group": "judges", "lease": number, "cursors": cursors, "outcome": outcome, "detail": detail}
    return msgspec.convert(fields, Release)


def leased(answer: object) -> list[tuple[int, int]]:
    """Cursor and number of deliveries of each row."""
    assert isinstance(answer, Leased), answer
    return [(row.cursor, count) for row, count in zip(answer.rows, answer.deliveries, strict=True)]


def handed(outgoing: list[Outgoing]) -> dict[str, list[tuple[int, int]]]:
    return {out.peer.decode(): leased(out.message) for out in outgoing if isinstance(out.message, Leased)}


def with_rewards(count: int, **config: object) -> HubDriver:
    driver = two(**config)
    driver.join("carol")
    for step in range(count):
        driver.publish(rewards_of("alpha", step, "p"))
    return driver


def test_a_request_waits_for_a_record_its_deadline_or_its_worker() -> None:
    driver = with_rewards(0)
    assert driver.say("beta", lease(1, deadline_s=5.0)) == []
    assert driver.say("carol", lease(2, deadline_s=9.0)) == []
    assert driver.hub.next_deadline() == driver.clock() + 5.0
    driver.clock.advance(5.0)
    assert handed(driver.hub.tick()) == {"beta": []}
    driver.say("beta", Ping())
    driver.say("carol", Ping())
    assert driver.say("beta", lease(3, deadline_s=1.0)) == []
    driver.say("beta", Cancel(request=driver.request_id))
    assert driver.say("beta", lease(4, deadline_s=1.0)) == []
    driver.say("beta", Bye())
    driver.publish(rewards_of("alpha", 0, "p"))
    assert leased(driver.ask("carol", lease(2))) == [(1, 1)], "carol has it, and is told again when she asks again"
    assert driver.hub.stats().groups["judges"].deliveries == 1


def test_a_lease_ends_with_its_time_unless_it_is_renewed() -> None:
    driver = with_rewards(1)
    assert leased(driver.ask("beta", lease(1, lease_s=4.0))) == [(1, 1)]
    driver.clock.advance(3.0)
    assert driver.ask("beta", Renew(lease=1)) == Settled()
    assert driver.say("carol", lease(2, deadline_s=9.0)) == []
    driver.clock.advance(3.0)
    driver.say("beta", Ping())
    assert handed(driver.hub.tick()) == {}, "signs of life renew nothing, and this lease was renewed"
    driver.say("carol", Ping())
    driver.clock.advance(1.0)
    assert handed(driver.hub.tick()) == {"carol": [(1, 2)]}
    assert refusal(driver.ask("beta", release(1, "done", 1))) == "lease_lost"
    assert refusal(driver.ask("beta", Renew(lease=1))) == "lease_lost"
    assert driver.ask("carol", release(2, "done", 1)) == Settled()
    assert driver.hub.stats().groups["judges"].done == 1


def test_a_late_word_is_refused_also_before_the_hub_has_looked_at_the_clock() -> None:
    driver = with_rewards(1)
    driver.ask("beta", lease(1, lease_s=4.0))
    driver.clock.advance(4.0)
    assert refusal(driver.ask("beta", release(1, "done", 1))) == "lease_lost"
    assert leased(driver.ask("beta", lease(2))) == [(1, 2)]


@pytest.mark.parametrize("ends", ["gone", "restarted", "left"])
def test_a_lease_ends_with_its_holder(ends: str) -> None:
    driver = with_rewards(1)
    for count in range(1, 6):
        peer = f"beta{count}" if ends == "restarted" and count > 1 else "beta"
        driver.say(peer, hello("beta"))
        assert leased(driver.ask(peer, lease(count))) == [(1, count)]
        if ends == "left":
            driver.say(peer, Bye())
            continue
        driver.clock.advance(GONE_S)
        if ends == "gone":
            driver.hub.tick()
    if ends == "restarted":
        driver.say("beta9", hello("beta"))
    driver.say("carol", hello("carol"))
    got = driver.ask("carol", AskDeadLetters(group="judges"))
    assert isinstance(got, DeadLetters)
    (letter,) = got.letters
    assert (letter.reason, letter.deliveries, letter.worker) == (ends, 5, "beta")
    assert leased(driver.ask("carol", lease(9))) == []


def test_words_that_come_again_after_a_break_change_nothing() -> None:
    driver = with_rewards(2)
    assert leased(driver.ask("beta", lease(1, count=2))) == [(1, 1), (2, 1)]
    assert leased(driver.ask("beta", lease(1, count=2))) == [(1, 1), (2, 1)]
    driver.say("beta", hello("beta"))
    assert leased(driver.ask("beta", lease(1, count=2))) == [(1, 1), (2, 1)]
    for _ in range(2):
        assert driver.ask("beta", release(1, "done", 1)) == Settled()
        assert driver.ask("beta", release(1, "failed", 2, 2)) == Settled()
    stats = driver.hub.stats().groups["judges"]
    assert (stats.done, stats.waiting, stats.deliveries) == (1, 1, 2)


def test_nobody_can_speak_for_another() -> None:
    driver = with_rewards(1)
    driver.ask("beta", lease(1))
    assert refusal(driver.ask("carol", release(1, "done", 1))) == "lease_lost"
    assert refusal(driver.ask("beta", release(1, "done", 1, 2))) == "lease_lost"
    assert refusal(driver.ask("beta", msgspec.structs.replace(release(1, "done", 1), group="others"))) == "lease_lost"
    assert driver.ask("beta", release(1, "done", 1)) == Settled()


def test_a_cancelled_request_gives_back_what_was_sent_meanwhile() -> None:
    driver = with_rewards(1)
    driver.ask("beta", lease(1))
    driver.say("beta", Cancel(request=driver.request_id))
    assert leased(driver.ask("carol", lease(2))) == [(1, 1)]


def test_an_unreadable_record_goes_to_another_and_comes_back_later_uncounted() -> None:
    driver = with_rewards(1)
    for attempt in range(7):
        driver.say("beta", Ping())
        assert leased(driver.ask("beta", lease(attempt))) == [(1, 1)]
        driver.ask("beta", release(attempt, "unsupported", 1, detail="rewards/2"))
        assert leased(driver.ask("beta", lease(100 + attempt))) == []
        assert driver.say("beta", lease(200 + attempt, deadline_s=100.0)) == []
        delay_s = min(RETRY_S * 2**attempt, 60.0)
        assert driver.hub.next_deadline() == driver.clock() + delay_s
        driver.say("beta", Cancel(request=driver.request_id))
        driver.clock.advance(delay_s)
    driver.say("carol", Ping())
    assert leased(driver.ask("carol", lease(1000))) == [(1, 1)]
    driver.ask("carol", release(1000, "returned", 1))
    driver.say("beta-anew", hello("beta"))
    assert leased(driver.ask("beta-anew", lease(1001))) == [(1, 1)], "a new process may know the type"


def test_a_worker_that_reads_nothing_of_a_kind_gets_no_more_of_it_for_now() -> None:
    driver = with_rewards(MAX_UNREADABLE + 3)
    for number in range(MAX_UNREADABLE):
        ((cursor, _),) = leased(driver.ask("beta", lease(number)))
        driver.ask("beta", release(number, "unsupported", cursor))
    assert leased(driver.ask("beta", lease(-1))) == []
    assert len(leased(driver.ask("carol", lease(-2, count=MAX_UNREADABLE)))) == MAX_UNREADABLE
    assert leased(driver.ask("beta", lease(-3))) == [(MAX_UNREADABLE + 1, 1)]


def test_what_a_worker_holds_is_bounded_in_number_and_bytes() -> None:
    driver = with_rewards(MAX_HELD + 5, credit_bytes=1 << 20)
    assert len(leased(driver.ask("beta", lease(1, count=MAX_HELD)))) == MAX_HELD
    assert driver.say("beta", lease(2, deadline_s=1.0)) == []
    assert handed(driver.say("beta", release(1, "done", 1)))["beta"] == [(MAX_HELD + 1, 1)]
    driver = two(credit_bytes=100_000)
    for step in range(3):
        driver.publish(a_rollout_group("alpha", step, "p", tokens=500))
    assert len(leased(driver.ask("beta", lease(1, kinds=("rollouts",), count=3, received_bytes=1 << 30)))) == 1


def test_groups_and_waiting_requests_are_bounded() -> None:
    driver = with_rewards(0)
    for number in range(MAX_WAITING):
        assert driver.say("beta", lease(number, deadline_s=9.0)) == []
    assert refusal(driver.ask("beta", lease(99, deadline_s=9.0))) == "too_many"
    for number in range(MAX_GROUPS - 1):
        driver.ask("carol", lease(number, group=f"group {number}"))
    assert refusal(driver.ask("carol", lease(99, group="one more"))) == "too_many"
    assert refusal(driver.ask("carol", lease(99, count=MAX_HELD + 1))) == "invalid"


def test_a_held_record_survives_the_stores_forgetting_and_a_waiting_one_is_counted_as_lost() -> None:
    driver = two(memory_bytes=1 << 15)
    driver.publish(rewards_of("alpha", 0, "p"))
    driver.publish(rewards_of("alpha", 1, "p"))
    assert leased(driver.ask("beta", lease(1))) == [(1, 1)]
    for step in range(2, 20):
        driver.publish(a_rollout_group("alpha", step, "p", tokens=100))
    assert driver.ask("beta", release(1, "failed", 1)) == Settled()
    assert leased(driver.ask("beta", lease(2, count=5))) == [(1, 2)]
    stats = driver.hub.stats().groups["judges"]
    assert (stats.matching, stats.leased, stats.lost) == (2, 1, 1)


def test_a_worker_that_does_not_read_is_sent_no_more() -> None:
    driver = two(credit_bytes=100_000)
    for step in range(9):
        driver.publish(a_rollout_group("alpha", step, "p", tokens=300))
    asked = lease(1, kinds=("rollouts",))
    sent = 0
    while handed(driver.say("beta", msgspec.structs.replace(asked, id=sent, deadline_s=9.0))):
        driver.ask("beta", release(sent, "done", sent + 1))
        sent += 1
    assert 1 < sent < 9
    assert handed(driver.say("beta", Ping(received_bytes=1 << 30))) == {"beta": [(sent + 1, 1)]}


def test_cursors_said_twice_are_taken_once() -> None:
    driver = with_rewards(1)
    driver.ask("beta", lease(1))
    assert driver.ask("beta", release(1, "done", 1, 1)) == Settled()
    assert Cursor(1) == driver.hub.stats().cursor
