"""The hub's side of the bulk lane: answers offers and pieces, checks what is whole, lets readers wait for what will come.

Lives on one event loop, which in a served hub is that of a thread of its own (exchange/blob_server.py): reading and writing
pieces may take as long as the disk does. What takes longer, checking and syncing a whole blob, is done by another thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import crc32c

from exchange.bad_messages import BadMessages
from exchange.blob_messages import PIECE_BYTES, BulkToHub, BulkToWorker, Doubt, Get, Held, Offer, Piece, Put, Taken
from exchange.blobs import Blob, BlobStore
from exchange.errors import RefusedError, StorageError, WireError
from exchange.messages import refused
from exchange.stats import BlobStats
from exchange.wire import Buffer, MessageDecoder, encode_message

__all__ = ["BlobService"]

_log = logging.getLogger(__name__)

# Another worker may go on with an upload whose sender has said nothing for so long.
STALLED_S = 5.0
# Waiting readers of one hub; more than its members have transfers.
MAX_WAITING = 1024


@dataclass(frozen=True, slots=True)
class _Waiter:
    peer: bytes
    request_id: int
    message: Get | Put | Doubt
    timer: asyncio.TimerHandle | None


class BlobService:
    """Blobs for the members of a run. present: whether a routing id is a member's, from any thread. send: hands frames to
    a peer's transport without waiting. same_host: workers may read files by themselves, if their user may."""

    def __init__(
        self,
        store: BlobStore,
        *,
        present: Callable[[bytes], bool],
        send: Callable[[bytes, Sequence[Buffer]], bool],
        same_host: bool,
    ) -> None:
        self._store = store
        self._present = present
        self._send = send
        self._same_host = same_host
        self._decoder: MessageDecoder[BulkToHub] = MessageDecoder(BulkToHub)
        self._bad = BadMessages("message on the bulk lane")
        self._bad_blobs = BadMessages("blob")
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="exchange blob checker")
        self._checks: set[asyncio.Task[None]] = set()
        self._waiting: defaultdict[str, list[_Waiter]] = defaultdict(list)
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    def receive(self, peer: bytes, frames: Sequence[memoryview]) -> None:
        """Handle one message of `peer`, readable or not."""
        try:
            incoming = self._decoder.decode(frames)
        except WireError as error:
            self._bad.add(peer, error)
            return
        self._handle(peer, incoming.message, incoming.payload, incoming.request_id)

    def stats(self) -> BlobStats:
        """Safe to call from any thread."""
        whole = self._store.whole()
        counts, stored_bytes = self._counts, sum(blob.nbytes for blob in whole)
        return BlobStats(
            blobs=len(whole),
            stored_bytes=stored_bytes,
            evicted=self._store.evicted,
            bad_frames=self._bad.count,
            refused=dict(self._refused),
            **counts,
        )

    async def close(self) -> None:
        """End all checks; what was not checked to its end stays a part."""
        for waiter in (waiter for waiters in self._waiting.values() for waiter in waiters):
            if waiter.timer is not None:
                waiter.timer.cancel()
        self._waiting.clear()
        for check in self._checks:
            check.cancel()
        if self._checks:
            await asyncio.wait(self._checks)
        self._checker.shutdown()
        self._store.close()

    def _handle(self, peer: bytes, message: BulkToHub, payload: Sequence[memoryview], request_id: int) -> None:
        try:
            if not self._present(peer):
                raise RefusedError("stranger", "only members of the run may move blobs: say Hello first")
            match message:
                case Offer():
                    self._offer(peer, message, request_id)
                case Put():
                    self._put(peer, message, payload, request_id)
                case Get():
                    self._get(peer, message, request_id)
                case Doubt():
                    self._doubt(peer, message, request_id)
        except RefusedError as error:
            self._refuse(peer, request_id, error.reason, error.detail)
        except StorageError as error:
            _log.error("a blob could not be moved: %s", error)
            self._refuse(peer, request_id, "storage", str(error))

    def _offer(self, peer: bytes, offer: Offer, request_id: int) -> None:
        blob = self._store.find(offer.id)
        if blob is not None and blob.whole:
            if blob.nbytes != offer.nbytes:
                raise RefusedError("digest", f"the blob of this name has {blob.nbytes} bytes, got nbytes={offer.nbytes}")
            return self._answer(peer, request_id, Held())
        if blob is not None and (blob.checking or any(map(self._present, self._others(blob, peer)))):
            raise RefusedError("coming", "somebody else is sending this blob: ask for it with wait_s")
        blob = self._store.begin(offer.id, offer.nbytes)
        if blob.end == blob.nbytes:
            self._check(blob)
            return self._wait(peer, request_id, Put(id=blob.id, offset=blob.end, crc=0))
        return self._answer(peer, request_id, Taken(end=blob.end))

    def _put(self, peer: bytes, put: Put, payload: Sequence[memoryview], request_id: int) -> None:
        blob = self._store.find(put.id)
        if blob is not None and blob.whole:
            return self._answer(peer, request_id, Held())
        if blob is not None and blob.checking:
            return self._wait(peer, request_id, put)
        # Of a part that an earlier hub has left only an offer tells how long it is to become.
        if blob is None or blob.end == blob.nbytes:
            raise RefusedError("not_offered", "this blob is not being sent here: offer it first")
        fits = len(payload) == 1 and 0 < payload[0].nbytes <= min(PIECE_BYTES, blob.nbytes - put.offset)
        if not fits or put.offset < 0:
            raise RefusedError("invalid", f"a piece has one frame of 1 to {PIECE_BYTES} bytes within its blob")
        if put.offset == blob.end and crc32c.crc32c(payload[0]) == put.crc:
            try:
                self._store.put(blob, peer, payload[0], put.crc)
            except StorageError:
                self._store.drop(blob)
                raise
            self._counts["uploaded_bytes"] += payload[0].nbytes
            if blob.end == blob.nbytes:
                self._check(blob)
                return self._wait(peer, request_id, put)
        return self._answer(peer, request_id, Taken(end=blob.end))

    def _get(self, peer: bytes, get: Get, request_id: int) -> None:
        blob = self._store.find(get.id)
        if blob is None or not blob.whole:
            if not get.wait_s:
                raise RefusedError("not_there", f"this hub has no such blob, got id={get.id[:12]}…: send it, or wait_s for it")
            if sum(map(len, self._waiting.values())) >= MAX_WAITING:
                raise RefusedError("busy", f"{MAX_WAITING} readers wait for blobs already")
            return self._wait(peer, request_id, get)
        if get.offset > blob.nbytes:
            raise RefusedError("invalid", f"the blob has {blob.nbytes} bytes, got offset={get.offset}")
        data, crc = self._store.get(blob, peer, get.offset, get.nbytes)
        self._counts["downloads"] += 0 < blob.nbytes <= get.offset + get.nbytes
        # Who has read the file by itself tells its end with a Get of nothing.
        by_itself = get.offset == blob.nbytes and not get.nbytes
        self._counts["downloaded_bytes"] += blob.nbytes if by_itself else len(data)
        # By its descriptor, so that a file without a name can be opened too, and a name that is gone does no harm.
        file = f"/proc/{os.getpid()}/fd/{blob.fd}" if self._same_host and not get.offset else None
        return self._answer(peer, request_id, Piece(nbytes=blob.nbytes, crc=crc, file=file), data)

    def _doubt(self, peer: bytes, doubt: Doubt, request_id: int) -> None:
        blob = self._store.find(doubt.id)
        if blob is None or not blob.whole:
            raise RefusedError("not_there", "the blob is gone already")
        if not blob.checking:
            self._check(blob)
        return self._wait(peer, request_id, doubt)

    def _others(self, blob: Blob, peer: bytes) -> list[bytes]:
        return [mover for mover in self._store.movers(blob, STALLED_S) if mover != peer]

    def _wait(self, peer: bytes, request_id: int, message: Get | Put | Doubt) -> None:
        """Answer when the blob is there; a Get at its deadline at the latest."""
        timer = None
        if isinstance(message, Get):
            timer = asyncio.get_running_loop().call_later(message.wait_s, self._too_late, message.id, peer, request_id)
        self._waiting[message.id].append(_Waiter(peer, request_id, message, timer))

    def _too_late(self, id: str, peer: bytes, request_id: int) -> None:
        self._waiting[id] = [each for each in self._waiting[id] if (each.peer, each.request_id) != (peer, request_id)]
        if not self._waiting[id]:
            del self._waiting[id]
        self._refuse(peer, request_id, "not_there", f"the blob did not come in time, got id={id[:12]}…")

    def _check(self, blob: Blob) -> None:
        blob.checking = True
        task = asyncio.create_task(self._make_whole(blob), name=f"exchange check of blob {blob.id[:12]}")
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _make_whole(self, blob: Blob) -> None:
        """Compare a blob with its name; then let readers have it, or drop it and tell who sent it."""
        try:
            found = await self._digest(blob)
            if found != blob.id:
                raise RefusedError("digest", f"the bytes are not those of the blob's name, got {found}, expected {blob.id}")
            if not blob.whole:
                await asyncio.get_running_loop().run_in_executor(self._checker, self._store.sync, blob)
        except (RefusedError, StorageError) as error:
            self._store.drop(blob)
            reason, detail = (error.reason, error.detail) if isinstance(error, RefusedError) else ("storage", str(error))
            sender = next((waiter.peer for waiter in self._waiting.get(blob.id, ()) if isinstance(waiter.message, Put)), b"")
            self._bad_blobs.add(sender, error)
            self._end_waiting(blob, reason, detail)
        else:
            self._counts["uploads"] += not blob.whole
            blob.whole = True
            blob.moving.clear()
            self._end_waiting(blob, None, "")
        finally:
            blob.checking = False

    async def _digest(self, blob: Blob) -> str:
        steps: Iterator[str] = self._store.digest(blob)
        while not (found := await asyncio.get_running_loop().run_in_executor(self._checker, next, steps)):
            for waiter in self._waiting.get(blob.id, ()):
                self._answer(waiter.peer, 0, Taken(end=blob.end))
        return found

    def _end_waiting(self, blob: Blob, reason: str | None, detail: str) -> None:
        """Answer who waits for a blob that is whole now, or its senders when it will not be."""
        for waiter in self._waiting.pop(blob.id, ()):
            if not isinstance(waiter.message, Get):
                if reason is None:
                    self._answer(waiter.peer, waiter.request_id, Held())
                else:
                    self._refuse(waiter.peer, waiter.request_id, reason, detail)
            elif reason is None:
                assert waiter.timer is not None
                waiter.timer.cancel()
                self._handle(waiter.peer, waiter.message, (), waiter.request_id)
            else:
                self._waiting[blob.id].append(waiter)

    def _refuse(self, peer: bytes, request_id: int, reason: str, detail: str) -> None:
        self._refused[reason] += 1
        self._answer(peer, request_id, refused(reason, detail))

    def _answer(self, peer: bytes, request_id: int, message: BulkToWorker, *payload: Buffer) -> None:
        # A peer that cannot be reached asks again when it is back.
        self._send(peer, encode_message(message, request_id, payload))
