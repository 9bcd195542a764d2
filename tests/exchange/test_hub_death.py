"""Hubs that are killed, interrupted and started again, in processes of their own."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hub_children import hub_child, script_child, start_hub

import exchange
from exchange.errors import RecordTooLargeError
from exchange.messages import Gather, Hello
from exchange.sockets import connect_channel
from exchange.testing import a_rollout_group, rewards_of
from exchange.types import START, AgentName, Cursor
from exchange.wire import encode_message

HOUR_NS = 3_600_000_000_000


@pytest.fixture
def endpoint() -> Iterator[str]:
    directory = exchange.private_ipc_dir()
    yield f"ipc://{directory}/hub"
    shutil.rmtree(directory)


@pytest.mark.slow
async def test_a_hub_that_is_killed_leaves_another_runs_hub_untouched(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with hub_child(tmp_path / "a") as doomed, hub_child(tmp_path) as other:
        async with exchange.connect(other.endpoint, name="alpha", run_id="r") as alpha:
            await alpha.publish(rewards_of("alpha", 1, "p"))
            doomed.kill()
            await alpha.publish(rewards_of("alpha", 2, "p"))
            got = await alpha.gather(kinds={"rewards"}, agents={alpha.name})
            assert [row.experience.step for row in got.rows] == [1, 2]
        assert other.process.poll() is None and other.errors.read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [1, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(300)])])
async def test_a_hub_that_is_killed_again_and_again_under_load_loses_and_repeats_nothing(
    restarts: int, tmp_path: Path, endpoint: str
) -> None:
    done, acknowledged, seen = asyncio.Event(), list[int](), list[int]()

    async def publish(alpha: exchange.Client) -> None:
        step = 0
        while not done.is_set():
            await alpha.publish(rewards_of("alpha", step, "p"), ack="durable")
            acknowledged.append(step)
            step += 1

    async def read(beta: exchange.Client) -> None:
        async for row in beta.subscribe(kinds={"rewards"}, after=Cursor(1)):
            seen.append(row.experience.step)

    async def some_more() -> None:
        target = len(acknowledged) + 20
        while len(seen) < target:  # noqa: ASYNC110  # workers tell by what they have
            await asyncio.sleep(0.001)

    with hub_child(tmp_path, endpoint=endpoint, directory=tmp_path / "exchange") as first:
        async with (
            exchange.connect(endpoint, name="alpha", run_id="r") as alpha,
            exchange.connect(endpoint, name="beta", run_id="r") as beta,
            asyncio.timeout(30 + 5 * restarts),
        ):
            publishing, reading = asyncio.create_task(publish(alpha)), asyncio.create_task(read(beta))
            await some_more()
            first.kill()
            for restart in range(restarts):
                with hub_child(tmp_path, endpoint=endpoint, directory=tmp_path / "exchange") as hub:
                    await some_more()
                    if restart == restarts - 1:
                        done.set()
                        await publishing
                        while len(seen) < len(acknowledged):  # noqa: ASYNC110
                            await asyncio.sleep(0.001)
                        reading.cancel()
                        await asyncio.wait((reading,))
                    hub.kill()
    assert seen == acknowledged == list(range(len(seen)))


STAGES = ["starting", "loaded", "with a peer that reads nothing"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
async def test_an_interrupt_ends_a_hub_at_every_stage_and_the_next_finds_its_place_free(
    stage: str, tmp_path: Path, endpoint: str
) -> None:
    hub = start_hub(endpoint, tmp_path / "stderr")
    assert hub.stdout is not None
    deaf = connect_channel(endpoint, routing_id=b"\1deaf", credit_messages=64)
    try:
        if stage != "starting":
            assert hub.stdout.readline().startswith("ready")
        if stage == "loaded":
            async with exchange.connect(endpoint, name="alpha", run_id="r") as alpha:
                await asyncio.gather(*(alpha.publish(rewards_of("alpha", step, "p")) for step in range(200)))
                waiting = asyncio.create_task(alpha.gather(kinds={"rewards"}, min_count=1, deadline_s=60.0))
                await alpha.stats()
                hub.send_signal(signal.SIGTERM)
                with pytest.raises(exchange.HubLostError, match="has ended"):
                    await asyncio.wait_for(waiting, 20)
        elif stage == "with a peer that reads nothing":
            async with exchange.connect(endpoint, name="alpha", run_id="r", request_timeout_s=1.0) as alpha:
                await alpha.publish(a_rollout_group("alpha", 1, "p", tokens=20_000))
                await deaf.send(encode_message(Hello(name=AgentName("deaf"), run_id="r")))
                for number in range(20):
                    await deaf.send(encode_message(Gather(kinds=frozenset({"rollouts"})), number))
                hub.send_signal(signal.SIGINT)
        hub.send_signal(signal.SIGINT)
        await asyncio.wait_for(asyncio.to_thread(hub.wait), 20)
    finally:
        deaf.close()
        hub.kill()
        hub.wait()
    with hub_child(tmp_path, endpoint=endpoint):
        async with exchange.connect(endpoint, name="alpha", run_id="r") as alpha:
            await alpha.publish(rewards_of("alpha", 1, "p"))


@pytest.mark.slow
def test_a_worker_leaves_a_hub_that_has_stopped_with_messages_unsent(tmp_path: Path) -> None:
    script = """
import asyncio, sys, exchange
from exchange.testing import a_rollout_group
async def main(endpoint):
    async with exchange.connect(endpoint, name="alpha", run_id="r", request_timeout_s=30.0) as alpha:
        await alpha.stats()
        print("there", flush=True)
        sys.stdin.readline()
        waiting = [asyncio.create_task(alpha.publish(a_rollout_group("alpha", step, "p", tokens=20_000))) for step in range(20)]
        await asyncio.wait(waiting, timeout=0.1)
asyncio.run(main(sys.argv[1]))
"""
    with hub_child(tmp_path) as hub, script_child(script, hub.endpoint) as worker:
        hub.process.send_signal(signal.SIGSTOP)
        with suppress(subprocess.TimeoutExpired):
            worker.communicate("go\n", timeout=20)
        assert worker.returncode is not None


HOLDER = """
import asyncio, sys, exchange
async def main(endpoint):
    async with exchange.connect(endpoint, name="holder", run_id="r") as holder:
        async with holder.lease(group="judges", kinds={"rewards"}, count=3) as batch:
            await batch.done(batch.rows[0])
            print(len(batch.rows), flush=True)
            await asyncio.sleep(60)
asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.slow
async def test_what_a_killed_process_had_not_settled_comes_to_another(tmp_path: Path) -> None:
    with hub_child(tmp_path) as hub:
        async with (
            exchange.connect(hub.endpoint, name="alpha", run_id="r") as alpha,
            exchange.connect(hub.endpoint, name="beta", run_id="r") as beta,
            asyncio.timeout(20),
        ):
            for step in range(3):
                await alpha.publish(rewards_of("alpha", step, "p"))
            with script_child(HOLDER, hub.endpoint) as holder:
                holder.send_signal(signal.SIGKILL)
            got: list[int] = []
            while len(got) < 2:
                async with beta.lease(group="judges", kinds={"rewards"}, count=3) as batch:
                    got += [row.experience.step for row in batch.rows]
            assert got == [1, 2]


@asynccontextmanager
async def serving(endpoint: str, directory: Path | None, **config: object) -> AsyncIterator[None]:
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    settings = exchange.HubConfig(run_id="r", **config)  # type: ignore[arg-type]
    hub = asyncio.create_task(exchange.serve(endpoint, settings, stop=stop, on_ready=ready.set_result, directory=directory))
    try:
        await ready
        yield
    finally:
        stop.set()
        await hub


@pytest.mark.parametrize("stepped_h", [-1, 1])
async def test_a_wall_clock_that_was_set_by_an_hour_between_two_hubs_changes_no_order(
    stepped_h: int, tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, cursor = time.time_ns, Cursor(1)
    for step, clock in enumerate((now, lambda: now() + stepped_h * HOUR_NS)):
        monkeypatch.setattr(time, "time_ns", clock)
        async with (
            serving(endpoint, tmp_path, max_age_s=7200.0),
            exchange.connect(endpoint, name="alpha", run_id="r") as alpha,
            exchange.connect(endpoint, name="beta", run_id="r") as beta,
        ):
            await alpha.publish(rewards_of("alpha", step, "p", epoch=alpha.epoch), ack="durable")
            got = await beta.gather(kinds={"rewards"}, after=cursor)
            assert [row.experience.step for row in got.rows] == [step]
            assert 0 <= got.rows[0].age_s < 60
            assert len((await beta.gather(kinds={"rewards"}, after=START)).rows) == step + 1
            cursor = got.cursor


async def test_a_reader_of_a_hub_in_memory_whose_clock_was_set_back_gets_new_records_and_is_told(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, cursor = time.time_ns, START
    for step, clock in enumerate((now, lambda: now() - HOUR_NS)):
        monkeypatch.setattr(time, "time_ns", clock)
        async with (
            serving(endpoint, None),
            exchange.connect(endpoint, name="alpha", run_id="r") as alpha,
            exchange.connect(endpoint, name="beta", run_id="r") as beta,
            asyncio.timeout(20),
        ):
            await alpha.publish(rewards_of("alpha", step, "p", epoch=alpha.epoch))
            rows = beta.subscribe(kinds={"rewards"}, after=cursor)
            if step:
                with pytest.raises(exchange.GapError):
                    await anext(rows)
            row = await anext(rows)
            assert row.experience.step == step
            cursor = row.cursor


async def test_new_limits_hold_for_a_hub_that_is_started_again(tmp_path: Path, endpoint: str) -> None:
    async with (
        serving(endpoint, tmp_path, credit_messages=1, credit_bytes=8 << 20, memory_bytes=64 << 20),
        exchange.connect(endpoint, name="alpha", run_id="r") as alpha,
    ):
        for step in range(4):
            await alpha.publish(a_rollout_group("alpha", step, "p", tokens=20_000), ack="durable")
        assert (await alpha.stats()).stored == 4
    async with (
        serving(endpoint, tmp_path, credit_messages=8, credit_bytes=8 << 20, memory_bytes=5 << 20),
        exchange.connect(endpoint, name="alpha", run_id="r") as alpha,
    ):
        stats = await alpha.stats()
        assert (stats.stored, stats.disk and stats.disk.records) == (2, 4), "memory takes back what fits now"
        with pytest.raises(RecordTooLargeError):
            await alpha.publish(a_rollout_group("alpha", 5, "p", tokens=40_000, epoch=1))
        # More than the first hub had let a worker have under way, in any order.
        for step in range(8):
            await alpha.publish(rewards_of("alpha", step, "p", epoch=1))
