"""The hub's side of the bulk lane, asked by hand on a fake clock: who may send, what fits, what has to go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import blake3
import crc32c
import msgspec
import pytest

from exchange import blobs
from exchange.blob_messages import BulkToHub, BulkToWorker, Get, Held, Offer, Piece, Put, Taken
from exchange.blob_service import STALLED_S, BlobService
from exchange.blobs import MOVING_S, BlobStore
from exchange.messages import Refused
from exchange.testing import FakeClock
from exchange.types import BlobRef
from exchange.wire import Buffer, MessageDecoder, encode_message

ALPHA, BETA = b"\1alpha", b"\1beta"


class Bulk:
    """A service that is asked by hand, on a fake clock."""

    def __init__(self, directory: Path | None, blob_bytes: int = 1 << 20) -> None:
        self.clock = FakeClock()
        self.store = BlobStore(directory, blob_bytes=blob_bytes, clock=self.clock)
        self.members = {ALPHA, BETA}
        self.answers: asyncio.Queue[object] = asyncio.Queue()
        self.service = BlobService(self.store, present=self.members.__contains__, send=self._send, same_host=False)
        self._decoder: MessageDecoder[BulkToWorker] = MessageDecoder(BulkToWorker)

    def _send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        self.answers.put_nowait(self._decoder.decode([memoryview(frame) for frame in frames]).message)
        return True

    async def ask(self, peer: bytes, message: BulkToHub, *payload: Buffer) -> object:
        self.service.receive(peer, [memoryview(frame) for frame in encode_message(message, 1, payload)])
        return await self.answers.get()

    async def reason(self, peer: bytes, message: BulkToHub, *payload: Buffer) -> str:
        answer = await self.ask(peer, message, *payload)
        assert isinstance(answer, Refused), answer
        return answer.reason

    async def add(self, data: bytes) -> str:
        id = digest(data)
        await self.ask(ALPHA, Offer(id=id, nbytes=len(data)))
        assert await self.ask(ALPHA, put(id, 0, data), data) == Held()
        return id


def digest(data: bytes) -> str:
    return blake3.blake3(data).hexdigest()


def put(id: str, offset: int, data: bytes) -> Put:
    return Put(id=id, offset=offset, crc=crc32c.crc32c(data))


def found(directory: Path) -> list[Path]:
    return [*directory.iterdir()]


@pytest.fixture
async def bulk() -> AsyncIterator[Bulk]:
    made = Bulk(None, blob_bytes=100_000)
    yield made
    await made.service.close()


async def test_one_worker_sends_while_others_wait_until_it_stalls_or_leaves(bulk: Bulk) -> None:
    data = b"x" * 20
    offer = Offer(id=digest(data), nbytes=20)
    assert await bulk.ask(ALPHA, offer) == Taken(end=0)
    assert await bulk.ask(ALPHA, put(offer.id, 0, data[:10]), data[:10]) == Taken(end=10)
    assert await bulk.reason(BETA, offer) == "coming"
    bulk.members.discard(ALPHA)
    assert await bulk.ask(BETA, offer) == Taken(end=10)
    bulk.members.add(ALPHA)
    bulk.clock.now += STALLED_S
    assert await bulk.ask(BETA, offer) == Taken(end=10)
    assert await bulk.ask(ALPHA, put(offer.id, 10, data[10:]), data[10:]) == Held()
    assert await bulk.ask(BETA, put(offer.id, 10, data[10:]), data[10:]) == Held()


async def test_pieces_that_do_not_fit_change_nothing(bulk: Bulk) -> None:
    data = b"0123456789"
    id = digest(data)
    assert await bulk.reason(ALPHA, put(id, 0, data), data) == "not_offered"
    await bulk.ask(ALPHA, Offer(id=id, nbytes=10))
    assert await bulk.ask(ALPHA, put(id, 5, data[5:]), data[5:]) == Taken(end=0)
    assert await bulk.ask(ALPHA, Put(id=id, offset=0, crc=1), data) == Taken(end=0)
    for offset, payload in ((0, [data + b"x"]), (0, []), (0, [b""]), (0, [data, data]), (11, [b"x"]), (-1, [data])):
        assert await bulk.reason(ALPHA, Put(id=id, offset=offset, crc=0), *payload) == "invalid"
    assert await bulk.ask(ALPHA, put(id, 0, data), data) == Held()
    assert await bulk.reason(ALPHA, Get(id=id, offset=11, nbytes=1)) == "invalid"
    assert await bulk.reason(ALPHA, Offer(id=id, nbytes=11)) == "digest"


async def test_what_is_on_the_move_is_not_let_go_for_room(bulk: Bulk) -> None:
    first, second = await bulk.add(b"a" * 45_000), await bulk.add(b"b" * 45_000)
    for id in (first, second):
        await bulk.ask(BETA, Get(id=id, offset=0, nbytes=1))
    offer = Offer(id=digest(b"c" * 45_000), nbytes=45_000)
    assert await bulk.reason(ALPHA, offer) == "full"
    await bulk.ask(BETA, Get(id=second, offset=44_000, nbytes=1000))
    assert await bulk.ask(ALPHA, offer) == Taken(end=0)
    assert await bulk.reason(BETA, Get(id=second, offset=0, nbytes=1)) == "not_there"
    bulk.clock.now += MOVING_S
    assert await bulk.ask(ALPHA, Offer(id=digest(b"d" * 90_000), nbytes=90_000)) == Taken(end=0)
    assert bulk.service.stats().evicted == 3


async def test_empty_blobs_are_bounded_too(bulk: Bulk) -> None:
    for count in range(40):
        await bulk.add(b"%d" % count)
    assert bulk.service.stats().blobs == 100_000 // 4096


async def test_a_store_holds_so_many_files_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "MAX_BLOBS", 6)
    bulk = Bulk(tmp_path, blob_bytes=1 << 30)
    for count in range(9):
        await bulk.add(b"%d" % count)
    assert bulk.service.stats().blobs == 6
    await bulk.service.close()
    (tmp_path / "notes.txt").write_text("not ours")
    again = Bulk(tmp_path, blob_bytes=4 * 4096)
    assert again.service.stats().blobs == 4 and (tmp_path / "notes.txt").exists()
    assert sum(path.name != "notes.txt" for path in found(tmp_path)) == 4
    assert isinstance(await again.ask(ALPHA, Get(id=digest(b"8"), offset=0, nbytes=1)), Piece), "the newest are kept"
    await again.service.close()


@pytest.mark.parametrize("id", ["", "../" * 21 + "x", "A" * 64, "0" * 63 + "/", "0" * 65])
def test_an_id_that_is_no_digest_is_refused_before_it_becomes_a_name(id: str) -> None:
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        BlobRef(id=id, nbytes=1)
    raw = msgspec.msgpack.encode({"type": "get", "id": id, "offset": 0, "nbytes": 1})
    with pytest.raises(msgspec.ValidationError, match="64 lower-case hex digits"):
        msgspec.msgpack.Decoder(BulkToHub).decode(raw)


def test_a_reference_is_stored_as_it_was_first_written() -> None:
    ref = BlobRef(id="af1349b9" * 8, nbytes=134_217_728)
    golden = b"\x82\xa2id\xd9\x40" + b"af1349b9" * 8 + b"\xa6nbytes\xce\x08\x00\x00\x00"
    assert msgspec.msgpack.encode(ref) == golden
    assert msgspec.msgpack.decode(golden, type=BlobRef) == ref
