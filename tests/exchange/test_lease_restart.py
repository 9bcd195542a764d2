"""Leases of a hub with a disk: counts are on it before anybody is told, and go on when the hub is started again."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from hub_answers import ListDisk, refusal

import exchange
from exchange.config import HubConfig
from exchange.errors import LeaseLostError
from exchange.hub import Hub
from exchange.lease_recovery import recover_groups
from exchange.messages import AskDeadLetters, DeadLetters, Lease, Leased, Release, Renew, Settled
from exchange.replays import read_chunk
from exchange.testing import HubDriver, a_rollout_group, rewards_of
from exchange.types import Cursor
from exchange.wire import Outgoing

HUB = Path(__file__).with_name("hub_process.py")


@asynccontextmanager
async def serving(directory: Path, **config: object) -> AsyncIterator[str]:
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    settings = exchange.HubConfig(run_id="r", **config)  # type: ignore[arg-type]
    hub = asyncio.create_task(
        exchange.serve("tcp://127.0.0.1:0", settings, stop=stop, on_ready=ready.set_result, directory=directory)
    )
    await asyncio.wait({hub, ready}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield ready.result()
    finally:
        stop.set()
        await hub


def steps(batch: exchange.Batch) -> list[int]:
    return [row.experience.step for row in batch.rows]


async def test_groups_go_on_when_the_hub_is_started_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as endpoint, exchange.connect(endpoint, name="maker", run_id="r") as maker:
        for step in range(5):
            await maker.publish(rewards_of("maker", step, "p"), ack="durable")
        async with worker(endpoint, "judge") as judge, judge.lease(group="judges", kinds={"rewards"}, count=3) as batch:
            await batch.done(*batch.rows[:1])
            await batch.fail(batch.rows[1], detail="not today")
            await batch.give_back(batch.rows[2])
        before = (await maker.stats()).groups["judges"]
    async with serving(tmp_path) as endpoint, exchange.connect(endpoint, name="judge", run_id="r") as judge:
        assert (await judge.stats()).groups["judges"] == before
        async with judge.lease(group="judges", kinds={"rewards"}, count=5) as batch:
            assert (steps(batch), batch.deliveries) == ([1, 2, 3, 4], (2, 1, 1, 1))
        with pytest.raises(exchange.RefusedError, match="other_filter"):
            async with judge.lease(group="judges", kinds={"rollouts"}):
                pass
        after = (await judge.stats()).groups["judges"]
        assert (after.matching, after.done, after.waiting) == (5, 5, 0)


async def test_what_memory_has_let_go_is_leased_from_the_disk(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, memory_bytes=40_000) as endpoint,
        exchange.connect(endpoint, name="maker", run_id="r") as maker,
        exchange.connect(endpoint, name="judge", run_id="r") as judge,
    ):
        async with judge.lease(group="judges", kinds={"rollouts", "rewards"}, deadline_s=0) as batch:
            assert batch.rows == ()
        for step in range(8):
            await maker.publish(a_rollout_group("maker", step, "p", tokens=128), ack="durable")
            await maker.publish(rewards_of("maker", 100 + step, "p"), ack="durable")
        assert (await judge.stats()).evicted > 4
        done: list[int] = []
        while len(done) < 16:
            async with judge.lease(group="judges", kinds={"rollouts", "rewards"}, count=5, deadline_s=0) as batch:
                assert batch.rows, "a request does not end before the disk was read"
                done += steps(batch)
        assert done == [number for step in range(8) for number in (step, 100 + step)]
        assert (await judge.stats()).groups["judges"].lost == 0


@asynccontextmanager
async def hub_process(endpoint: str, directory: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(HUB), endpoint, str(directory), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert b"ready" in await asyncio.wait_for(process.stdout.readline(), 20)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def worker(endpoint: str, name: str, **settings: float) -> AbstractAsyncContextManager[exchange.Client]:
    return exchange.connect(endpoint, name=name, run_id="r", **settings)  # type: ignore[arg-type]


@pytest.mark.slow
async def test_a_record_that_is_out_when_the_hub_is_killed_comes_again_with_its_count(tmp_path: Path) -> None:
    directory = exchange.private_ipc_dir()
    endpoint = f"ipc://{directory}/hub"
    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(hub_process(endpoint, tmp_path))
        judge = await stack.enter_async_context(worker(endpoint, "judge"))
        async with worker(endpoint, "maker") as maker:
            for step in range(4):
                await maker.publish(rewards_of("maker", step, "p"), ack="durable")
        async with judge.lease(group="judges", kinds={"rewards"}, count=3) as batch:
            await batch.done(batch.rows[1])
            hub.kill()
            await hub.wait()
            await stack.enter_async_context(hub_process(endpoint, tmp_path))
            with pytest.raises(LeaseLostError, match="hub was started anew"):
                await batch.done(batch.rows[0])
        async with judge.lease(group="judges", kinds={"rewards"}, count=9) as batch:
            assert [*zip(steps(batch), batch.deliveries, strict=True)] == [(0, 2), (2, 2), (3, 1)]
        group = (await judge.stats()).groups["judges"]
        assert (group.matching, group.done, group.waiting, group.leased) == (4, 4, 0, 0)
    shutil.rmtree(directory)


class DurableDriver(HubDriver):
    """A hub with a disk that writes and reads when it is told to."""

    def __init__(self, **config: object) -> None:
        super().__init__(HubConfig(run_id="r", **config))  # type: ignore[arg-type]
        self.hub = Hub(self.hub.config, clock=self.clock, durable=True)
        self.disk, self.rows = ListDisk(), dict[tuple[str, int], bytes]()
        self.join("alpha", "beta")

    def write(self, *, fails: bool = False) -> list[Outgoing]:
        assert self.hub.commits is not None
        group = self.hub.commits.take()
        if fails:
            return self.hub.commit_failed("disk full")
        self.disk.records |= {each.record.cursor: each.record for each in group}
        for key, row in self.hub.commits.leases.rows.items():
            self.rows.pop(key, None)
            self.rows |= {} if row is None else {key: row}
        return self.hub.committed()

    def start_anew(self) -> Hub:
        self.hub = Hub(self.hub.config, clock=self.clock, durable=True, first_cursor=Cursor(self.hub.stats().cursor + 1))
        self.hub.recall((), missing_to=Cursor(0), groups=recover_groups(self.rows, self.disk, limit_bytes=1 << 20))
        self.join("alpha", "beta")
        return self.hub


def lease(number: int, **changes: object) -> Lease:
    return msgspec.structs.replace(Lease(id=number, group="judges", kinds=frozenset({"rewards"}), lease_s=30.0), **changes)


def done(number: int, *cursors: int) -> Release:
    return Release(group="judges", lease=number, cursors=tuple(map(Cursor, cursors)), outcome="done")


def test_nobody_is_told_before_it_is_on_disk() -> None:
    driver = DurableDriver()
    driver.publish(rewards_of("alpha", 0, "p"))
    driver.write()
    assert driver.say("beta", lease(1)) == []
    assert driver.say("beta", Renew(lease=1)) == [], "answers keep their order"
    assert ("judges", 1) not in driver.rows
    told = driver.write()
    assert [type(out.message) for out in told] == [Leased, Settled] and ("judges", 1) in driver.rows
    assert driver.say("beta", done(1, 1)) == []
    assert driver.say("beta", done(1, 1)) == [], "a word that comes again waits too"
    assert [out.message for out in driver.write()] == [Settled(), Settled()] and ("judges", 1) not in driver.rows
    assert driver.ask("beta", Renew(lease=1)) != Settled()


def test_a_hand_out_that_cannot_be_written_is_refused_and_not_counted() -> None:
    driver = DurableDriver()
    driver.publish(rewards_of("alpha", 0, "p"))
    driver.write()
    driver.say("beta", lease(1))
    (answer,) = driver.write(fails=True)
    assert refusal(answer.message) == "storage"
    driver.say("beta", lease(2))
    (answer,) = driver.write()
    assert isinstance(answer.message, Leased) and answer.message.deliveries == (1,)
    groups = recover_groups(driver.rows, driver.disk, limit_bytes=1 << 20)
    assert (groups[0].stats().waiting, groups[0].lowest()) == (1, 1)


def test_a_record_that_is_out_whenever_the_hub_is_killed_is_given_up() -> None:
    driver = DurableDriver()
    driver.publish(rewards_of("alpha", 0, "p"))
    driver.write()
    for count in range(1, 6):
        driver.say("beta", lease(count))
        (answer,) = driver.write()
        assert isinstance(answer.message, Leased) and answer.message.deliveries == (count,)
        driver.start_anew()
    for _ in range(2):
        driver.write()
        letters = driver.ask("beta", AskDeadLetters(group="judges"))
        assert isinstance(letters, DeadLetters)
        assert [(each.cursor, each.reason, each.deliveries) for each in letters.letters] == [(1, "interrupted", 5)]
        driver.start_anew()


def test_what_was_done_out_of_order_is_not_done_again_and_what_was_passed_over_waits() -> None:
    driver = DurableDriver(edges=frozenset({("beta", "alpha", "rollouts"), ("carol", "alpha", "rewards")}))
    driver.say("beta", lease(1, kinds=("rewards", "rollouts")))
    for made in (rewards_of("alpha", 0, "p"), a_rollout_group("alpha", 1, "p"), a_rollout_group("alpha", 2, "p")):
        driver.publish(made)
        driver.write()
    driver.say("beta", lease(2, kinds=("rewards", "rollouts")))
    driver.write()
    driver.say("beta", done(2, 2))
    driver.write()
    hub = driver.start_anew()
    group = hub.stats().groups["judges"]
    assert (group.matching, group.done, group.waiting) == (3, 1, 2)


def test_a_disk_that_cannot_be_read_loses_nothing_and_holds_nobody_up() -> None:
    driver = DurableDriver()
    driver.say("beta", lease(1))
    driver.publish(rewards_of("alpha", 0, "p"))
    driver.write()
    anew = driver.start_anew()
    for fails in (True, False):
        assert driver.say("beta", lease(2 + fails)) == []
        reading = anew.next_reading()
        assert reading is not None and anew.next_reading() is None
        assert anew.tick() == [] and anew.next_deadline() is None, "the disk is waited for"
        if fails:
            assert [out.message for out in anew.replay_failed("no disk") + driver.write()] == [Leased(rows=(), deliveries=())]
            assert anew.next_reading() is None
        else:
            assert anew.replayed(read_chunk(driver.disk, reading)) == []
            (answer,) = driver.write()
            assert isinstance(answer.message, Leased) and answer.message.deliveries == (1,)


def test_records_that_the_disk_has_lost_are_counted_as_lost() -> None:
    driver = DurableDriver()
    driver.say("beta", lease(1))
    for step in range(3):
        driver.publish(rewards_of("alpha", step, "p"))
        driver.write()
    driver.say("beta", lease(2))
    driver.write()
    driver.disk.drop(Cursor(2))
    anew = driver.start_anew()
    group = anew.stats().groups["judges"]
    assert (group.matching, group.lost, group.waiting) == (2, 1, 1)
    assert driver.say("beta", lease(3)) == []
    reading = anew.next_reading()
    assert reading is not None
    driver.disk.drop(Cursor(3))
    assert [out.message for out in anew.replayed(read_chunk(driver.disk, reading))] == []
    assert [out.message for out in driver.write()] == [Leased(rows=(), deliveries=())]
    assert anew.stats().groups["judges"].lost == 2
