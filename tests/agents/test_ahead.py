"""Batches ahead: what is begun when, how old it is at its use, and what becomes of what is too old."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from agents.ahead import Ahead, Batch, Staleness
from agents.drawing import Draw
from agents.errors import StalenessError
from agents.testing import make_group, make_prompt
from agents.types import Group, Prompt
from exchange.types import Version


class FakeSampler:
    """Samples by the version that it is told of; a batch that is held back is ready when it is let go."""

    def __init__(self) -> None:
        self.version = Version(0, 0)
        self.begun: list[int] = []
        self.held: dict[int, asyncio.Event] = {}
        self.drawn = 0

    async def draw(self) -> Draw:
        self.drawn += 1
        return Draw(prompts=[make_prompt(f"p{self.drawn}")], schedule_steps=frozenset({self.drawn - 1}))

    async def sample(self, prompts: Sequence[Prompt], number: int) -> Sequence[Group]:
        self.begun.append(number)
        version = self.version
        if number in self.held:
            await self.held[number].wait()
        return [replace(make_group(prompt, [1, 0], step=number), version=version) for prompt in prompts]


def make_ahead(sampler: FakeSampler, max_staleness: int, staleness: Staleness = "wait") -> Ahead:
    ticks = iter(range(10_000))
    return Ahead(
        sampler.draw, sampler.sample, max_staleness=max_staleness, staleness=staleness, clock=lambda: float(next(ticks))
    )


async def steps(ahead: Ahead, sampler: FakeSampler, count: int) -> list[tuple[Batch, dict[str, float]]]:
    """`count` steps of a learner whose sampler has the new weights after each."""
    taken = []
    for _ in range(count):
        taken.append(await ahead.take(sampler.version))
        sampler.version = Version(0, sampler.version.step + 1)
    return taken


async def test_with_no_staleness_a_batch_is_begun_when_it_is_needed() -> None:
    sampler = FakeSampler()
    for number, (batch, metrics) in enumerate(await steps(make_ahead(sampler, 0), sampler, 3)):
        assert batch.number == number == batch.groups[0].version.step
        assert metrics["sample/staleness_max"] == 0 and not batch.groups[0].off_policy
    assert sampler.begun == [0, 1, 2]


@pytest.mark.parametrize("staleness", ["wait", "drop", "withhold"])
@pytest.mark.parametrize("lag", [1, 3])
async def test_the_age_at_use_grows_to_the_bound_and_stays(lag: int, staleness: Staleness) -> None:
    sampler = FakeSampler()
    taken = await steps(make_ahead(sampler, lag, staleness), sampler, 8)
    assert [batch.number for batch, _ in taken] == list(range(8))
    assert [int(metrics["sample/staleness_max"]) for _, metrics in taken] == [min(step, lag) for step in range(8)]
    assert [batch.groups[0].off_policy for batch, _ in taken] == [step > 0 for step in range(8)]
    assert not any(group.withheld for batch, _ in taken for group in batch.groups)
    assert sampler.drawn == 8 + lag


async def test_what_is_ahead_is_sampled_while_the_step_goes_on() -> None:
    sampler = FakeSampler()
    sampler.held = {1: asyncio.Event(), 2: asyncio.Event()}
    ahead = make_ahead(sampler, 2)
    await ahead.take(Version(0, 0))
    assert sampler.begun == [0, 1, 2]
    waiting = asyncio.create_task(ahead.take(Version(0, 1)))
    await asyncio.sleep(0)
    sampler.held[2].set()
    await asyncio.sleep(0)
    assert not waiting.done(), "in its order"
    sampler.held[1].set()
    assert (await waiting)[0].number == 1
    await ahead.close()


async def held_back(staleness: Staleness) -> list[tuple[Batch, dict[str, float]]]:
    """Four steps during which batch 1 is not ready, and two after."""
    sampler = FakeSampler()
    sampler.held = {1: asyncio.Event()}
    ahead = make_ahead(sampler, 2, staleness)
    before = await steps(ahead, sampler, 4)
    assert [batch.number for batch, _ in before] == [0, 2, 3, 4]
    sampler.held[1].set()
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.0)
    after = await steps(ahead, sampler, 2)
    await ahead.close()
    return after


async def test_a_batch_that_comes_too_late_is_dropped_and_counted() -> None:
    after = await held_back("drop")
    assert [batch.number for batch, _ in after] == [5, 6]
    assert [metrics["sample/dropped_stale_total"] for _, metrics in after] == [1, 1]


async def test_a_batch_that_comes_too_late_is_withheld_and_marked() -> None:
    after = await held_back("withhold")
    assert [batch.number for batch, _ in after] == [1, 5]
    (late, metrics), (fresh, _) = after
    assert late.groups[0].withheld and late.groups[0].off_policy and not fresh.groups[0].withheld
    assert metrics["sample/staleness_max"] == 4 and metrics["sample/withheld_stale_total"] == 1


async def test_of_a_batch_only_the_groups_that_are_too_old_are_dropped() -> None:
    async def mixed(prompts: Sequence[Prompt], number: int) -> Sequence[Group]:
        group = make_group(prompts[0], [1, 0], step=number)
        return [replace(group, version=Version(0, version)) for version in (1, 4, 5)]

    ahead = Ahead(FakeSampler().draw, mixed, max_staleness=1, staleness="drop")
    batch, metrics = await ahead.take(Version(0, 5))
    assert [group.version.step for group in batch.groups] == [4, 5]
    assert metrics["sample/dropped_stale_total"] == 1 and metrics["sample/staleness_mean"] == 0.5
    await ahead.close()


@pytest.mark.parametrize("staleness", ["wait", "drop"])
async def test_a_sampler_that_never_gets_the_weights_ends_the_run_with_a_diagnosis(staleness: Staleness) -> None:
    sampler = FakeSampler()
    ahead = make_ahead(sampler, 1, staleness)
    with pytest.raises(StalenessError, match=r"4 batches in a row.*learner is at version 7.*its sampler used is 0"):
        await ahead.take(Version(0, 7))
    await ahead.close()


async def test_a_sampler_that_never_gets_the_weights_ends_the_run_also_where_batches_are_withheld() -> None:
    sampler = FakeSampler()
    ahead = make_ahead(sampler, 1, "withhold")
    for step in range(7, 10):
        assert (await ahead.take(Version(0, step)))[0].groups[0].withheld
    with pytest.raises(StalenessError, match="4 batches in a row"):
        await ahead.take(Version(0, 10))
    await ahead.close()


@pytest.mark.parametrize("version", [Version(0, 3), Version(1, 0)])
async def test_weights_that_do_not_exist_yet_are_an_error(version: Version) -> None:
    sampler = FakeSampler()
    sampler.version = version
    with pytest.raises(StalenessError, match="weights that the learner has had"):
        await make_ahead(sampler, 0).take(Version(0, 2))


async def test_what_a_sampler_raises_is_raised_where_its_batch_is_taken() -> None:
    async def fail(prompts: Sequence[Prompt], number: int) -> Sequence[Group]:
        raise RuntimeError("no sampler")

    ahead = Ahead(FakeSampler().draw, fail, max_staleness=1, staleness="wait")
    with pytest.raises(RuntimeError, match="no sampler"):
        await ahead.take(Version(0, 0))
    await ahead.close()
