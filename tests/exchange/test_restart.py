"""A hub that is started again on its directory: nothing durable is lost, epochs go on, and readers skip nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import exchange
from exchange import service
from exchange.errors import StorageError
from exchange.testing import a_rollout_group, rewards_of
from exchange.types import AgentName, Cursor, PromptId, Version


@asynccontextmanager
async def serving(directory: Path, *, run_id: str = "r", **config: object) -> AsyncIterator[str]:
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    settings = exchange.HubConfig(run_id=run_id, **config)  # type: ignore[arg-type]
    hub = asyncio.create_task(
        exchange.serve("tcp://127.0.0.1:0", settings, stop=stop, on_ready=ready.set_result, directory=directory)
    )
    done, _ = await asyncio.wait({hub, ready}, return_when=asyncio.FIRST_COMPLETED)
    if hub in done:
        hub.result()
    try:
        yield ready.result()
    finally:
        stop.set()
        await hub


async def steps_behind(endpoint: str, after: Cursor = Cursor(0)) -> tuple[list[int], Cursor]:  # noqa: B008
    async with exchange.connect(endpoint, name="reader", run_id="r") as reader:
        got = await reader.gather(kinds={"rewards", "rollouts"}, after=after)
        return [row.experience.step for row in got.rows], got.cursor


async def test_what_was_durable_is_there_again_and_a_reader_goes_on_where_it_was(tmp_path: Path) -> None:
    async with serving(tmp_path) as endpoint, exchange.connect(endpoint, name="alpha", run_id="r") as alpha:
        for step in range(3):
            await alpha.publish(rewards_of("alpha", step, "p"), ack="durable")
        await alpha.publish(a_rollout_group("alpha", 3, "p", tokens=3000), ack="durable")
        seen, cursor = await steps_behind(endpoint)
    assert seen == [0, 1, 2, 3]
    async with serving(tmp_path) as endpoint:
        assert (await steps_behind(endpoint))[0] == [0, 1, 2, 3]
        async with exchange.connect(endpoint, name="alpha", run_id="r") as alpha:
            assert alpha.epoch == 1
            await alpha.publish(rewards_of("alpha", 4, "p", epoch=1), ack="durable")
        # The new record's cursor is above every cursor of the first hub.
        assert (await steps_behind(endpoint, cursor))[0] == [4]


class Critique(exchange.PromptExperience, frozen=True, kw_only=True, tag="critiques/1"):
    """A kind that no hub knows."""

    text: str


async def test_kinds_that_the_hub_does_not_know_are_there_again_too(tmp_path: Path) -> None:
    critique = Critique(
        agent=AgentName("alpha"), step=1, version=Version(0, 1), prompt_id=PromptId("p"), task="reverse", text="too short"
    )
    own: dict[str, Any] = {"run_id": "r", "types": [Critique]}
    async with serving(tmp_path) as endpoint, exchange.connect(endpoint, name="alpha", **own) as alpha:
        await alpha.publish(critique, ack="durable")
    async with serving(tmp_path) as endpoint, exchange.connect(endpoint, name="reader", **own) as reader:
        got = await reader.gather(kinds={"critiques"}, prompt_ids=[PromptId("p")])
        assert [row.experience for row in got.rows] == [critique]


async def test_a_subscriber_goes_on_over_a_restart_also_with_what_memory_has_not(tmp_path: Path) -> None:
    async with serving(tmp_path) as endpoint, exchange.connect(endpoint, name="alpha", run_id="r") as alpha:
        receipts = [await alpha.publish(a_rollout_group("alpha", step, "p", tokens=256), ack="durable") for step in range(20)]
    for memory_bytes in (256 << 20, 150_000):
        assert await steps_of_a_subscriber(tmp_path, receipts[0].cursor, memory_bytes) == (list(range(1, 20)), 0)


async def test_a_damaged_record_stops_neither_the_hub_nor_its_readers(tmp_path: Path) -> None:
    async with serving(tmp_path) as endpoint, exchange.connect(endpoint, name="alpha", run_id="r") as alpha:
        receipts = [await alpha.publish(a_rollout_group("alpha", step, "p", tokens=256), ack="durable") for step in range(20)]
    with (tmp_path / "00000001.seg").open("r+b") as file:
        for step in (5, 18):
            file.seek(step * (tmp_path / "00000001.seg").stat().st_size // 20 + 1000)
            file.write(b"harm")
    steps = [step for step in range(1, 20) if step not in (5, 18)]
    assert await steps_of_a_subscriber(tmp_path, receipts[0].cursor, 150_000) == (steps, 1)


async def steps_of_a_subscriber(directory: Path, after: Cursor, memory_bytes: int) -> tuple[list[int], int]:
    """The steps up to 19, and how many gaps were told."""
    gaps, steps = 0, list[int]()
    async with (
        serving(directory, memory_bytes=memory_bytes) as endpoint,
        exchange.connect(endpoint, name="reader", run_id="r") as reader,
        asyncio.timeout(20),
    ):
        subscription = reader.subscribe(kinds={"rollouts"}, after=after)
        while 19 not in steps:
            try:
                async for row in subscription:
                    steps.append(row.experience.step)
                    if row.experience.step == 19:
                        break
            except exchange.GapError:
                gaps += 1
    return steps, gaps


async def test_a_named_consumer_goes_on_where_it_was_and_the_accounts_add_up(tmp_path: Path) -> None:
    handed = []
    for _ in range(2):
        async with serving(tmp_path) as endpoint, exchange.connect(endpoint, name="alpha", run_id="r") as alpha:
            for step in range(3):
                await alpha.publish(rewards_of("alpha", step, "p", epoch=alpha.epoch), ack="durable")
            async with exchange.connect(endpoint, name="reader", run_id="r") as reader, asyncio.timeout(20):
                subscription = reader.subscribe(kinds={"rewards"}, name="judge")
                for _ in range(2):
                    row = await anext(subscription)
                    handed.append((row.experience.version.epoch, row.experience.step))
                assert await subscription.commit() == row.cursor
            stats = await alpha.stats()
            assert (stats.recalled, stats.stored, stats.committing) == (stats.stored - 3, 3 + stats.recalled, 0)
    assert handed == [(0, 0), (0, 1), (0, 2), (1, 0)]


@pytest.mark.slow
async def test_retention_and_checkpoint_come_after_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "UPKEEP_INTERVAL_S", 0.0)
    async with serving(tmp_path, disk_bytes=100_000) as endpoint, exchange.connect(endpoint, name="alpha", run_id="r") as alpha:
        async with asyncio.timeout(20):
            for step in range(30):
                await alpha.publish(a_rollout_group("alpha", step, "p", tokens=256), ack="durable")
            while (disk := (await alpha.stats()).disk) is None or disk.wal_bytes or disk.nbytes > 130_000:
                pass
        assert disk.dropped_segments > 10 and disk.records < 10


async def test_records_that_were_only_accepted_are_kept_by_a_hub_that_ends_in_order(tmp_path: Path) -> None:
    async with serving(tmp_path) as endpoint, exchange.connect(endpoint, name="alpha", run_id="r") as alpha:
        await alpha.publish(rewards_of("alpha", 7, "p"))
    async with serving(tmp_path) as endpoint:
        assert (await steps_behind(endpoint))[0] == [7]


async def test_a_worker_that_comes_back_to_a_new_hub_stores_nothing_twice(tmp_path: Path) -> None:
    identity = exchange.new_routing_id()
    async with (
        serving(tmp_path) as endpoint,
        exchange.connect(endpoint, name="alpha", run_id="r", identity=identity) as alpha,
    ):
        for step in range(3):
            await alpha.publish(rewards_of("alpha", step, "p"), ack="durable")
    async with serving(tmp_path) as endpoint:
        async with exchange.connect(endpoint, name="alpha", run_id="r", identity=identity, first_seq=2) as alpha:
            again = [await alpha.publish(rewards_of("alpha", step, "p"), ack="durable") for step in (1, 2, 3)]
        assert alpha.epoch == 0
        assert [receipt.duplicate for receipt in again] == [True, True, False]
        assert (await steps_behind(endpoint))[0] == [0, 1, 2, 3]


async def test_memory_takes_back_only_what_fits(tmp_path: Path) -> None:
    async with serving(tmp_path) as endpoint, exchange.connect(endpoint, name="alpha", run_id="r") as alpha:
        for step in range(20):
            await alpha.publish(a_rollout_group("alpha", step, "p", tokens=256), ack="durable")
    async with serving(tmp_path, memory_bytes=150_000) as endpoint:
        steps, _ = await steps_behind(endpoint)
    assert 1 < len(steps) < 20
    assert steps == list(range(20 - len(steps), 20))


async def test_a_directory_of_another_run_or_another_hub_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path):
        with pytest.raises(StorageError):
            async with serving(tmp_path):
                pass
    with pytest.raises(StorageError, match="run"):
        async with serving(tmp_path, run_id="another"):
            pass


async def test_a_hub_in_memory_refuses_durable_records() -> None:
    async with exchange.memory() as hub, hub.connect("alpha") as alpha:
        with pytest.raises(exchange.RefusedError, match="not_durable"):
            await alpha.publish(rewards_of("alpha", 0, "p"), ack="durable")
