"""What every exchange does alike, whatever carries it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

import exchange
from exchange.errors import ClosedError, ConnectError, RecordTooLargeError, RefusedError
from exchange.testing import a_rollout_group, a_success, rewards_of, step_prompts
from exchange.types import AgentName, AnyExperience, Cursor, RolloutGroup, Version

BETA = AgentName("beta")


def assert_same(left: AnyExperience, right: AnyExperience) -> None:
    assert type(left) is type(right)
    for name in right.__struct_fields__:
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))


async def test_every_kind_arrives_as_it_was(serving: Any) -> None:
    sent: list[AnyExperience] = [
        step_prompts("alpha", 1, "p", "q"),
        rewards_of("alpha", 1, "p", [1.0, np.nan]),
        a_success("alpha", 1, "p", "ħello"),
        a_rollout_group("alpha", 1, "p"),
        a_rollout_group("alpha", 1, "q", completions=3, tokens=100_000),
    ]
    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta:
        receipts = [await alpha.publish(experience) for experience in sent]
        got = await beta.gather(kinds={"prompts", "rewards", "successes", "rollouts"}, max_bytes=32 << 20)
        assert [row.cursor for row in got.rows] == [receipt.cursor for receipt in receipts]
        for row, experience in zip(got.rows, sent, strict=True):
            assert_same(row.experience, experience)
        group = got.rows[-1].experience
        assert isinstance(group, RolloutGroup)
        assert group.ids.flags.aligned and not group.ids.flags.writeable
        assert got.newest == {"alpha": Version(0, 1)}


async def test_the_first_publications_are_not_lost(serving: Any) -> None:
    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta:
        await asyncio.gather(*(alpha.publish(rewards_of("alpha", step, f"p{step}")) for step in range(400)))
        steps: list[int] = []
        cursor, more = Cursor(0), True
        while more:
            got = await beta.gather(kinds={"rewards"}, after=cursor)
            steps += [row.experience.step for row in got.rows]
            cursor, more = got.cursor, got.more
        assert sorted(steps) == list(range(400))


async def test_workers_that_start_at_once_hear_each_other(serving: Any) -> None:
    async with serving() as connect:

        async def worker(name: str) -> set[str]:
            async with connect(name) as ex:
                await ex.publish(rewards_of(name, 0, "p"))
                got = await ex.gather(kinds={"rewards"}, min_count=3, deadline_s=10.0)
                return {row.experience.agent for row in got.rows}

        names = {"a", "b", "c", "d"}
        heard = await asyncio.gather(*map(worker, sorted(names)))
        assert [names - {name} for name in sorted(names)] == list(heard)


async def test_a_gather_waits_for_what_is_not_there_yet(serving: Any) -> None:
    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta:
        waiting = asyncio.create_task(beta.gather(kinds={"prompts"}, min_step=2, min_count=1, deadline_s=10.0))
        for step in (1, 2):
            await alpha.publish(step_prompts("alpha", step, "p"))
        assert [row.experience.step for row in (await waiting).rows] == [2]
        late = await beta.gather(kinds={"prompts"}, min_step=3, min_count=1, deadline_s=0.01)
        assert late.rows == []


async def test_a_cancelled_gather_leaves_a_client_that_works(serving: Any) -> None:
    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta:
        for _ in range(3):
            waiting = asyncio.create_task(beta.gather(kinds={"prompts"}, min_count=1, deadline_s=10.0))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await alpha.publish(step_prompts("alpha", 1, "p"))
        assert len((await beta.gather(kinds={"prompts"})).rows) == 1


async def test_long_answers_come_in_parts(serving: Any) -> None:
    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta:
        for step in range(5):
            await alpha.publish(a_rollout_group("alpha", step, "p", tokens=1000))
        cursor, steps, more = Cursor(0), [], True
        while more:
            got = await beta.gather(kinds={"rollouts"}, after=cursor, max_bytes=250_000)
            steps += [[row.experience.step for row in got.rows]]
            cursor, more = got.cursor, got.more
        assert steps == [[0, 1], [2, 3], [4]]


async def test_progress_counts_for_lag_and_is_told(serving: Any) -> None:
    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta:
        await alpha.publish(rewards_of("alpha", 3, "p"))
        await alpha.progress(step=9, version=Version(0, 10))
        await alpha.stats()
        got = await beta.gather(kinds={"rewards"})
        assert [row.lag for row in got.rows] == [7]
        assert got.newest["alpha"] == Version(0, 10)
        assert (await beta.gather(kinds={"rewards"}, max_lag=6)).rows == []
        stats = (await beta.stats()).workers["alpha"]
        assert (stats.step, stats.version, stats.state) == (9, Version(0, 10), "live")


async def test_refusals_carry_their_reason_and_spoil_nothing(serving: Any) -> None:
    async with serving() as connect, connect("alpha") as alpha:
        for experience, reason in ((rewards_of("beta", 1, "p"), "not_yours"), (rewards_of("alpha", 1, "p", epoch=1), "future")):
            with pytest.raises(RefusedError) as refused:
                await alpha.publish(experience)
            assert refused.value.reason == reason
        assert not (await alpha.publish(rewards_of("alpha", 1, "p"))).duplicate
        with pytest.raises(RefusedError, match="max_bytes=0"):
            await alpha.gather(kinds={"rewards"}, max_bytes=0)
        with pytest.raises(ValueError, match="'critiques'"):
            await alpha.gather(kinds={"critiques"})


@pytest.mark.parametrize(
    ("name", "run_id", "complaint"),
    [("alpha", "r", "duplicate_name"), ("gamma", "r", "unknown_member"), ("beta", "old", "serves run 'r'")],
)
async def test_who_may_not_join_is_told_why(serving: Any, name: str, run_id: str, complaint: str) -> None:
    async with serving(members=frozenset({"alpha", "beta"})) as connect, connect("alpha"):
        with pytest.raises(ConnectError, match=complaint):
            async with connect(name, run_id=run_id):
                pass


async def test_a_name_is_free_after_bye_and_its_epoch_rises(serving: Any) -> None:
    async with serving() as connect, connect("beta") as beta:
        async with connect("alpha") as alpha:
            assert alpha.epoch == 0
        async with connect("alpha") as alpha:
            assert alpha.epoch == 1
            with pytest.raises(RefusedError, match="fenced"):
                await alpha.publish(rewards_of("alpha", 1, "p", epoch=0))
            await alpha.publish(rewards_of("alpha", 1, "p", epoch=1))
        stats = await beta.stats()
        assert stats.workers["alpha"].state == "left"
        assert [row.experience.version for row in (await beta.gather(kinds={"rewards"})).rows] == [Version(1, 1)]


async def test_edges_hold(serving: Any) -> None:
    edges = frozenset({("beta", "alpha", "successes")})
    async with serving(edges=edges) as connect, connect("alpha") as alpha, connect("beta") as beta:
        await alpha.publish(a_rollout_group("alpha", 1, "p"))
        await alpha.publish(a_success("alpha", 1, "p"))
        got = await beta.gather(kinds={"rollouts", "successes"})
        assert [type(row.experience).__name__ for row in got.rows] == ["VerifiedSuccesses"]
        assert (await beta.stats()).workers["beta"].withheld == 1


async def test_many_publishers_share_a_small_credit(serving: Any) -> None:
    async with serving(credit_messages=2, credit_bytes=1 << 20) as connect, connect("alpha") as alpha:
        groups = [a_rollout_group("alpha", step, "p", tokens=4000) for step in range(20)]
        receipts = await asyncio.gather(*map(alpha.publish, groups))
        assert sorted(receipt.seq for receipt in receipts) == list(range(1, 21))
        with pytest.raises(RecordTooLargeError, match="at most 1048576 bytes"):
            await alpha.publish(a_rollout_group("alpha", 1, "p", tokens=20_000))
        assert (await alpha.stats()).stored == 20


async def test_the_sender_may_write_into_its_arrays_at_once(serving: Any) -> None:
    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta:
        small, large = a_rollout_group("alpha", 1, "p"), a_rollout_group("alpha", 2, "p", tokens=60_000)
        publishing = [asyncio.create_task(alpha.publish(group)) for group in (small, large)]
        await asyncio.sleep(0)
        for group in (small, large):
            group.ids[:] = -1
        await asyncio.gather(*publishing)
        for row in (await beta.gather(kinds={"rollouts"})).rows:
            assert isinstance(row.experience, RolloutGroup)
            np.testing.assert_array_equal(row.experience.ids, np.arange(len(row.experience.ids)))


async def test_a_paused_consumer_loses_nothing_and_holds_up_nobody(serving: Any) -> None:
    async with serving(memory_bytes=32 << 20) as connect, connect("alpha") as alpha, connect("beta") as beta:
        records = [rewards_of("alpha", step, f"p{step}") for step in range(800)]
        await asyncio.gather(*map(alpha.publish, records))
        first = await beta.gather(kinds={"rewards"})
        rest = await beta.gather(kinds={"rewards"}, after=first.cursor, max_bytes=64 << 20)
        steps = [row.experience.step for row in (*first.rows, *rest.rows)]
        assert steps == sorted(steps) and len(set(steps)) == len(steps)
        assert first.evicted_to < first.rows[0].cursor, "nothing had to go"


async def test_the_account_balances(serving: Any) -> None:
    async with serving(memory_bytes=1 << 20) as connect, connect("alpha") as alpha, connect("beta") as beta:
        for step in range(40):
            await alpha.publish(a_rollout_group("alpha", step, "p", tokens=200))
            if step % 10 == 0:
                await beta.gather(kinds={"rollouts"})
        with pytest.raises(RefusedError):
            await alpha.publish(rewards_of("gamma", 1, "p"))
        stats = await beta.stats()
        worker = stats.workers["alpha"]
        assert worker.published == 41 == sum(worker.accepted.values()) + sum(worker.refused.values()) + worker.duplicates
        assert sum(worker.accepted.values()) == stats.stored + stats.evicted + stats.expired
        assert stats.stored_bytes <= 1 << 20
        assert stats.workers["beta"].delivered["alpha"]["rollouts"] > 0
        assert msgspec.json.decode(msgspec.json.encode(stats), type=exchange.HubStats) == stats


async def test_an_observer_sees_and_does_not_take_part(serving: Any) -> None:
    async with serving(members=frozenset({"alpha"})) as connect, connect("up", observer=True) as up:
        async with connect("alpha") as alpha:
            await alpha.publish(rewards_of("alpha", 1, "p"))
            assert set((await up.stats()).workers) == {"alpha"}
        with pytest.raises(RefusedError, match="observer"):
            await up.gather(kinds={"rewards"})


async def test_a_publication_that_nobody_waits_for_still_arrives_before_leaving(serving: Any) -> None:
    async with serving() as connect, connect("beta") as beta:
        async with connect("alpha") as alpha:
            publishing = asyncio.create_task(alpha.publish(rewards_of("alpha", 1, "p")))
            await asyncio.sleep(0)
            publishing.cancel()
        assert len((await beta.gather(kinds={"rewards"})).rows) == 1


async def test_a_closed_client_says_so(serving: Any) -> None:
    async with serving() as connect:
        async with connect("alpha") as alpha:
            pass
        with pytest.raises(ClosedError, match="async with"):
            await alpha.publish(rewards_of("alpha", 1, "p"))


async def test_an_error_in_the_block_comes_out_as_it_is(serving: Any) -> None:
    async with serving() as connect:
        with pytest.raises(KeyError, match="mine"):
            async with connect("alpha"):
                raise KeyError("mine")


async def test_latest_only_leaves_each_producers_newest_row_on_a_prompt_that_passes_the_filters(serving: Any) -> None:
    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta, connect("gamma") as gamma:
        for step, prompt in ((0, "p"), (1, "q"), (2, "p"), (3, "p")):
            await alpha.publish(rewards_of("alpha", step, prompt))
        await beta.publish(rewards_of("beta", 0, "p"))
        got = await gamma.gather(kinds={"rewards"}, max_step=2, latest_only=True)
        assert [(row.experience.agent, row.experience.step) for row in got.rows] == [("alpha", 1), ("alpha", 2), ("beta", 0)]
        assert (await gamma.gather(kinds={"rewards"}, after=got.cursor, latest_only=True)).rows == []
