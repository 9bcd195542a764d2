"""Subscriptions: replay and live tail are one, nothing is skipped or comes twice, and what is missing is told."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Iterable, Sequence

import hypothesis.strategies as st
import pytest
from hub_answers import gather, hello, refusal, rows, two
from hypothesis import given, settings

import exchange
from exchange.errors import GapError
from exchange.messages import Cancel, Commit, Committed, Gather, Ping, RowHeader, Rows
from exchange.reading import RowReader, RowsAnswer
from exchange.rows import RawRow, Row
from exchange.subscription import AHEAD_BYTES, Subscription
from exchange.testing import FakeClock, HubDriver, a_rollout_group, a_success, rewards_of
from exchange.types import Cursor


def gap_to(answer: object) -> int:
    assert isinstance(answer, Rows), answer
    return answer.gap_to


def fill(driver: HubDriver, steps: range, agent: str = "alpha") -> None:
    for step in steps:
        driver.publish(a_rollout_group(agent, step, "p", tokens=200))


def test_a_gap_counts_only_for_the_kinds_and_agents_that_were_asked_for() -> None:
    driver = two(memory_bytes=1 << 20)
    driver.publish(rewards_of("alpha", 0, "p"))
    driver.publish(rewards_of("beta", 0, "p"))
    fill(driver, range(60))
    lost = driver.hub.stats().cursor - driver.hub.stats().stored
    assert gap_to(driver.ask("beta", gather("rollouts", after=5))) == lost
    assert gap_to(driver.ask("beta", gather("rewards", after=5))) == 0
    assert gap_to(driver.ask("beta", gather("rewards", "rollouts", agents=["beta"], after=1))) == 2
    assert gap_to(driver.ask("beta", gather("rewards", after=1))) == 0, "beta's own row is not its to miss"
    assert gap_to(driver.ask("beta", gather("rollouts", after=lost))) == 0
    assert gap_to(driver.ask("beta", gather("rollouts"))) == 0, "from the start is from the oldest there is"


def test_rows_that_were_looked_at_while_waiting_are_no_gap() -> None:
    driver = two(memory_bytes=1 << 20)
    fill(driver, range(3))
    assert driver.say("beta", gather("rollouts", prompt_ids=["q"], after=3, min_count=1, deadline_s=10.0)) == []
    fill(driver, range(60))
    driver.clock.advance(10)
    (late,) = driver.hub.tick()
    assert rows(late.message) == [] and gap_to(late.message) == 0
    assert driver.hub.stats().evicted > 3


def test_rows_that_went_while_the_worker_did_not_read_are_a_gap() -> None:
    driver = two(memory_bytes=1 << 20, credit_bytes=1 << 16)
    fill(driver, range(20))
    sent = driver.say("beta", gather("rollouts", max_bytes=1 << 20))[0]
    nbytes = sum(memoryview(frame).nbytes for frame in sent.payload)
    assert driver.say("beta", gather("rollouts", after=20, min_count=1, deadline_s=10.0)) == []
    fill(driver, range(60))
    _, late = driver.say("beta", Ping(received_bytes=nbytes))
    assert rows(late.message)[0] > 21 and gap_to(late.message) == rows(late.message)[0] - 1


def test_a_row_that_fitted_and_went_before_there_were_enough_is_a_gap() -> None:
    driver = two(memory_bytes=1 << 20)
    fill(driver, range(3))
    assert driver.say("beta", gather("rollouts", after=2, max_step=2, min_count=2, deadline_s=10.0)) == []
    fill(driver, range(10, 80))
    driver.clock.advance(10)
    (late,) = driver.hub.tick()
    assert rows(late.message) == [] and gap_to(late.message) > 3


def test_a_reader_of_an_earlier_hub_is_told_that_rows_may_be_gone() -> None:
    driver = HubDriver()
    driver.hub = type(driver.hub)(driver.hub.config, clock=driver.clock, first_cursor=Cursor(1000))
    driver.join("alpha", "beta")
    assert gap_to(driver.ask("beta", gather(after=17))) == 999
    assert gap_to(driver.ask("beta", gather(after=999))) == gap_to(driver.ask("beta", gather())) == 0


def test_a_named_consumer_goes_on_behind_its_last_commit_and_never_back() -> None:
    driver = two()
    for step in range(5):
        driver.publish(rewards_of("alpha", step, "p"))
    assert rows(driver.ask("beta", gather(consumer="judge"))) == [1, 2, 3, 4, 5]
    for cursor, stands in ((3, 3), (2, 3)):
        assert driver.ask("beta", Commit(consumer="judge", cursor=Cursor(cursor))) == Committed(cursor=Cursor(stands))
    assert rows(driver.ask("beta", gather(consumer="judge"))) == [4, 5]
    assert rows(driver.ask("beta", gather(consumer="other"))) == [1, 2, 3, 4, 5]
    assert rows(driver.ask("beta", gather(consumer="judge", after=1))) == [2, 3, 4, 5], "an own cursor goes before"
    assert rows(driver.ask("alpha", gather(consumer="judge", agents=["alpha"]))) == [1, 2, 3, 4, 5], "names are a worker's own"
    assert refusal(driver.ask("beta", Commit(consumer="judge", cursor=Cursor(6)))) == "invalid"
    for number in range(63):
        driver.ask("beta", Commit(consumer=f"c{number}", cursor=Cursor(1)))
    assert refusal(driver.ask("beta", Commit(consumer="one more", cursor=Cursor(1)))) == "too_many"
    with pytest.raises(ValueError, match="consumer"):
        Commit(consumer="", cursor=Cursor(1))
    with pytest.raises(ValueError, match="consumer"):
        Gather(kinds=frozenset({"rewards"}), consumer="x" * 65)


def test_a_cancelled_gather_waits_no_longer() -> None:
    driver = two()
    driver.say("beta", gather(min_count=1, deadline_s=10.0))
    assert driver.say("alpha", Cancel(request=3)) == driver.say("beta", Cancel(request=99)) == []
    assert driver.hub.stats().waiting_gathers == 1, "neither of another worker nor of another request"
    assert driver.say("beta", Cancel(request=3)) == []
    assert driver.hub.stats().waiting_gathers == 0 and driver.hub.next_deadline() is None


def test_a_worker_that_says_hello_again_has_no_gather_waiting_from_before() -> None:
    driver = two()
    driver.say("beta", gather(min_count=1, deadline_s=10.0))
    driver.ask("beta", hello("beta"))
    assert driver.hub.stats().waiting_gathers == 0, "its process may be a new one, which counts its requests anew"


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 60) | st.none(), max_size=40), st.integers(1 << 12, 1 << 15))
def test_a_reader_gets_every_row_once_or_is_told_up_to_where_some_are_gone(script: list[int | None], max_bytes: int) -> None:
    """A number publishes that many rows of 1.4 kB into a memory of 64 KiB, None reads once."""
    driver = two(memory_bytes=1 << 16)
    published, cursor, seen, told = 0, 0, set[int](), set[int]()
    for burst in [*script, *[None] * 80]:
        if burst is not None:
            for _ in range(burst):
                published += 1
                driver.publish(a_rollout_group("alpha", published, "p", tokens=4))
            cursor = cursor or published  # the position is only one's own from the first row on
            continue
        answer = driver.ask("beta", gather("rollouts", after=cursor, max_bytes=max_bytes))
        assert isinstance(answer, Rows)
        assert seen.isdisjoint(rows(answer))
        first = cursor
        seen |= set(rows(answer))
        told |= set(range(first + 1, answer.gap_to + 1)) if cursor else set(range(1, published + 1)) - set(rows(answer))
        cursor = answer.cursor
    start = min(seen | told, default=published + 1)
    assert set(range(start, published + 1)) <= seen | told


class Known(RowReader):
    """Reads the rows that it was given."""

    def __init__(self, rows: list[Row]) -> None:
        self._known = rows

    def read(self, headers: Iterable[RowHeader], payload: Sequence[memoryview]) -> tuple[list[Row], tuple[RawRow, ...]]:
        return self._known, ()


def scripted(answers: list[RowsAnswer]) -> tuple[Subscription, list[int]]:
    """A subscription that gets these answers, and then none; and from where it has asked."""
    asked: list[int] = []

    async def ask(request: Gather) -> RowsAnswer:
        asked.append(request.after)
        await asyncio.sleep(0)
        if not answers:
            await asyncio.Event().wait()
        return answers.pop(0)

    async def commit(consumer: str, cursor: Cursor) -> Cursor:
        return cursor

    return Subscription(Gather(kinds=frozenset({"rewards"}), after=Cursor(4), consumer="c"), ask=ask, commit=commit), asked


def part(*cursors: int, cursor: int, gap: int = 0) -> RowsAnswer:
    found = [Row(experience=rewards_of("alpha", n, "p"), cursor=Cursor(n), age_s=0.0, lag=0) for n in cursors]
    headers = tuple(
        RowHeader(cursor=row.cursor, age_s=0, lag=0, body=b"", frame=0, offset=0, nbytes=0, first_large=0, large=0)
        for row in found
    )
    rows = Rows(rows=headers, cursor=Cursor(cursor), more=False, newest={}, evicted_to=Cursor(0), gap_to=Cursor(gap))
    return RowsAnswer(rows=rows, payload=(memoryview(bytes(AHEAD_BYTES)),), reader=Known(found))


async def test_the_cursor_stands_behind_what_was_handed_out() -> None:
    subscription, asked = scripted([part(cursor=7), part(8, 9, cursor=12), part(13, cursor=13)])
    stands = [subscription.cursor]
    for _ in range(3):
        await anext(subscription)
        stands.append(subscription.cursor)
    assert stands == [4, 8, 12, 13] and asked[:3] == [4, 7, 12]
    assert await subscription.commit() == 13


async def test_a_gap_ends_the_loop_and_the_next_loop_goes_on_behind_it() -> None:
    subscription, asked = scripted([part(5, cursor=5), part(50, cursor=50, gap=40), part(51, cursor=51)])
    seen = []
    with pytest.raises(GapError, match=r"after=5 .* up to 40") as told:
        async for row in subscription:
            seen.append(row.cursor)  # noqa: PERF401  # what came before the error counts
    assert (told.value.after, told.value.to) == (5, 40)
    assert str(pickle.loads(pickle.dumps(told.value))) == str(told.value)
    async for row in subscription:
        seen.append(row.cursor)
        if row.cursor == 51:
            break
    assert seen == [5, 50, 51] and asked[:3] == [4, 5, 50]


async def test_a_cancelled_wait_loses_nothing() -> None:
    subscription, asked = scripted([part(5, cursor=5), part(6, cursor=6)])
    waiting = asyncio.create_task(anext(subscription))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert (await anext(subscription)).cursor == 5 and asked[:2] == [4, 4]


async def test_a_cancelled_wait_for_what_is_on_its_way_loses_nothing() -> None:
    subscription, asked = scripted([part(5, cursor=5)])
    await anext(subscription)
    waiting = asyncio.create_task(anext(subscription))
    for _ in range(3):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait((waiting,))
    waiting = asyncio.create_task(anext(subscription))
    for _ in range(3):
        await asyncio.sleep(0)
    assert asked == [4, 5, 5]
    waiting.cancel()


async def test_the_next_rows_are_on_their_way_while_these_are_used() -> None:
    subscription, asked = scripted([part(5, 6, cursor=6), part(7, cursor=7)])
    await anext(subscription)
    for _ in range(3):
        await asyncio.sleep(0)
    assert asked == [4, 6]
    assert [(await anext(subscription)).cursor for _ in range(2)] == [6, 7]


async def test_a_subscription_that_is_dropped_asks_for_nothing_more() -> None:
    async with exchange.memory() as hub, hub.connect("alpha") as alpha, hub.connect("beta") as beta:
        await alpha.publish(a_rollout_group("alpha", 1, "p", tokens=2048))
        subscription = beta.subscribe(kinds={"rollouts"})
        await anext(subscription)
        while not (await beta.stats()).waiting_gathers:
            pass
        del subscription
        await asyncio.sleep(0)
        assert (await beta.stats()).waiting_gathers == 0


async def test_only_a_named_consumer_commits() -> None:
    async with exchange.memory() as hub, hub.connect("beta") as beta:
        with pytest.raises(ValueError, match="name"):
            await beta.subscribe(kinds={"rewards"}).commit()
        with pytest.raises(ValueError, match="'critiques'"):
            beta.subscribe(kinds={"critiques"})


async def test_idle_subscriptions_hold_up_no_gather() -> None:
    async with exchange.memory() as hub, hub.connect("alpha") as alpha, hub.connect("beta") as beta:
        tails = [asyncio.create_task(anext(beta.subscribe(kinds={"rewards"}))) for _ in range(20)]
        await alpha.publish(a_success("alpha", 1, "p"))
        assert len((await beta.gather(kinds={"successes"})).rows) == 1
        assert (await beta.stats()).waiting_gathers == 8
        await alpha.publish(rewards_of("alpha", 1, "p"))
        assert {row.cursor for row in await asyncio.gather(*tails)} == {2}


async def test_a_poll_without_rows_is_followed_by_the_next() -> None:
    clock = FakeClock()
    async with exchange.memory(clock=clock) as hub, hub.connect("alpha") as alpha, hub.connect("beta") as beta:
        tail = asyncio.create_task(anext(beta.subscribe(kinds={"rewards"})))
        await until(lambda: waiting(beta, 1))
        for _ in range(3):
            clock.advance(10.0)
            hub.tick()
            await until(lambda: waiting(beta, 1))
        await alpha.publish(rewards_of("alpha", 1, "p"))
        assert (await tail).cursor == 1


async def waiting(client: exchange.Client, count: int) -> bool:
    return (await client.stats()).waiting_gathers == count


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await holds():
            pass
