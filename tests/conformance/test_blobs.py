"""Blobs, over every transport."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt
import pytest

from exchange import blob_client
from exchange.blob_messages import PIECE_BYTES
from exchange.errors import RefusedError
from exchange.types import BlobRef

ABSENT = BlobRef(id="0" * 64, nbytes=1)
PIECE = 64 << 10


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker chooses how large its pieces are; small ones are many, and quick."""
    monkeypatch.setattr(blob_client, "PIECE_BYTES", PIECE)


def some_bytes(nbytes: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """No two pieces of it are equal, as a prime is no part of their size."""
    return np.resize(np.random.default_rng(seed).integers(0, 256, 65_521, dtype=np.uint8), nbytes)


@pytest.mark.parametrize("nbytes", [0, 1, PIECE, PIECE + 1, 9 * PIECE - 1])
async def test_what_is_fetched_is_what_was_sent(serving: Any, nbytes: int) -> None:
    data = some_bytes(nbytes)
    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta:
        ref = await alpha.send_blob(data)
        got = await beta.fetch_blob(ref)
        stats = (await beta.stats()).blobs
    assert ref.nbytes == nbytes
    np.testing.assert_array_equal(got, data)
    assert not got.flags.writeable and (not nbytes or got.ctypes.data % 4096 == 0)
    assert (stats.blobs, stats.stored_bytes, stats.uploads, stats.uploaded_bytes) == (1, nbytes, 1, nbytes)
    assert (stats.downloads, stats.downloaded_bytes, stats.refused) == (bool(nbytes), nbytes, {})


async def test_pieces_have_their_full_size(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_client, "PIECE_BYTES", PIECE_BYTES)
    data = some_bytes(PIECE_BYTES + 1)
    async with serving() as connect, connect("alpha") as alpha:
        np.testing.assert_array_equal(await alpha.fetch_blob(await alpha.send_blob(data)), data)


async def test_files_go_to_files(serving: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "weights", tmp_path / "there" / "copy"
    source.write_bytes(some_bytes(PIECE + 5).tobytes())
    target.parent.mkdir()
    async with serving() as connect, connect("alpha") as alpha:
        await alpha.fetch_blob(await alpha.send_blob(source), target)
        assert target.read_bytes() == source.read_bytes()
        with pytest.raises(RefusedError, match="not_there"):
            await alpha.fetch_blob(ABSENT, tmp_path / "there" / "nothing")
    assert [path.name for path in target.parent.iterdir()] == ["copy"]


async def test_the_same_again_costs_one_question(serving: Any) -> None:
    data = some_bytes(3 * PIECE)
    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta:
        assert await alpha.send_blob(data) == await beta.send_blob(data.tobytes())
        assert (await alpha.stats()).blobs.uploaded_bytes == data.nbytes


async def test_two_workers_send_the_same_at_once(serving: Any) -> None:
    data = some_bytes(3 * PIECE)
    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta:
        refs = await asyncio.gather(alpha.send_blob(data), beta.send_blob(data))
        stats = (await alpha.stats()).blobs
        np.testing.assert_array_equal(await beta.fetch_blob(refs[0]), data)
    assert refs[0] == refs[1]
    assert stats.uploads == 1 and stats.uploaded_bytes == data.nbytes


async def test_a_reader_may_wait_for_what_will_be_sent(serving: Any) -> None:
    data = some_bytes(PIECE + 1)
    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta:
        ref = BlobRef(id=blake3.blake3(data.tobytes()).hexdigest(), nbytes=data.nbytes)
        with pytest.raises(RefusedError, match="not_there"):
            await beta.fetch_blob(ref)
        with pytest.raises(RefusedError, match="in time"):
            await beta.fetch_blob(ref, wait_s=0.01)
        waiting = asyncio.create_task(beta.fetch_blob(ref, wait_s=30.0))
        await beta.stats()
        await alpha.send_blob(data)
        np.testing.assert_array_equal(await waiting, data)


async def test_who_waits_for_blobs_can_still_send_them(serving: Any) -> None:
    blobs = [some_bytes(1000, seed) for seed in range(4)]
    refs = [BlobRef(id=blake3.blake3(data.tobytes()).hexdigest(), nbytes=data.nbytes) for data in blobs]
    async with serving() as connect, connect("alpha") as alpha:
        waiting = [asyncio.create_task(alpha.fetch_blob(ref, wait_s=30.0)) for ref in refs]
        await alpha.stats()
        for data in blobs:
            await alpha.send_blob(data)
        for data, got in zip(blobs, await asyncio.gather(*waiting), strict=True):
            np.testing.assert_array_equal(got, data)


async def test_many_transfers_of_one_worker_at_once(serving: Any) -> None:
    blobs = [some_bytes(PIECE // 4 + seed, seed) for seed in range(6)]
    async with serving() as connect, connect("alpha") as alpha:
        refs = await asyncio.gather(*map(alpha.send_blob, blobs))
        for data, got in zip(blobs, await asyncio.gather(*map(alpha.fetch_blob, refs)), strict=True):
            np.testing.assert_array_equal(got, data)


async def test_a_hub_has_its_limits_and_lets_the_oldest_go(serving: Any) -> None:
    async with serving(blob_bytes=100_000) as connect, connect("alpha") as alpha:
        with pytest.raises(RefusedError, match=r"too_large.*blob_bytes=100000.*100001 bytes"):
            await alpha.send_blob(bytes(100_001))
        first, second = await alpha.send_blob(some_bytes(40_000, 1)), await alpha.send_blob(some_bytes(40_000, 2))
        await alpha.fetch_blob(first)
        await alpha.send_blob(some_bytes(40_000, 3))
        await alpha.fetch_blob(first)
        with pytest.raises(RefusedError, match="not_there"):
            await alpha.fetch_blob(second)
        stats = (await alpha.stats()).blobs
    assert (stats.blobs, stats.stored_bytes, stats.evicted) == (2, 80_000, 1)


async def test_who_is_no_member_moves_nothing(serving: Any) -> None:
    async with serving() as connect, connect("alpha") as alpha, connect("watcher", observer=True) as watcher:
        ref = await alpha.send_blob(b"weights")
        with pytest.raises(RefusedError, match="stranger"):
            await watcher.fetch_blob(ref)
        with pytest.raises(RefusedError, match="stranger"):
            await watcher.send_blob(b"weights")
        assert (await alpha.stats()).blobs.refused["stranger"] > 0


async def test_memory_of_any_kind_can_be_sent(serving: Any) -> None:
    floats = np.arange(12, dtype=np.float32).reshape(3, 4)
    async with serving() as connect, connect("alpha") as alpha:
        for data in (floats, floats.tobytes(), bytearray(floats.tobytes()), floats.data, floats.data.cast("B")):
            assert (await alpha.fetch_blob(await alpha.send_blob(data))).tobytes() == floats.tobytes()
        with pytest.raises(ValueError, match="ascontiguousarray"):
            await alpha.send_blob(floats.T)
