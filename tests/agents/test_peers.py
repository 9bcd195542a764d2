"""The peer feed on a real hub in memory: what is asked, what is waited for, what is followed."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec
import numpy as np
import pytest

import exchange
from agents.errors import PeerTimeoutError
from agents.peers import FeedState, PeerFeed
from agents.seam import Seam
from agents.sharing.rule import Forgetful, Peers, Shared, Waiting
from agents.testing import make_prompt
from agents.types import Group
from exchange.client import Client
from exchange.testing import FakeClock
from exchange.types import AgentName, Cursor, GroupRewards, Kind, PromptId, StepPrompts, Version

ALPHA, BETA = AgentName("alpha"), AgentName("beta")
PROMPTS = {prompt.id: prompt for prompt in (make_prompt(f"p{index}") for index in range(8))}


class Rule(Forgetful):
    """Asks for rewards; holds open what the test says."""

    kinds: frozenset[Kind] = frozenset({"rewards"})
    max_age_s: float | None = None
    latest_only = True

    def __init__(self, *, window: int = 0, max_lag: int | None = None) -> None:
        self.window = window
        self.max_lag = max_lag

    def wants(self, groups: Sequence[Group]) -> Sequence[PromptId]:
        raise AssertionError("the feed is told what is wanted")

    async def share(self, groups: Sequence[Group], peers: Peers, *, step: int, steps: int, rng: np.random.Generator) -> Shared:
        raise AssertionError("the feed shares nothing")


@pytest.fixture
async def clients() -> AsyncIterator[tuple[Client, Client]]:
    async with exchange.memory() as hub, hub.connect("alpha") as alpha, hub.connect("beta") as beta:
        yield alpha, beta


def feed(
    client: Client,
    rule: Rule | None = None,
    *,
    lockstep: bool = False,
    step_timeout_s: float = 5.0,
    seams: Sequence[Seam] = (),
) -> PeerFeed:
    return PeerFeed(
        client,
        rule or Rule(),
        teachers=[BETA],
        prompts=PROMPTS,
        lockstep=lockstep,
        step_timeout_s=step_timeout_s,
        seams=seams,
    )


async def close_step(client: Client, step: int, *keys: str, version: int | None = None) -> None:
    """Publish one rewards record per prompt, then the record that closes the step."""
    at = Version(client.epoch, step if version is None else version)
    for key in keys:
        await client.publish(
            GroupRewards(
                agent=client.name,
                step=step,
                version=at,
                prompt_id=PromptId(key),
                task="reverse",
                rewards=np.array([step], dtype=np.float32),
                reward_fingerprint="reward",
            )
        )
    ids = tuple(PromptId(key) for key in keys)
    await client.publish(StepPrompts(agent=client.name, step=step, version=at, prompt_ids=ids))


def steps_of(experience: Peers, key: str) -> list[int]:
    return [record.step for record in experience.get(PromptId(key), ())]


async def test_rows_on_own_prompts_only(clients: tuple[Client, Client]) -> None:
    alpha, beta = clients
    await close_step(beta, 0, "p0", "p1")
    gathered = await feed(alpha).gather(0, [PromptId("p0")], [PromptId("p0")])
    assert steps_of(gathered.experience, "p0") == [0]
    assert "p1" not in gathered.experience


async def test_nobody_waits_in_async_mode(clients: tuple[Client, Client]) -> None:
    async with asyncio.timeout(2):
        gathered = await feed(clients[0]).gather(5, [PromptId("p0")], [PromptId("p0")])
    assert not gathered.experience


async def test_an_open_prompt_gets_late_rows_once(clients: tuple[Client, Client]) -> None:
    alpha, beta = clients
    rule = Rule(window=4)
    mine = feed(alpha, rule)
    await mine.gather(0, [PromptId("p0")], [PromptId("p0")])
    rule.waiting = {PromptId("p0"): Waiting(prompt=PROMPTS[PromptId("p0")], prompt_ids=np.empty(0, np.int32), since=0)}
    await close_step(beta, 0, "p0")
    assert steps_of((await mine.gather(1, [PromptId("p1")], [PromptId("p1")])).experience, "p0") == [0]
    assert steps_of((await mine.gather(2, [PromptId("p2")], [PromptId("p2")])).experience, "p0") == []


async def test_rows_behind_the_producers_newest_version_are_left_out(clients: tuple[Client, Client]) -> None:
    alpha, beta = clients
    await close_step(beta, 0, "p0", version=0)
    await close_step(beta, 1, "p1", version=9)
    mine = feed(alpha, Rule(max_lag=8))
    gathered = await mine.gather(0, [PromptId("p0"), PromptId("p1")], [PromptId("p0"), PromptId("p1")])
    assert set(gathered.experience) == {"p1"}
    assert mine.hits.take() == {"peer/beta/hit_rate": 0.5, "peer/beta/prompts": 2.0}


async def test_lag_is_reported_against_the_producers_newest_version(clients: tuple[Client, Client]) -> None:
    alpha, beta = clients
    await close_step(beta, 0, "p0", version=2)
    await close_step(beta, 1, "p1", version=5)
    gathered = await feed(alpha).gather(0, [PromptId("p0"), PromptId("p1")], [PromptId("p0"), PromptId("p1")])
    assert gathered.metrics["peer/staleness_max"] == 3
    assert gathered.metrics["peer/staleness_mean"] == 1.5


async def test_a_peer_that_tried_and_failed_is_a_hit_though_it_has_no_row(clients: tuple[Client, Client]) -> None:
    alpha, beta = clients
    await beta.publish(StepPrompts(agent=BETA, step=0, version=Version(beta.epoch, 0), prompt_ids=(PromptId("p0"),)))
    mine = feed(alpha)
    await mine.gather(0, [PromptId("p0"), PromptId("p1")], [PromptId("p0"), PromptId("p1")])
    assert mine.hits.take()["peer/beta/hit_rate"] == 0.5


async def test_lockstep_waits_for_the_step_and_looks_no_further(clients: tuple[Client, Client]) -> None:
    alpha, beta = clients
    await close_step(beta, 0, "p0")
    mine = feed(alpha, lockstep=True)
    assert steps_of((await mine.gather(0, [PromptId("p0")], [PromptId("p0")])).experience, "p0") == [0]
    waiting = asyncio.create_task(mine.gather(1, [PromptId("p0")], [PromptId("p0")]))
    await asyncio.sleep(0)
    assert not waiting.done()
    await close_step(beta, 1, "p0")
    await close_step(beta, 2, "p0")
    async with asyncio.timeout(10):
        gathered = await waiting
    assert steps_of(gathered.experience, "p0") == [1]
    assert gathered.metrics["peer/staleness_max"] == 0


async def test_lockstep_names_the_peer_that_does_not_come(clients: tuple[Client, Client]) -> None:
    alpha, beta = clients
    await close_step(beta, 0, "p0")
    with pytest.raises(PeerTimeoutError, match=r"step 3 for beta .*beta 0"):
        await feed(alpha, lockstep=True, step_timeout_s=0.05).gather(3, [PromptId("p0")], [PromptId("p0")])


async def test_follow_takes_the_newest_closed_steps_of_a_peer_that_is_ahead(clients: tuple[Client, Client]) -> None:
    alpha, beta = clients
    mine = feed(alpha)
    for step, keys in enumerate([("p0", "p1"), ("p2", "p3"), ("p4", "unknown")]):
        await close_step(beta, step, *keys)
    await mine.refresh()
    met: set[int] = set()
    assert [prompt.id for prompt in mine.follow(met, 3)] == ["p4", "p2", "p3"]
    assert met == {1, 2}
    assert mine.follow(met, 3) == []


async def test_a_step_that_was_met_is_not_followed(clients: tuple[Client, Client]) -> None:
    alpha, beta = clients
    mine = feed(alpha)
    for step in range(3):
        await close_step(beta, step, f"p{step}")
    await mine.refresh()
    assert [prompt.id for prompt in mine.follow({0, 2}, 2)] == []
    assert [prompt.id for prompt in mine.follow({1}, 2)] == ["p2"]


async def test_nobody_follows_a_peer_that_is_not_ahead(clients: tuple[Client, Client]) -> None:
    alpha, beta = clients
    mine = feed(alpha)
    await close_step(beta, 0, "p0")
    await mine.refresh()
    assert mine.follow(set(), 2) == []


async def test_a_peer_that_came_back_counts_from_its_new_life() -> None:
    async with exchange.memory() as hub, hub.connect("alpha") as alpha:
        async with hub.connect("beta") as beta:
            for step in range(6):
                await close_step(beta, step, f"p{step}")
        async with hub.connect("beta") as beta:
            assert beta.epoch == 1
            await close_step(beta, 0, "p7")
            mine = feed(alpha, Rule(max_lag=8), lockstep=True, step_timeout_s=0.05)
            with pytest.raises(PeerTimeoutError, match="beta 0"):
                await mine.gather(3, [PromptId("p7")], [PromptId("p7")])
            other = feed(alpha, Rule(max_lag=8))
            gathered = await other.gather(0, [PromptId("p5"), PromptId("p7")], [PromptId("p5"), PromptId("p7")])
            assert set(gathered.experience) == {"p7"}
            assert other.hits.take()["peer/beta/hit_rate"] == 0.5


async def test_age_is_a_limit_in_async_mode_and_none_in_lockstep() -> None:
    clock = FakeClock()
    async with exchange.memory(clock=clock) as hub, hub.connect("alpha") as alpha, hub.connect("beta") as beta:
        await close_step(beta, 0, "p0")
        clock.advance(10)
        rule = Rule()
        rule.max_age_s = 5.0
        for lockstep, expected in ((False, []), (True, [0])):
            mine = PeerFeed(alpha, rule, teachers=[BETA], prompts=PROMPTS, lockstep=lockstep, step_timeout_s=5.0, clock=clock)
            gathered = await mine.gather(0, [PromptId("p0")], [PromptId("p0")])
            assert steps_of(gathered.experience, "p0") == expected
            assert mine.hits.take()["peer/beta/hit_rate"] == (1.0 if expected else 0.0)


async def test_only_wanted_prompts_are_asked_for_and_all_count_as_hits(clients: tuple[Client, Client]) -> None:
    alpha, beta = clients
    await close_step(beta, 0, "p0", "p1")
    mine = feed(alpha)
    gathered = await mine.gather(0, [PromptId("p0"), PromptId("p1")], [PromptId("p1")])
    assert set(gathered.experience) == {"p1"}
    assert mine.hits.take() == {"peer/beta/hit_rate": 1.0, "peer/beta/prompts": 2.0}


async def test_each_teachers_newest_row_on_a_prompt_is_what_comes(clients: tuple[Client, Client]) -> None:
    alpha, beta = clients
    for step in range(3):
        await close_step(beta, step, "p0")
    gathered = await feed(alpha).gather(0, [PromptId("p0")], [PromptId("p0")])
    assert steps_of(gathered.experience, "p0") == [2]


async def test_the_start_waits_for_teachers_and_names_those_that_do_not_come(clients: tuple[Client, Client]) -> None:
    alpha, beta = clients
    assert await feed(alpha, step_timeout_s=0.05).wait_for_teachers() == ["beta"]
    waiting = asyncio.create_task(feed(alpha).wait_for_teachers())
    await close_step(beta, 0)
    async with asyncio.timeout(5):
        assert await waiting == []


def seam(cursor: int, step: int) -> Seam:
    return Seam(cursor=Cursor(cursor), steps={BETA: step})


async def records_in(client: Client) -> int:
    return (await client.stats()).cursor


async def test_behind_a_seam_what_was_abandoned_is_passed_over() -> None:
    async with exchange.memory() as hub, hub.connect("alpha") as alpha:
        async with hub.connect("beta") as beta:
            for step in range(4):
                await close_step(beta, step, "p6", f"p{step}")
        before = feed(alpha, Rule(window=1), lockstep=True)
        await before.gather(0, [PromptId("p0")], [PromptId("p0")])
        await before.gather(1, [PromptId("p1")], [PromptId("p1")])
        seams = [seam(await records_in(alpha), 2)]
        after = feed(alpha, Rule(window=1, max_lag=8), lockstep=True, step_timeout_s=0.05, seams=seams)
        after.restore(before.state())
        assert await after.wait_for_teachers() == [BETA], "one that was there before says nothing of now"
        with pytest.raises(PeerTimeoutError, match="step 2 for beta"):
            await after.gather(2, [PromptId("p2")], [PromptId("p2")])
        async with hub.connect("beta") as beta:
            await close_step(beta, 2, "p7")
            rule = Rule(window=1, max_lag=8)
            rule.latest_only = False
            again = feed(alpha, rule, lockstep=True, seams=seams)
            again.restore(before.state())
            assert await again.wait_for_teachers() == []
            gathered = await again.gather(2, [PromptId("p6"), PromptId("p2")], [PromptId("p6"), PromptId("p2")])
        assert steps_of(gathered.experience, "p6") == [0, 1]
        assert "p2" not in gathered.experience
        assert gathered.metrics["peer/staleness_max"] == 2.0


async def test_a_feed_goes_on_from_its_state(clients: tuple[Client, Client]) -> None:
    alpha, beta = clients
    rule = Rule(window=3)
    one = feed(alpha, rule)
    await one.gather(0, [PromptId("p0"), PromptId("p1")], [])
    for step in range(3):
        await close_step(beta, step, f"p{step}")
    await one.refresh()
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(one.state()), type=FeedState)
    other = feed(alpha, rule)
    other.restore(state)
    assert other.follow({0}, 2) == one.follow({0}, 2) != []
    for each in (one, other):
        await each.gather(3, [PromptId("p2")], [])
        each.hits.close()
    assert one.hits.take() == other.hits.take() == {"peer/beta/hit_rate": 1.0, "peer/beta/prompts": 3.0}
