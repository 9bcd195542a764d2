"""Feeds a hub with frames and the clock, and sends what it answers. The transport is a function that never waits."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from exchange.bad_messages import BadMessages
from exchange.commits import Publication
from exchange.consumers import ConsumerKey
from exchange.errors import ProtocolError, RecordTooLargeError, StorageError, WireError
from exchange.hub import Hub
from exchange.lease_rows import LeaseRows
from exchange.messages import DATA_TO_WORKER, refused
from exchange.replays import Chunk, Reading
from exchange.stats import DiskStats
from exchange.types import Cursor
from exchange.wire import Buffer, Outgoing, encode_message, hub_decoder, joined, messages_in

__all__ = ["HubService"]

_log = logging.getLogger(__name__)

SendNow = Callable[[bytes, Sequence[Buffer]], bool]

# After commits, retention and a checkpoint are seen to within this time.
UPKEEP_INTERVAL_S = 1.0


class Log(Protocol):
    """Where a hub's records are kept over its death."""

    def commit(
        self, publications: Sequence[Publication], consumers: Mapping[ConsumerKey, Cursor], *, leases: LeaseRows
    ) -> None:
        """Write a group and sync it; called in a thread, one group at a time. consumers: how far these
        are. leases: what has changed of these.

        Raises StorageError, and then nothing of the group is kept.
        """
        ...

    def upkeep(self, keep_from: Cursor | None, *, idle: bool) -> DiskStats:
        """Let go what is over the limits, and tidy up when idle; called in the same thread. Raises StorageError."""
        ...

    def read(self, reading: Reading) -> Chunk:
        """Read records; called in another thread, one reading at a time. Raises StorageError."""
        ...


class HubService:
    """A hub that lives on the running event loop. send: hands frames to a peer's transport, False when it cannot.

    send_data: the same for the data lane, where there is one.
    log: takes what a durable hub admits, in a thread of its own; None for a hub in memory.
    """

    def __init__(
        self,
        hub: Hub,
        *,
        clock: Callable[[], float],
        send: SendNow,
        send_data: SendNow | None = None,
        log: Log | None = None,
    ) -> None:
        self.hub = hub
        self._log = log
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="exchange disk") if log is not None else None
        self._replay = ThreadPoolExecutor(1, thread_name_prefix="exchange replay") if log is not None else None
        self._reading: asyncio.Future[Chunk] | None = None
        self._next_commit: asyncio.Handle | None = None
        self._committing: asyncio.Future[None] | None = None
        self._upkeep_timer: asyncio.TimerHandle | None = None
        self._kept: asyncio.Task[None] | None = None
        self._clock = clock
        self._send = send
        self._send_data = send if send_data is None else send_data
        self._decoder = hub_decoder()
        self._bad = BadMessages("message to the hub")
        self._timer: asyncio.TimerHandle | None = None
        self._armed_to = 0.0
        self._closed = False

    def receive(self, multiparts: Iterable[tuple[bytes, Sequence[memoryview]]]) -> None:
        """Handle what peers have sent, readable or not, and then answer all of it together."""
        outgoing: list[Outgoing] = []
        for peer, multipart in multiparts:
            for frames in messages_in(multipart):
                outgoing += self._handle(peer, frames)
        self._deliver(outgoing + self.hub.answers())
        self._arm()
        self._arm_commit()
        self._read()

    def _handle(self, peer: bytes, frames: Sequence[memoryview]) -> list[Outgoing]:
        try:
            incoming = self._decoder.decode(frames)
        except WireError as error:
            self.hub.bad_frame(frames, error)
            self._bad.add(peer, error)
            return [Outgoing(peer=peer, message=refused("protocol", str(error)))] if isinstance(error, ProtocolError) else []
        return self.hub.handle(peer, incoming)

    def tick(self) -> None:
        """Answer what is due by the clock."""
        self._timer = None
        self._deliver(self.hub.tick())
        self._arm()
        self._arm_commit()
        self._read()

    def close(self) -> None:
        """Tell every worker that the hub ends."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._deliver(self.hub.close())

    async def flush(self) -> None:
        """Wait until everything admitted so far is on disk or was refused; for a hub in memory nothing."""
        while self.hub.commits is not None and (self._committing is not None or len(self.hub.commits)):
            self._commit()
            if self._committing is not None:
                await asyncio.wait((self._committing,))
                await asyncio.sleep(0)

    async def finish(self) -> None:
        """Take leave of the workers and the disk; nothing is received any more."""
        self.close()
        await self.flush()
        if self._upkeep_timer is not None:
            self._upkeep_timer.cancel()
        if self._kept is not None:
            await self._kept
        await self._upkeep()
        if self._reading is not None:
            await asyncio.wait((self._reading,))
        for threads in (self._disk, self._replay):
            if threads is not None:
                threads.shutdown()

    def _arm_commit(self) -> None:
        """Have what waits committed behind this turn, if the disk is free: what comes while it is not shares the next sync."""
        commits = self.hub.commits
        if commits is None or not len(commits) or self._committing is not None:
            return
        if self._next_commit is None:
            self._next_commit = asyncio.get_running_loop().call_soon(self._commit)

    def _commit(self) -> None:
        if self._next_commit is not None:
            self._next_commit.cancel()
            self._next_commit = None
        commits, log, disk = self.hub.commits, self._log, self._disk
        if self._committing is not None or commits is None or log is None or disk is None:
            return
        if len(commits):
            group = commits.take()
            write = partial(log.commit, group, commits.told, leases=commits.leases.rows)
            self._committing = asyncio.get_running_loop().run_in_executor(disk, write)
            self._committing.add_done_callback(self._committed)

    def _committed(self, commit: asyncio.Future[None]) -> None:
        self._committing = None
        error = commit.exception()
        if error is None:
            self._deliver(self.hub.committed())
        else:
            _log.error("records could not be written: %s", error, exc_info=not isinstance(error, StorageError) and error)
            self._deliver(self.hub.commit_failed(str(error)))
        self._arm()
        self._arm_commit()
        if not self._closed:
            self._read()
        if self._upkeep_timer is None and not self._closed:
            self._upkeep_timer = asyncio.get_running_loop().call_later(UPKEEP_INTERVAL_S, self._start_upkeep)

    def _start_upkeep(self) -> None:
        self._upkeep_timer = None
        self._kept = asyncio.get_running_loop().create_task(self._upkeep(), name="exchange upkeep")

    async def _upkeep(self) -> None:
        """Have the disk tidied; waits for it."""
        log, disk = self._log, self._disk
        if log is None or disk is None:
            return
        idle = self._committing is None and not self.hub.commits
        upkeep = partial(log.upkeep, self.hub.keep_from(), idle=idle)
        try:
            self.hub.disk = await asyncio.get_running_loop().run_in_executor(disk, upkeep)
        except StorageError as error:
            _log.error("the exchange's disk could not be tidied: %s", error)

    def _read(self) -> None:
        """Have the next piece read for a gather that memory cannot answer."""
        log, threads = self._log, self._replay
        if self._reading is None and log is not None and threads is not None and (reading := self.hub.next_reading()):
            self._reading = asyncio.get_running_loop().run_in_executor(threads, log.read, reading)
            self._reading.add_done_callback(self._was_read)

    def _was_read(self, reading: asyncio.Future[Chunk]) -> None:
        self._reading = None
        error = reading.exception()
        if error is None:
            self._deliver(self.hub.replayed(reading.result()))
        else:
            _log.error("records could not be read: %s", error, exc_info=not isinstance(error, StorageError) and error)
            self._deliver(self.hub.replay_failed(str(error)))
        self._arm()
        self._arm_commit()
        if not self._closed:
            self._read()

    def _deliver(self, outgoing: Iterable[Outgoing]) -> None:
        """Send, all of the control lane first; what the data lane does not take yet goes there too."""
        control: defaultdict[bytes, list[list[Buffer]]] = defaultdict(list)
        data: defaultdict[bytes, list[list[Buffer]]] = defaultdict(list)
        for item in outgoing:
            lane = data if isinstance(item.message, DATA_TO_WORKER) else control
            lane[item.peer].append(self._encode(item))
        for lane, send in ((control, self._send), (data, self._send_data)):
            for peer, waiting in lane.items():
                if not all(send(peer, multipart) or self._send(peer, multipart) for multipart in joined(waiting)):
                    self.hub.undeliverable(peer)

    def _encode(self, item: Outgoing) -> list[Buffer]:
        try:
            return encode_message(item.message, item.request_id, item.payload)
        except RecordTooLargeError as error:
            return encode_message(refused("too_large", str(error)), item.request_id)

    def _arm(self) -> None:
        """Have `tick` called at the hub's next deadline, or before it and then once more."""
        deadline = self.hub.next_deadline()
        if deadline is None or (self._timer is not None and self._armed_to <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed_to = deadline
        self._timer = asyncio.get_running_loop().call_later(max(deadline - self._clock(), 0.0), self.tick)
