"""Blobs that take their time: on a slow line, and of more bytes than 32 bits count."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from test_blob_faults import hub_at, over_tcp, some_bytes

import exchange
from exchange import connection
from exchange.blob_messages import PIECE_BYTES
from exchange.endpoints import Lane, lane_endpoint


@asynccontextmanager
async def slow_way(port: int, bytes_per_s: int) -> AsyncIterator[int]:
    """A port that leads to another, and lets only so much through in either direction."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while chunk := await reader.read(bytes_per_s // 50):
                writer.write(chunk)
                await writer.drain()
                await asyncio.sleep(len(chunk) / bytes_per_s)
        writer.close()

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, back), pump(there, writer))

    async with await asyncio.start_server(lead, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.soak
async def test_a_worker_on_a_slow_line_gets_there_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    data, other, ports = some_bytes(2 * PIECE_BYTES, 1), some_bytes(2 * PIECE_BYTES, 2), []

    def straight(endpoint: str, lane: Lane, port: int) -> str:
        if lane == "bulk":
            ports.append(port)
        return lane_endpoint(endpoint, lane, port)

    def detour(endpoint: str, lane: Lane, port: int) -> str:
        return lane_endpoint(endpoint, lane, slow if lane == "bulk" else port)

    monkeypatch.setattr(connection, "lane_endpoint", straight)
    async with over_tcp() as endpoint, exchange.connect(endpoint, name="alpha", run_id="r") as alpha:
        ref = await alpha.send_blob(data)
        async with slow_way(ports[0], 1_000_000) as slow, exchange.connect(endpoint, name="beta", run_id="r") as beta:
            monkeypatch.setattr(connection, "lane_endpoint", detour)
            fetching, sending = asyncio.create_task(beta.fetch_blob(ref)), asyncio.create_task(beta.send_blob(other))
            for seed in range(3, 8):
                await alpha.fetch_blob(await alpha.send_blob(some_bytes(PIECE_BYTES, seed)))
            assert not fetching.done() and not sending.done()
            np.testing.assert_array_equal(await fetching, data)
            np.testing.assert_array_equal(await alpha.fetch_blob(await sending), other)


@pytest.mark.soak
async def test_more_bytes_than_fit_into_32_bits(tmp_path: Path) -> None:
    source, target, directory = tmp_path / "source", tmp_path / "target", exchange.private_ipc_dir()
    with source.open("wb") as file:
        file.truncate((1 << 32) + 5)
        file.seek(1 << 32)
        file.write(b"end")
    async with (
        hub_at(f"ipc://{directory}/hub") as endpoint,
        exchange.connect(endpoint, name="alpha", run_id="r") as alpha,
    ):
        ref = await alpha.send_blob(source)
        await alpha.fetch_blob(ref, target)
    assert target.stat().st_size == ref.nbytes == (1 << 32) + 5
    with target.open("rb") as file:
        file.seek(1 << 32)
        assert file.read() == b"end\0\0"
    shutil.rmtree(directory)
