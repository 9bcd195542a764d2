"""Sends and fetches blobs: in pieces, a few on the way at a time, named and verified by the digest of their bytes."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import blake3
import crc32c
import numpy as np
import numpy.typing as npt

from exchange.blob_ends import BlobData, FileSource, FileTarget, MemoryTarget, Source, Target, source_of
from exchange.blob_messages import BULK_CREDIT, PIECE_BYTES, BulkToWorker, Doubt, Get, Held, Offer, Piece, Put, Taken
from exchange.bulk_session import BulkAnswer, BulkSession, OpenBulk
from exchange.errors import BlobError, RefusedError, StorageError
from exchange.messages import AskStats, Refused
from exchange.session import Session
from exchange.types import BlobRef
from exchange.wire import Buffer

__all__ = ["BlobClient"]

_log = logging.getLogger(__name__)

# Pieces of one transfer that have no answer yet, and transfers of a worker at once; more take turns.
WINDOW = 4
TRANSFERS = BULK_CREDIT // WINDOW
# How long to wait for somebody else who sends the same blob, before offering it again.
COMING_S = 5.0
# Attempts without anything new before a transfer has failed.
FRUITLESS = 4
# What a thread reads or hashes before it is asked to go on.
AT_ONCE_BYTES = 8 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    data: memoryview
    file: str | None


class BlobClient:
    """The blobs of one worker. Any number of tasks may call it at the same time."""

    def __init__(self, session: Session, open_link: OpenBulk, *, lost_after_s: float) -> None:
        self._session = session
        self._bulk = BulkSession(session, open_link, lost_after_s=lost_after_s)
        self._transfers = asyncio.Semaphore(TRANSFERS)
        # One piece is copied while the one before it is hashed.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="exchange blobs")

    async def send(self, data: BlobData) -> BlobRef:
        """As Client.send_blob."""
        source = source_of(data)
        try:
            async with self._transfers:
                ref = await self._name(source)
                await self._offer(ref, source)
                return ref
        finally:
            source.close()

    async def fetch(self, ref: BlobRef, path: Path | None, *, wait_s: float) -> npt.NDArray[np.uint8] | None:
        """As Client.fetch_blob."""
        # Before any room is made, as a reference may come from anybody, and before its turn, as what it waits for may be
        # sent by this worker.
        head = Get(id=ref.id, offset=0, nbytes=0, wait_s=wait_s)
        found = await self._piece(ref, head, self._bulk.ask(head))
        async with self._transfers:
            target = MemoryTarget(ref.nbytes) if path is None else FileTarget(path)
            try:
                await self._fill(ref, target, found.file)
                await self._in_thread(target.finish)
            finally:
                target.close()
            return target.data if isinstance(target, MemoryTarget) else None

    async def close(self) -> None:
        """Drop the lane; transfers under way fail."""
        await self._bulk.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _name(self, source: Source) -> BlobRef:
        digest = blake3.blake3()
        for offset in range(0, source.nbytes, AT_ONCE_BYTES):
            await self._in_thread(lambda offset=offset: digest.update(source.read(offset, AT_ONCE_BYTES)))
        return BlobRef(id=digest.hexdigest(), nbytes=source.nbytes)

    async def _offer(self, ref: BlobRef, source: Source) -> None:
        """Offer a blob until the hub has it, and send what it has not."""
        furthest = fruitless = 0
        while fruitless < FRUITLESS:
            answer, start = (await self._bulk.answer(self._bulk.ask(Offer(id=ref.id, nbytes=ref.nbytes)))).message, 0
            if isinstance(answer, Taken):
                start = answer.end
                answer = await self._push(ref, source, start)
            match answer:
                case Held():
                    return
                case Refused(reason="coming"):
                    get = Get(id=ref.id, offset=0, nbytes=0, wait_s=COMING_S)
                    if isinstance((await self._bulk.answer(self._bulk.ask(get), patience_s=COMING_S)).message, Piece):
                        return
                    continue
                case Refused(reason="digest") if not start:
                    raise BlobError(answer.detail)
                case Refused(reason="stranger"):
                    await self._welcomed()
                case Refused() if answer.reason not in ("digest", "not_offered"):
                    raise RefusedError(answer.reason, answer.detail)
            # The hub was started anew, or has less than it was sent.
            reached = answer.end if isinstance(answer, Taken) else 0
            fruitless = 0 if reached > furthest else fruitless + 1
            furthest = max(reached, furthest)
        if isinstance(answer, Refused):
            raise RefusedError(answer.reason, answer.detail)
        raise BlobError(f"the hub does not get what is sent, got end={furthest} of {ref.nbytes} bytes: did the data change?")

    async def _push(self, ref: BlobRef, source: Source, start: int) -> BulkToWorker:
        """Send pieces until the hub has all, or has not what it was sent; its last answer."""
        ahead: deque[tuple[int, asyncio.Future[BulkAnswer]]] = deque()
        offset = start
        try:
            while True:
                while len(ahead) < WINDOW and offset < ref.nbytes:
                    data, crc = await self._in_thread(_piece_of, source, offset)
                    put = Put(id=ref.id, offset=offset, crc=crc)
                    offset += PIECE_BYTES
                    ahead.append((min(offset, ref.nbytes), self._bulk.ask(put, data)))
                if not ahead:
                    return Taken(end=offset)
                end, future = ahead.popleft()
                answer = (await self._bulk.answer(future)).message
                if not isinstance(answer, Taken) or answer.end < end:
                    return answer
                # Another worker may be sending the same.
                offset = max(offset, answer.end)
        finally:
            for _, future in ahead:
                future.cancel()

    async def _fill(self, ref: BlobRef, target: Target, file: str | None) -> None:
        if file is not None and await self._digest(self._from_file(ref, target, Path(file))) == ref.id:
            end = Get(id=ref.id, offset=ref.nbytes, nbytes=0)
            await self._bulk.answer(self._bulk.ask(end))
            return
        try:
            digest = await self._digest(self._from_hub(ref, target))
            if digest != ref.id:
                raise BlobError(f"the bytes are not those of the blob's name, got {digest}, expected {ref.id}: send it again")
        except BlobError:
            await self._bulk.answer(self._bulk.ask(Doubt(id=ref.id)))
            raise

    async def _digest(self, written: AsyncGenerator[Buffer, None]) -> str:
        """The digest of what is written piece by piece; one piece is hashed while the next is fetched."""
        digest = blake3.blake3()
        hashing: asyncio.Future[object] | None = None
        async with aclosing(written):
            async for data in written:
                if hashing is not None:
                    await hashing
                hashing = asyncio.get_running_loop().run_in_executor(self._threads, digest.update, data)
        if hashing is not None:
            await hashing
        return digest.hexdigest()

    async def _from_file(self, ref: BlobRef, target: Target, path: Path) -> AsyncGenerator[Buffer, None]:
        """Fill a target from the hub's own file. What cannot be read, or is another file, ends early: the hub is then asked."""
        try:
            source = FileSource(path)
        except StorageError:
            return
        try:
            for offset in range(0, ref.nbytes if source.nbytes == ref.nbytes else 0, AT_ONCE_BYTES):
                # No more than the blob has: the file may be another that grows.
                yield await self._in_thread(target.fill, source, offset, min(AT_ONCE_BYTES, ref.nbytes - offset))
        except StorageError as error:
            _log.warning("a blob is fetched from the hub, as its file cannot be read: %s", error)
        finally:
            source.close()

    async def _from_hub(self, ref: BlobRef, target: Target) -> AsyncGenerator[Buffer, None]:
        """Fill a target with pieces, a few of them on the way at a time."""
        ahead: deque[tuple[Get, asyncio.Future[BulkAnswer]]] = deque()
        offset = 0
        try:
            while True:
                while len(ahead) < WINDOW and offset < ref.nbytes:
                    get = Get(id=ref.id, offset=offset, nbytes=min(ref.nbytes - offset, PIECE_BYTES))
                    offset += PIECE_BYTES
                    ahead.append((get, self._bulk.ask(get)))
                if not ahead:
                    return
                get, future = ahead.popleft()
                piece = await self._piece(ref, get, future)
                yield await self._in_thread(target.write, get.offset, piece.data)
        finally:
            for _, future in ahead:
                future.cancel()

    async def _piece(self, ref: BlobRef, get: Get, future: asyncio.Future[BulkAnswer]) -> _Piece:
        """What was asked for; asks again for what was damaged on its way."""
        crc = expected = 0
        for _ in range(FRUITLESS):
            answer = await self._bulk.answer(future, patience_s=get.wait_s)
            message = answer.message
            if isinstance(message, Refused):
                if message.reason != "stranger":
                    raise RefusedError(message.reason, message.detail)
                await self._welcomed()
            elif not isinstance(message, Piece) or message.nbytes != ref.nbytes:
                raise BlobError(f"the hub's blob is another one, got {message}, expected nbytes={ref.nbytes}")
            elif len(answer.payload) == 1 and answer.payload[0].nbytes == get.nbytes:
                data = answer.payload[0]
                crc, expected = await self._in_thread(crc32c.crc32c, data), message.crc
                if crc == expected:
                    return _Piece(data=data, file=message.file)
            future = self._bulk.ask(get)
        if isinstance(message, Refused):
            raise RefusedError(message.reason, message.detail)
        raise BlobError(f"a piece at offset={get.offset} does not arrive as it was sent, got crc={crc}, expected {expected}")

    async def _welcomed(self) -> None:
        """Wait until the hub, which may have been started anew, knows this worker: it then answers on the control lane."""
        await self._session.request(AskStats())

    async def _in_thread(self, call: Callable[..., T], *arguments: object) -> T:
        """Run in a thread; cancelled, it still waits for the end of the call, as that uses what the caller then closes."""
        self._session.check()
        job = asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)
        try:
            return await asyncio.shield(job)
        finally:
            if not job.done():
                await asyncio.wait((job,))


def _piece_of(source: Source, offset: int) -> tuple[Buffer, int]:
    data = source.read(offset, PIECE_BYTES)
    return data, crc32c.crc32c(data)
