"""A session against a hub that is played by the test, message by message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from exchange.errors import ConnectError, HubLostError
from exchange.messages import Accepted, Bye, Closing, Goodbye, Hello, Ping, Publish, Refused, ToHub, ToWorker, Unknown, Welcome
from exchange.session import Session
from exchange.testing import rewards_of
from exchange.types import AgentName, Cursor, Version
from exchange.wire import Buffer, Incoming, encode_message, encode_record, hub_decoder, messages_in

WELCOME = Welcome(epoch=3, credit_messages=4, credit_bytes=1 << 20, max_record_bytes=1 << 20, heartbeat_s=60.0)


class PlayedHub:
    """Both ends of a link: what the worker sent, and what it will receive."""

    def __init__(self) -> None:
        self._sent: asyncio.Queue[Incoming[ToHub]] = asyncio.Queue()
        self._answers: asyncio.Queue[list[memoryview]] = asyncio.Queue()

    async def send(self, frames: Sequence[Buffer]) -> None:
        for message in messages_in([memoryview(frame) for frame in frames]):
            self._sent.put_nowait(hub_decoder().decode(message))

    def send_now(self, frames: Sequence[Buffer]) -> bool:
        return False

    async def receive(self) -> list[memoryview]:
        return await self._answers.get()

    def close(self) -> None:
        self.answer(Closing())

    async def hears(self) -> Incoming[ToHub]:
        """The next message that is no ping."""
        while isinstance((incoming := await self._sent.get()).message, Ping):
            pass
        return incoming

    async def hears_ping(self) -> Ping:
        while not isinstance(message := (await self._sent.get()).message, Ping):
            pass
        return message

    def answer(self, message: ToWorker, request_id: int = 0) -> None:
        self._answers.put_nowait([memoryview(frame) for frame in encode_message(message, request_id)])


@pytest.fixture
def hub() -> PlayedHub:
    return PlayedHub()


@pytest.fixture
async def session(hub: PlayedHub) -> AsyncIterator[Session]:
    session = Session(hub, Hello(name=AgentName("alpha"), run_id="r"), endpoint="played://hub", lost_after_s=60.0)
    hub.answer(WELCOME)
    await session.open(timeout_s=5.0)
    assert (await hub.hears()).message == Hello(name=AgentName("alpha"), run_id="r")
    yield session
    hub.answer(Closing())
    await session.close()


async def test_a_hub_that_forgot_the_worker_gets_everything_unanswered_again(hub: PlayedHub, session: Session) -> None:
    record = encode_record(rewards_of("alpha", 1, "p"))
    first, second, third = (session.publish(record, durable=False, on_end=lambda: None) for _ in range(3))
    heard = [await hub.hears() for _ in range(3)]
    hub.answer(Accepted(seq=1, cursor=Cursor(1)), heard[0].request_id)
    await first
    hub.answer(Unknown())
    hub.answer(Unknown())
    assert (await hub.hears()).message == Hello(name=AgentName("alpha"), run_id="r", epoch=3, first_seq=2)
    late = session.publish(record, durable=False, on_end=lambda: None)
    hub.answer(WELCOME)
    again = [await hub.hears() for _ in range(3)]
    assert [item.message.seq for item in again if isinstance(item.message, Publish)] == [2, 3, 4]
    assert [item.request_id for item in again[:2]] == [item.request_id for item in heard[1:]]
    for item, answer in zip(again, (second, third, late), strict=True):
        hub.answer(Accepted(seq=1, cursor=Cursor(1)), item.request_id)
        await answer


async def test_answers_may_come_twice_and_to_nobody(hub: PlayedHub, session: Session) -> None:
    answer = session.publish(encode_record(rewards_of("alpha", 1, "p")), durable=False, on_end=lambda: None)
    request_id = (await hub.hears()).request_id
    for _ in range(2):
        hub.answer(Accepted(seq=1, cursor=Cursor(1)), request_id)
    hub.answer(Accepted(seq=9, cursor=Cursor(9)), 12345)
    assert (await answer).message == Accepted(seq=1, cursor=Cursor(1))


async def test_progress_is_sent_at_once(hub: PlayedHub, session: Session) -> None:
    await hub.hears_ping()
    session.tell_progress(4, Version(3, 5))
    assert await hub.hears_ping() == Ping(step=4, version=Version(3, 5))


async def test_a_hub_that_no_longer_wants_the_worker_ends_its_requests(hub: PlayedHub, session: Session) -> None:
    answer = session.publish(encode_record(rewards_of("alpha", 1, "p")), durable=False, on_end=lambda: None)
    hub.answer(Unknown())
    hub.answer(Refused(reason="duplicate_name", detail="another one is here"))
    with pytest.raises(HubLostError, match="another one is here"):
        await answer
    with pytest.raises(HubLostError, match="duplicate_name"):
        session.publish(encode_record(rewards_of("alpha", 1, "p")), durable=False, on_end=lambda: None)


async def test_leaving_waits_for_the_goodbye(hub: PlayedHub, session: Session) -> None:
    closing = asyncio.create_task(session.close())
    heard = await hub.hears()
    assert heard.message == Bye()
    await asyncio.sleep(0)
    assert not closing.done()
    hub.answer(Goodbye(), heard.request_id)
    await closing


async def test_a_silent_hub_is_lost(hub: PlayedHub) -> None:
    session = Session(hub, Hello(name=AgentName("alpha"), run_id="r"), endpoint="played://hub", lost_after_s=0.05)
    hub.answer(Welcome(epoch=0, credit_messages=1, credit_bytes=1, max_record_bytes=1, heartbeat_s=0.01))
    await session.open(timeout_s=5.0)
    with pytest.raises(HubLostError, match=r"no sign of life.*played://hub"):
        await session.publish(encode_record(rewards_of("alpha", 1, "p")), durable=False, on_end=lambda: None)
    await session.close()


async def test_a_refused_hello_says_why(hub: PlayedHub) -> None:
    session = Session(hub, Hello(name=AgentName("alpha"), run_id="r"), endpoint="played://hub", lost_after_s=60.0)
    hub.answer(Refused(reason="run_id", detail="this hub serves run 'r2'"))
    with pytest.raises(ConnectError, match="serves run 'r2'"):
        await session.open(timeout_s=5.0)
    await session.close()


async def test_progress_that_cannot_be_told_is_its_callers_error_and_no_heartbeats(hub: PlayedHub, session: Session) -> None:
    session.tell_progress(1, Version(0, 1))
    with pytest.raises(TypeError):
        session.tell_progress(np.int64(2), Version(0, 2))  # type: ignore[arg-type]
    hub.answer(Unknown())
    hub.answer(WELCOME)
    assert (await hub.hears()).message == Hello(name=AgentName("alpha"), run_id="r", epoch=3)
    assert await hub.hears_ping() == Ping(step=1, version=Version(0, 1))
