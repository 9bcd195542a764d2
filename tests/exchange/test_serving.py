"""A worker that serves and asks, against a hub that is played by the test: breaks, repeats, and the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from test_session import PlayedHub

from exchange.client import Client
from exchange.errors import ClosedError, HubLostError, RefusedError
from exchange.messages import (
    Bye,
    Cancel,
    Closing,
    Deliver,
    Fail,
    Goodbye,
    Hello,
    Reply,
    Request,
    Revoke,
    Serve,
    Settled,
    ToHub,
    Unknown,
    Welcome,
)
from exchange.requests import PeerReply, PeerRequest
from exchange.session import Session
from exchange.types import AgentName
from exchange.wire import encode_message, encode_record

ALPHA = AgentName("alpha")
WELCOME = Welcome(epoch=0, credit_messages=4, credit_bytes=1 << 20, max_record_bytes=1 << 20, heartbeat_s=60.0)


class Count(PeerReply, frozen=True, kw_only=True, tag="count/1"):
    count: int


class CountRequest(PeerRequest[Count], frozen=True, kw_only=True, tag="counts/1"):
    word: str


class Handler:
    """Counts its runs; each waits for `go`."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.go = asyncio.Event()
        self.ended = 0

    async def __call__(self, request: CountRequest) -> Count:
        self.runs.append(request.word)
        try:
            await self.go.wait()
        finally:
            self.ended += 1
        return Count(count=len(request.word))


@asynccontextmanager
async def joined(hub: PlayedHub) -> AsyncIterator[Client]:
    session = Session(hub, Hello(name=AgentName("beta"), run_id="r"), endpoint="played://hub", lost_after_s=60.0)
    client = Client(session, name=AgentName("beta"), request_timeout_s=5.0)
    hub.answer(WELCOME)
    await client.open(timeout_s=5.0)
    await hub.hears()
    yield client
    hub.answer(Closing())
    await client.close()


@asynccontextmanager
async def serving(hub: PlayedHub, client: Client, handler: Handler, *, concurrency: int = 4) -> AsyncIterator[None]:
    """Serve while the hub says yes to the beginning and to the end."""

    async def serve() -> None:
        async with client.serve({CountRequest: handler}, concurrency=concurrency):
            began.set()
            await end.wait()

    began, end = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(serve())
    await settle(hub, Serve(kinds=("counts",)))
    await began.wait()
    yield
    end.set()
    await settle(hub, Serve(kinds=()))
    await task


async def settle(hub: PlayedHub, expected: ToHub) -> None:
    async with asyncio.timeout(5):
        heard = await hub.hears()
    assert heard.message == expected
    hub.answer(Settled(), heard.request_id)


def deliver(number: int, word: str = "word", *, deadline_s: float = 60.0) -> Deliver:
    return Deliver(asker=ALPHA, id=number, deadline_s=deadline_s, body=encode_record(CountRequest(word=word)).body)


def count(number: int, count: int = 4) -> Reply:
    return Reply(asker=ALPHA, id=number, body=encode_record(Count(count=count)).body)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110  # what is waited for sets no event
            await asyncio.sleep(0)


async def test_a_request_that_comes_again_runs_once_and_is_answered_each_time() -> None:
    hub, handler = PlayedHub(), Handler()
    async with joined(hub) as client, serving(hub, client, handler):
        for _ in range(3):
            hub.answer(deliver(1))
        await until(lambda: handler.runs)
        handler.go.set()
        await settle(hub, count(1))
        hub.answer(deliver(1))
        await settle(hub, count(1))
        hub.answer(Deliver(asker=AgentName("gamma"), id=1, deadline_s=9.0, body=deliver(1).body))
        assert (await hub.hears()).message == Reply(asker=AgentName("gamma"), id=1, body=count(1).body)
        assert handler.runs == ["word", "word"]


async def test_a_revoked_request_is_cancelled_running_or_waiting() -> None:
    hub, handler = PlayedHub(), Handler()
    async with joined(hub) as client, serving(hub, client, handler, concurrency=1):
        for number in (1, 2, 3):
            hub.answer(deliver(number, "x" * number))
        await until(lambda: handler.runs)
        for number in (9, 2, 1):
            hub.answer(Revoke(asker=ALPHA, id=number))
        await until(lambda: len(handler.runs) == 2)
        handler.go.set()
        await settle(hub, count(3, 3))
        assert handler.runs == ["x", "xxx"] and handler.ended == 2


async def test_a_request_ends_at_its_deadline_also_without_the_hubs_word() -> None:
    hub, handler = PlayedHub(), Handler()
    async with joined(hub) as client, serving(hub, client, handler):
        hub.answer(deliver(1, deadline_s=0.01))
        await until(lambda: handler.ended)
        handler.go.set()
        hub.answer(deliver(2))
        await settle(hub, count(2))  # and nothing was said of the first


async def test_what_cannot_be_read_fails_and_the_next_is_served(caplog: pytest.LogCaptureFixture) -> None:
    hub, handler = PlayedHub(), Handler()
    handler.go.set()
    with caplog.at_level(logging.CRITICAL):
        async with joined(hub) as client, serving(hub, client, handler):
            hub.answer(Deliver(asker=ALPHA, id=1, deadline_s=9.0, body=b"\x81\xa4type\xa8counts/2"))
            failed = (await hub.hears()).message
            assert isinstance(failed, Fail) and failed.reason == "malformed"
            hub.answer(deliver(2))
            await settle(hub, count(2))


async def test_a_hub_that_forgot_the_worker_hears_what_it_serves_and_its_unsettled_answers_again() -> None:
    hub, handler = PlayedHub(), Handler()
    handler.go.set()
    async with joined(hub) as client, serving(hub, client, handler):
        hub.answer(deliver(1))
        assert (await hub.hears()).message == count(1)
        hub.answer(Unknown())
        assert isinstance((await hub.hears()).message, Hello)
        hub.answer(WELCOME)
        assert (await hub.hears()).message == Serve(kinds=("counts",))
        await settle(hub, count(1))
        hub.answer(deliver(1))
        await settle(hub, count(1))
        assert handler.runs == ["word"], "also for the hub that did not know of it"


async def test_a_request_is_sent_again_with_what_is_left_of_its_time_and_its_id() -> None:
    hub = PlayedHub()
    async with joined(hub) as client:
        asking = asyncio.create_task(client.request(CountRequest(word="x"), to="alpha", timeout_s=9.0))
        first = await hub.hears()
        hub.answer(Unknown())
        await hub.hears()
        hub.answer(WELCOME)
        again = await hub.hears()
        assert isinstance(first.message, Request) and isinstance(again.message, Request)
        assert again.message.id == first.message.id and again.request_id == first.request_id
        assert again.message.deadline_s < first.message.deadline_s <= 9.0
        asking.cancel()
        assert (await hub.hears()).message == Cancel(request=first.request_id)


async def test_requests_beyond_the_bound_wait_here_and_not_for_ever() -> None:
    hub = PlayedHub()
    async with joined(hub) as client:
        asking = [asyncio.create_task(client.request(CountRequest(word="x"), to="alpha", timeout_s=9.0)) for _ in range(16)]
        first, *_ = [await hub.hears() for _ in range(16)]
        with pytest.raises(RefusedError, match=r"deadline.*16 earlier"):
            await client.request(CountRequest(word="x"), to="alpha", timeout_s=0.01)
        late = asyncio.create_task(client.request(CountRequest(word="y"), to="alpha", timeout_s=9.0))
        asking[0].cancel()
        assert (await hub.hears()).message == Cancel(request=first.request_id)
        assert isinstance((await hub.hears()).message, Request)
        for task in (*asking, late):
            task.cancel()


async def test_a_worker_that_does_not_serve_says_so() -> None:
    hub = PlayedHub()
    async with joined(hub):
        hub.answer(deliver(1))
        hub.answer(Revoke(asker=ALPHA, id=1))
        failed = (await hub.hears()).message
        assert isinstance(failed, Fail) and (failed.reason, failed.id) == ("not_serving", 1)


async def test_a_server_learns_that_its_hub_is_lost() -> None:
    hub, handler = PlayedHub(), Handler()
    async with joined(hub) as client:

        async def serve() -> None:
            async with client.serve({CountRequest: handler}) as serving:
                await serving.wait()

        task = asyncio.create_task(serve())
        await settle(hub, Serve(kinds=("counts",)))
        hub.answer(deliver(1))
        await until(lambda: handler.runs)
        hub.answer(Closing())
        with pytest.raises(HubLostError, match="has ended"):
            await task
        assert handler.ended == 1, "what ran is cancelled"


async def test_leaving_while_peers_still_ask_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    hub = PlayedHub()
    session = Session(hub, Hello(name=AgentName("beta"), run_id="r"), endpoint="played://hub", lost_after_s=60.0)
    client = Client(session, name=AgentName("beta"), request_timeout_s=5.0)
    hub.answer(WELCOME)
    await client.open(timeout_s=5.0)
    await hub.hears()
    closing = asyncio.create_task(client.close())
    bye = await hub.hears()
    assert bye.message == Bye()
    hub.answer(Goodbye(), bye.request_id)
    hub.answer(deliver(1))
    await closing
    assert caplog.records == []
    with pytest.raises(ClosedError):
        await client.request(CountRequest(word="x"), to="alpha", timeout_s=1.0)


async def test_a_request_behind_the_hubs_farewell_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    hub = PlayedHub()
    async with joined(hub):
        hub.answer(Closing())
        hub.answer(deliver(1))
        assert (await hub.hears()).message == Bye()
        await asyncio.sleep(0)
    assert caplog.records == []


async def test_a_worker_tells_what_it_has_read_before_its_credit_is_used_up() -> None:
    hub, handler = PlayedHub(), Handler()
    handler.go.set()
    async with joined(hub) as client, serving(hub, client, handler):
        for number in (1, 2):
            frames = encode_message(deliver(number), 0, [bytes(200_000)])
            hub._answers.put_nowait([memoryview(frame) for frame in frames])
        assert (await hub.hears_ping()).received_bytes == 400_000
        for number in (1, 2):
            await settle(hub, msgspec.structs.replace(count(number), received_bytes=400_000))


@pytest.mark.parametrize("concurrency", [0, -1])
async def test_serving_needs_handlers_and_slots(concurrency: int) -> None:
    async with joined(PlayedHub()) as client:
        with pytest.raises(ValueError, match="concurrency"):
            async with client.serve({CountRequest: Handler()}, concurrency=concurrency):
                pass
        with pytest.raises(ValueError, match="got 0"):
            async with client.serve({}):
                pass
