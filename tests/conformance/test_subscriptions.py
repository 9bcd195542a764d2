"""Subscriptions over every transport: late joiners, leavers, slow readers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import exchange
from exchange.errors import GapError
from exchange.testing import a_rollout_group, a_success, rewards_of
from exchange.types import AgentName, Cursor, PromptId


async def take(subscription: exchange.Subscription, count: int) -> list[int]:
    async with asyncio.timeout(10):
        return [(await anext(subscription)).experience.step for _ in range(count)]


async def test_late_join_replay_and_live_tail_are_one_loop(serving: Any) -> None:
    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta:
        for step in range(5):
            await alpha.publish(rewards_of("alpha", step, f"p{step}"))
        early = beta.subscribe(kinds={"rewards"})
        late = beta.subscribe(kinds={"rewards"}, after=(await beta.stats()).cursor)
        tail = asyncio.create_task(take(late, 3))
        assert await take(early, 5) == list(range(5))
        rest = asyncio.create_task(take(early, 3))
        for step in range(5, 8):
            await alpha.publish(rewards_of("alpha", step, f"p{step}"))
        assert await rest == await tail == [5, 6, 7]
        assert await take(beta.subscribe(kinds={"rewards"}, after=early.cursor, agents={AgentName("alpha")}), 0) == []


async def test_filters_of_a_subscription_are_exact(serving: Any) -> None:
    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta, connect("gamma") as gamma:
        chosen = gamma.subscribe(kinds={"rewards"}, agents={AgentName("beta")}, prompt_ids={PromptId("prompt/1")}, min_step=1)
        tail = asyncio.create_task(take(chosen, 2))
        for step in range(3):
            for prompt in ("prompt/1", "prompt/10"):
                await alpha.publish(rewards_of("alpha", step, prompt))
                await beta.publish(a_success("beta", step, prompt))
                await beta.publish(rewards_of("beta", step, prompt))
        assert await tail == [1, 2]


async def test_leaving_the_loop_or_cancelling_it_leaves_nothing_at_the_hub(serving: Any) -> None:
    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta:
        await alpha.publish(rewards_of("alpha", 0, "p"))
        for _ in range(20):
            async for row in beta.subscribe(kinds={"rewards"}):
                assert row.experience.step == 0
                break
            tail = asyncio.create_task(anext(beta.subscribe(kinds={"successes"})))
            while not (await beta.stats()).waiting_gathers:
                pass
            tail.cancel()
            await asyncio.wait((tail,))
            assert (await beta.stats()).waiting_gathers == 0
        assert len((await beta.gather(kinds={"rewards"})).rows) == 1


@pytest.mark.slow
async def test_a_slow_reader_costs_the_others_nothing_and_is_told_what_it_missed(serving: Any) -> None:
    config = {"memory_bytes": 1 << 20, "credit_bytes": 1 << 19}
    async with serving(**config) as connect, connect("alpha") as alpha, connect("slow") as slow, connect("fast") as fast:
        reading = slow.subscribe(kinds={"rollouts"}, max_bytes=1 << 16)
        await alpha.publish(a_rollout_group("alpha", 0, "p", tokens=200))
        assert await take(reading, 1) == [0]
        tail = asyncio.create_task(take(fast.subscribe(kinds={"rollouts"}), 200))
        for step in range(1, 200):
            await alpha.publish(a_rollout_group("alpha", step, "p", tokens=200))
        seen = await tail
        assert seen == list(range(200)), "the hub's memory is smaller than this"
        on_its_way: list[int] = []
        with pytest.raises(GapError) as gap:
            while True:
                on_its_way += await take(reading, 1)
        assert on_its_way == list(range(1, 1 + len(on_its_way))) and len(on_its_way) < 100
        stats = await slow.stats()
        assert gap.value.after < gap.value.to == stats.cursor - stats.stored
        assert await take(reading, stats.stored) == list(range(200 - stats.stored, 200))


async def test_a_named_consumer_goes_on_where_it_committed_also_after_coming_back(serving: Any) -> None:
    async with serving() as connect, connect("alpha") as alpha:
        for step in range(6):
            await alpha.publish(rewards_of("alpha", step, "p"))
        stands = Cursor(0)
        for first in (0, 2, 4):
            async with connect("beta") as beta:
                judge = beta.subscribe(kinds={"rewards"}, name="judge")
                assert await take(judge, 2) == [first, first + 1]
                assert await judge.commit() > stands
                stands = judge.cursor
                await take(judge, 1) if first < 4 else None
