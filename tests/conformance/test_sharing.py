"""Workers that share a stream of records, over every transport."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import exchange
from exchange.errors import LeaseLostError, RefusedError
from exchange.testing import a_rollout_group, rewards_of


async def publish(client: exchange.Client, count: int, start: int = 0) -> None:
    for step in range(start, start + count):
        await client.publish(a_rollout_group("maker", step, "p"))


def steps(batch: exchange.Batch) -> list[int]:
    return [row.experience.step for row in batch.rows]


async def test_workers_share_a_stream_and_each_record_is_done_once(serving: Any) -> None:
    done: list[int] = []

    async def work(client: exchange.Client) -> None:
        while True:
            async with client.lease(group="judges", kinds={"rollouts"}, count=3, deadline_s=0.2) as batch:
                if not batch.rows:
                    return
                await asyncio.sleep(0)
                done.extend(steps(batch))

    async with serving() as connect, connect("maker") as maker, connect("a") as a, connect("b") as b:
        await publish(maker, 10)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(work(a))
            tasks.create_task(work(b))
            await publish(maker, 10, start=10)
        assert sorted(done) == list(range(20))
        group = (await maker.stats()).groups["judges"]
        assert (group.matching, group.done, group.leased, group.waiting) == (20, 20, 0, 0)


async def test_an_exception_hands_the_record_to_another_and_in_the_end_to_the_dead(serving: Any) -> None:
    async with serving() as connect, connect("maker") as maker, connect("a") as a, connect("b") as b:
        await publish(maker, 2)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                async with a.lease(group="judges", kinds={"rollouts"}, count=2) as batch:
                    assert steps(batch) == [0, 1]
                    1 / 0  # noqa: B018
        # From the third time on each comes alone, and what is not to blame is done.
        seen = []
        for client in (a, b, a, b):
            try:
                async with client.lease(group="judges", kinds={"rollouts"}, count=2) as batch:
                    seen += [*zip(steps(batch), batch.deliveries, strict=True)]
                    if steps(batch) == [0]:
                        raise ValueError("no reward model for it")
            except ValueError:
                pass
        assert seen == [(0, 3), (0, 4), (0, 5), (1, 3)]
        (letter,) = await b.dead_letters("judges")
        assert (letter.reason, letter.detail, letter.deliveries) == ("failed", "ValueError: no reward model for it", 5)
        raw = await b.gather(kinds={"rollouts"}, after=exchange.Cursor(letter.cursor - 1))
        assert raw.rows[0].experience.step == 0


async def test_a_cancelled_worker_gives_back_and_nothing_is_counted(serving: Any) -> None:
    async with serving() as connect, connect("maker") as maker, connect("a") as a, connect("b") as b:

        async def hang() -> None:
            async with a.lease(group="judges", kinds={"rollouts"}, count=2, deadline_s=5) as batch:
                assert batch.rows
                holding.set()
                await asyncio.Event().wait()

        holding = asyncio.Event()
        task = asyncio.create_task(hang())
        await publish(maker, 1)
        await asyncio.wait_for(holding.wait(), 10)
        task.cancel()
        async with b.lease(group="judges", kinds={"rollouts"}, deadline_s=5) as batch:
            assert (steps(batch), batch.deliveries) == ([0], (1,))
        waiting = asyncio.create_task(hang())
        await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.wait((task, waiting))
        await publish(maker, 1, start=1)
        async with b.lease(group="judges", kinds={"rollouts"}, deadline_s=5) as batch:
            assert (steps(batch), batch.deliveries) == ([1], (1,))


async def test_what_a_worker_holds_comes_back_when_it_leaves(serving: Any) -> None:
    async with serving() as connect, connect("maker") as maker, connect("b") as b:
        await publish(maker, 1)
        async with connect("a") as a:
            left = a.lease(group="judges", kinds={"rollouts"})
            assert steps(await left.__aenter__()) == [0]
        async with b.lease(group="judges", kinds={"rollouts"}, deadline_s=5) as batch:
            assert (steps(batch), batch.deliveries) == ([0], (2,))


async def test_a_lease_that_is_not_renewed_expires_and_a_late_word_is_refused(serving: Any) -> None:
    async with serving() as connect, connect("maker") as maker, connect("a") as a, connect("b") as b:
        await publish(maker, 2)
        with pytest.raises(LeaseLostError, match="expired"):
            async with a.lease(group="judges", kinds={"rollouts"}, lease_s=0.05) as late:
                assert steps(late) == [0]
                async with b.lease(group="judges", kinds={"rollouts"}, count=2, deadline_s=5) as batch:
                    assert steps(batch) == [1]
                    await batch.renew()
                async with b.lease(group="judges", kinds={"rollouts"}, deadline_s=5) as batch:
                    assert (steps(batch), batch.deliveries) == ([0], (2,))
                with pytest.raises(LeaseLostError, match="expired"):
                    await late.renew()
                await late.renew()  # nothing is left to renew
                raise LeaseLostError("expired")


async def test_rows_are_settled_one_by_one(serving: Any) -> None:
    async with serving() as connect, connect("maker") as maker, connect("a") as a:
        await publish(maker, 4)
        async with a.lease(group="judges", kinds={"rollouts"}, count=4) as batch:
            first, second, third, fourth = batch.rows
            await batch.done(first)
            await batch.fail(second, detail="no reason")
            await batch.give_back(third)
            assert batch.held == (fourth,)
            with pytest.raises(ValueError, match="still held"):
                await batch.done(first)
        async with a.lease(group="judges", kinds={"rollouts"}, count=4, deadline_s=0) as batch:
            assert (steps(batch), batch.deliveries) == ([1, 2], (2, 1))


async def test_a_group_has_one_filter_and_nobody_gets_its_own(serving: Any) -> None:
    edges = frozenset({("a", "maker", "rollouts")})
    async with serving(edges=edges) as connect, connect("maker") as maker, connect("a") as a, connect("b") as b:
        await publish(maker, 1)
        await a.publish(rewards_of("a", 7, "p"))
        for client in (maker, b):
            async with client.lease(group="judges", kinds={"rollouts"}, deadline_s=0) as batch:
                assert batch.rows == ()
        async with a.lease(group="judges", kinds={"rollouts"}, deadline_s=0) as batch:
            assert steps(batch) == [0]
        with pytest.raises(RefusedError, match=r"(?s)kinds=\['rollouts'\] of agents=None.*agents=\['maker'\]"):
            async with a.lease(group="judges", kinds={"rollouts"}, agents={"maker"}):
                pass
        async with a.lease(group="own", kinds={"rewards"}, agents={"a"}, deadline_s=0) as batch:
            assert steps(batch) == [7]


@pytest.mark.parametrize("lease_s", [0, -1.0, float("nan"), float("inf"), 86401.0])
async def test_absurd_lease_times_are_refused(lease_s: float) -> None:
    async with exchange.memory() as hub, hub.connect("a") as a:
        with pytest.raises(ValueError, match=f"lease_s={lease_s}"):
            a.lease(group="judges", kinds={"rollouts"}, lease_s=lease_s)
        with pytest.raises(RefusedError, match="unknown_group"):
            await a.dead_letters("judges")


class Verdict(exchange.Experience, frozen=True, kw_only=True, tag="verdicts/1"):
    good: bool


class LaterVerdict(exchange.Experience, frozen=True, kw_only=True, tag="verdicts/2"):
    marks: int


class BrokenVerdict(exchange.Experience, frozen=True, kw_only=True, tag="verdicts/1"):
    good: str


async def test_a_worker_that_does_not_know_a_type_leaves_it_to_one_that_does(serving: Any) -> None:
    base: dict[str, Any] = {"agent": "maker", "version": exchange.Version(0, 0)}
    async with (
        serving() as connect,
        connect("maker", types=(LaterVerdict, Verdict)) as maker,
        connect("old", types=[Verdict]) as old,
        connect("new", types=(Verdict, LaterVerdict)) as new,
    ):
        await maker.publish(LaterVerdict(step=0, marks=3, **base))
        await maker.publish(Verdict(step=1, good=True, **base))
        for count in range(1, 3):
            async with old.lease(group="judges", kinds={"verdicts"}, deadline_s=5) as batch:
                assert (steps(batch), batch.deliveries) == ([1], (1,))
                await batch.give_back(*batch.rows)
            assert old.quarantined == {"verdicts/2": 1}, f"offered once, not at once again: {count}"
        async with new.lease(group="judges", kinds={"verdicts"}, count=2) as batch:
            assert (steps(batch), batch.deliveries) == ([0, 1], (1, 1))


async def test_a_record_that_nobody_can_decode_ends_among_the_dead(serving: Any) -> None:
    broken = BrokenVerdict(step=0, good="yes", agent=exchange.AgentName("maker"), version=exchange.Version(0, 0))
    async with (
        serving() as connect,
        connect("maker", types=[BrokenVerdict]) as maker,
        connect("judge", types=[Verdict]) as judge,
    ):
        await maker.publish(broken)
        async with judge.lease(group="judges", kinds={"verdicts"}, deadline_s=0) as batch:
            assert batch.rows == ()
        (letter,) = await judge.dead_letters("judges")
        assert letter.reason == "failed" and "good" in letter.detail
