"""What a hub's process has in memory: no more than its budget says, whoever does not read, drops or sends very much."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_children import HubChild, hub_child, script_child
from test_faults import joined, stranger

import exchange
from exchange.messages import AskStats, Gather
from exchange.store import OVERHEAD_BYTES, PROMPT_BYTES
from exchange.testing import a_rollout_group, rewards_of, step_prompts
from exchange.types import START, Cursor
from exchange.wire import encode_message, encode_record

MB = 1 << 20
CONSUMER = """
import asyncio, sys, exchange
async def main(endpoint):
    async with exchange.connect(endpoint, name="consumer", run_id="r", request_timeout_s=200.0) as me:
        print("there", flush=True)
        rows = me.subscribe(kinds={"rollouts"}, max_bytes=32 << 20)
        while True:
            try:
                async for row in rows:
                    print(row.experience.step, flush=True)
            except exchange.GapError:
                pass
asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubChild]:
    with hub_child(tmp_path_factory.mktemp("hub"), memory_bytes=8 * MB, heartbeat_s=1.0) as child:
        yield child


async def while_a_consumer_is_stopped(hub: HubChild, *, records: int, pause_s: float = 0.0) -> None:
    """Budget: what is stored, and for each of both workers what it has under way. Rollouts have 16 MB."""
    memory_bytes, credit_bytes = 64 * MB, 32 * MB
    before = hub.rss_bytes()
    async with exchange.connect(hub.endpoint, name="alpha", run_id="r") as alpha:
        with script_child(CONSUMER, hub.endpoint) as reader:
            await alpha.publish(a_rollout_group("alpha", 0, "p", tokens=160_000))
            assert reader.stdout is not None and reader.stdout.readline() == "0\n"
            reader.send_signal(signal.SIGSTOP)
            for step in range(1, records):
                await alpha.publish(a_rollout_group("alpha", step, "p", tokens=160_000))
                await asyncio.sleep(pause_s / records)
            stats = await alpha.stats()
            size = stats.stored_bytes // stats.stored
            peak = hub.rss_bytes("VmHWM") - before
            assert 15 * MB < size < 18 * MB
            assert stats.stored + stats.evicted == records and stats.stored_bytes <= memory_bytes
            assert peak < 1.1 * (memory_bytes + 2 * credit_bytes), f"{peak / MB:.0f} MB"
            assert peak < 3 * memory_bytes, "three bytes for one"
            reader.send_signal(signal.SIGCONT)
            assert int(reader.stdout.readline()) > 0, "it goes on when it is woken"


@pytest.mark.slow
async def test_a_consumer_that_is_stopped_costs_a_hub_no_more_than_its_budget(tmp_path: Path) -> None:
    with hub_child(tmp_path, memory_bytes=64 * MB, credit_bytes=32 * MB, heartbeat_s=1.0) as hub:
        await while_a_consumer_is_stopped(hub, records=12)


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_a_consumer_that_is_stopped_for_a_minute_costs_a_hub_no_more_than_its_budget(tmp_path: Path) -> None:
    with hub_child(tmp_path, memory_bytes=64 * MB, credit_bytes=32 * MB, heartbeat_s=1.0) as hub:
        await while_a_consumer_is_stopped(hub, records=300, pause_s=60.0)


async def small_records(hub: HubChild, count: int) -> tuple[float, float]:
    """Bytes that a record takes, and that the hub counts for it."""
    async with exchange.connect(hub.endpoint, name="small", run_id="r") as small:

        async def publish(first: int, last: int) -> None:
            for start in range(first, last, 50):
                steps = range(start, min(start + 50, last))
                await asyncio.gather(*(small.publish(rewards_of("small", step, f"prompt-{step}")) for step in steps))

        await publish(0, count // 10)
        before, counted_before = hub.rss_bytes(), (await small.stats()).stored_bytes
        await publish(count // 10, count)
        counted, new = (await small.stats()).stored_bytes - counted_before, count - count // 10
    return (hub.rss_bytes() - before) / new, counted / new


@pytest.mark.slow
async def test_small_records_take_what_is_counted_for_them(hub: HubChild) -> None:
    taken, counted = await small_records(hub, 2_000)
    assert taken < 1.2 * counted
    assert counted < 2 * encode_record(rewards_of("alpha", 1, "prompt-1")).nbytes + OVERHEAD_BYTES + PROMPT_BYTES


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_very_many_small_records_take_what_is_counted_for_them(tmp_path: Path) -> None:
    with hub_child(tmp_path, heartbeat_s=1.0) as hub:
        taken, counted = await small_records(hub, 100_000)
        assert taken < 1.2 * counted


@pytest.mark.slow
async def test_records_about_very_many_prompts_take_what_is_counted_for_them(hub: HubChild) -> None:
    before = hub.rss_bytes()
    async with exchange.connect(hub.endpoint, name="many", run_id="r") as many:
        for step in range(12):
            await many.publish(step_prompts("many", step, *(f"{step}-{number}" for number in range(10_000))))
        assert (await many.stats()).evicted > 8
    assert hub.rss_bytes() - before < 2 * 8 * MB


async def connect_send_and_drop(hub: HubChild, times: int) -> int:
    """Growth of the hub over the second half of so many peers that come, say something and are gone."""
    before = 0
    for number in range(times):
        if number == times // 2:
            before = hub.rss_bytes()
        async with stranger(hub.endpoint, b"\1%d" % number) as peer:
            if number % 10 == 0 and number < 1000:
                await joined(peer, f"passer-{number}")
                await peer.send(encode_message(Gather(kinds=frozenset({"rewards"}), min_count=1, deadline_s=100.0)))
            else:
                await peer.send(encode_message(AskStats()))
                await peer.receive()
            await peer.send([b"x" * 100_000])
    return hub.rss_bytes() - before


@pytest.mark.slow
async def test_peers_that_connect_send_and_drop_leave_nothing_in_memory(hub: HubChild) -> None:
    assert await connect_send_and_drop(hub, 120) < 4 * MB
    async with exchange.connect(hub.endpoint, name="alpha", run_id="r") as alpha:
        await alpha.publish(rewards_of("alpha", 1, "p"))


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_very_many_peers_that_connect_send_and_drop_leave_nothing_in_memory(tmp_path: Path) -> None:
    with hub_child(tmp_path) as hub:
        assert await connect_send_and_drop(hub, 10_000) < 4 * MB


@pytest.mark.slow
async def test_large_rows_that_were_let_go_stay_in_no_reader(tmp_path: Path) -> None:
    """Also while each of its gathers has a long deadline, and one waits all the time."""

    def own_rss_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    with hub_child(tmp_path, memory_bytes=64 * MB, credit_bytes=32 * MB, heartbeat_s=1.0) as hub:
        async with (
            exchange.connect(hub.endpoint, name="alpha", run_id="r") as alpha,
            exchange.connect(hub.endpoint, name="beta", run_id="r") as beta,
        ):
            waiting = asyncio.create_task(beta.gather(kinds={"rewards"}, min_count=1, deadline_s=3600.0))
            cursor, middle = Cursor(START), 0
            for step in range(30):
                await alpha.publish(a_rollout_group("alpha", step, "p", tokens=40_000))
                got = await beta.gather(kinds={"rollouts"}, after=cursor, min_count=1, deadline_s=3600.0, max_bytes=64 * MB)
                cursor = got.cursor
                assert len(got.rows) == 1
                if step == 15:
                    middle = own_rss_bytes()
            assert own_rss_bytes() - middle < 32 * MB, "fourteen rows of 4 MB"
            waiting.cancel()
