"""The commit loop of a hub's service: groups share a sync, the loop stays free, failures are answered, flush waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence

import pytest

from exchange.commits import Publication
from exchange.config import HubConfig
from exchange.consumers import ConsumerKey
from exchange.errors import StorageError
from exchange.hub import Hub
from exchange.lease_rows import LeaseRows
from exchange.messages import Accepted, Hello, Ping, Pong, Publish, Refused, ToHub, ToWorker
from exchange.replays import Chunk, Reading
from exchange.service import HubService
from exchange.stats import DiskStats
from exchange.testing import rewards_of
from exchange.types import AgentName, Cursor
from exchange.wire import Buffer, encode_message, encode_record, messages_in, worker_decoder


class SlowLog:
    """Keeps sequence numbers; waits for `gate` in every commit, and fails while it is told to."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.groups: list[list[int]] = []
        self.failure: Exception | None = None

    def commit(
        self, publications: Sequence[Publication], consumers: Mapping[ConsumerKey, Cursor], *, leases: LeaseRows
    ) -> None:
        self.entered.set()
        assert self.gate.wait(10)
        if self.failure is not None:
            raise self.failure
        self.groups.append([publication.seq for publication in publications])

    def upkeep(self, keep_from: Cursor | None, *, idle: bool) -> DiskStats:
        return DiskStats()

    def read(self, reading: Reading) -> Chunk:
        raise NotImplementedError


class Wired:
    """A durable hub with one worker, alpha, whose answers are kept."""

    def __init__(self, log: SlowLog) -> None:
        loop = asyncio.get_running_loop()
        self.answers: list[ToWorker] = []
        self.refused = asyncio.Event()
        self._decoder = worker_decoder()
        hub = Hub(HubConfig(run_id="r"), clock=loop.time, durable=True)
        self.service = HubService(hub, clock=loop.time, send=self._keep, log=log)
        self.say(Hello(name=AgentName("alpha"), run_id="r"))
        self.answers.clear()
        self._seq = 0

    def _keep(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        for message in messages_in([memoryview(frame) for frame in frames]):
            self.answers.append(self._decoder.decode(message).message)
            if isinstance(self.answers[-1], Refused):
                self.refused.set()
        return True

    def say(self, message: ToHub, payload: Sequence[Buffer] = ()) -> None:
        frames = encode_message(message, 1, payload)
        self.service.receive([(b"alpha", [memoryview(frame) for frame in frames])])

    def publish(self, *, durable: bool = True) -> None:
        self._seq += 1
        record = encode_record(rewards_of("alpha", self._seq, "p"))
        self.say(Publish(seq=self._seq, body=record.body, durable=durable), record.frames)


async def test_records_that_come_together_share_a_commit() -> None:
    log = SlowLog()
    wired = Wired(log)
    for _ in range(5):
        wired.publish()
    assert wired.answers == []
    await wired.service.flush()
    assert log.groups == [[1, 2, 3, 4, 5]]
    assert [answer.seq for answer in wired.answers if isinstance(answer, Accepted)] == [1, 2, 3, 4, 5]


async def test_the_hub_answers_others_while_the_disk_is_slow() -> None:
    log = SlowLog()
    wired = Wired(log)
    log.gate.clear()
    wired.publish()
    assert await asyncio.to_thread(log.entered.wait, 10)  # the group is on its way, and the disk stands still
    wired.publish()
    wired.say(Ping())
    assert [type(answer) for answer in wired.answers] == [Pong]
    log.gate.set()
    await wired.service.flush()
    assert log.groups == [[1], [2]]
    assert [answer.seq for answer in wired.answers if isinstance(answer, Accepted)] == [1, 2]


@pytest.mark.parametrize("failure", [StorageError("no space left on /x: make room"), RuntimeError("a bug")])
async def test_a_failing_disk_is_told_and_recovers(failure: Exception) -> None:
    log = SlowLog()
    wired = Wired(log)
    log.failure = failure
    wired.publish()
    wired.publish(durable=False)
    async with asyncio.timeout(10):
        await wired.refused.wait()
    refusals = [answer for answer in wired.answers if isinstance(answer, Refused)]
    assert [(refusal.reason, refusal.detail) for refusal in refusals] == [("storage", str(failure))]
    log.failure = None
    wired.publish()
    await wired.service.flush()
    assert log.groups == [[3]]


async def test_flush_of_nothing_returns() -> None:
    async with asyncio.timeout(5):
        await Wired(SlowLog()).service.flush()


async def test_what_comes_during_the_farewell_is_still_committed() -> None:
    log = SlowLog()
    wired = Wired(log)
    wired.publish()
    await wired.service.flush()
    wired.publish(durable=False)
    await wired.service.finish()
    assert log.groups == [[1], [2]]
