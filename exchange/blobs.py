"""The blobs of a hub: files under the digest of what is in them, within a budget of bytes.

A blob grows from its beginning in a part file, is checked against its name as a whole, and only then is there for readers.
In a durable hub parts and blobs outlast it; without a directory they are files without names. Room is made by letting go
what was used longest ago, parts that nobody goes on with among it, and never what is on the move. One thread uses a store,
except for `digest` and `sync`, which may run in another while `checking` is set.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import blake3
import crc32c

from exchange.blob_messages import PIECE_BYTES
from exchange.errors import RefusedError
from exchange.files import sync_directory, told
from exchange.types import check_blob_id

__all__ = ["Blob", "BlobStore"]

# Every blob holds a descriptor open, and 1,024 is what a process may usually have.
MAX_BLOBS = 128
# What a blob costs at least, so that empty ones are not free.
LEAST_BYTES = 4096
# Who has asked for or sent a piece within this time is still at it.
MOVING_S = 30.0
PART = ".part"


@dataclass(slots=True, kw_only=True)
class Blob:
    """One blob, or its beginning. end: so much is there. moving: when each peer last had a piece of it or sent one."""

    id: str
    nbytes: int
    fd: int
    end: int = 0
    whole: bool = False
    checking: bool = False
    moving: dict[bytes, float] = field(default_factory=dict)
    crcs: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def cost(self) -> int:
        return max(self.nbytes, LEAST_BYTES)


class BlobStore:
    """Blobs of at most blob_bytes together, in `directory` or in files without names. clock: monotonic seconds.

    Raises StorageError where the disk refuses.
    """

    def __init__(self, directory: Path | None, *, blob_bytes: int, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._limit_bytes = blob_bytes
        self._clock = clock
        # Least recently used first.
        self._blobs: OrderedDict[str, Blob] = OrderedDict()
        self.evicted = 0
        if directory is not None:
            self._recover(directory)

    def find(self, id: str) -> Blob | None:
        """A blob or a part of it, None where there is nothing."""
        return self._blobs.get(id)

    def whole(self) -> list[Blob]:
        """The blobs that readers see; safe to call from any thread."""
        return [blob for blob in tuple(self._blobs.values()) if blob.whole]

    def begin(self, id: str, nbytes: int) -> Blob:
        """The part to go on with, a new one if there is none. Raises RefusedError when there is no room."""
        known = self._blobs.get(id)
        if known is not None and not known.end <= nbytes:
            self.drop(known)
            known = None
        self._make_room(nbytes, but=known)
        if known is None:
            known = self._blobs[id] = Blob(id=id, nbytes=nbytes, fd=self._create(id))
        known.nbytes = nbytes
        self._blobs.move_to_end(id)
        return known

    def put(self, blob: Blob, peer: bytes, data: memoryview, crc: int) -> None:
        """Write what comes next of a part."""
        with told(self._at(blob.id)):
            done = 0
            while done < data.nbytes:
                done += os.pwrite(blob.fd, data[done:], blob.end + done)
        self._know_crc(blob, blob.end, data.nbytes, crc)
        blob.end += data.nbytes
        self._touch(blob, peer)

    def get(self, blob: Blob, peer: bytes, offset: int, nbytes: int) -> tuple[bytes, int]:
        """The bytes of a blob from `offset` on, fewer at its end, with their crc32c."""
        data = self._read(blob, offset, nbytes)
        crc = blob.crcs.get((offset, len(data)))
        if crc is None:
            crc = crc32c.crc32c(data)
            self._know_crc(blob, offset, len(data), crc)
        self._touch(blob, peer)
        if offset + len(data) >= blob.nbytes:
            blob.moving.pop(peer, None)
        return data, crc

    def digest(self, blob: Blob) -> Iterator[str]:
        """What a part is named when it is whole; yields "" after every few pieces, and the digest in the end."""
        digest = blake3.blake3()
        for count, offset in enumerate(range(0, blob.nbytes, PIECE_BYTES), 1):
            digest.update(self._read(blob, offset, PIECE_BYTES))
            if not count % 64:
                yield ""
        yield digest.hexdigest()

    def sync(self, blob: Blob) -> None:
        """Make a part durable under its name."""
        if self._directory is None:
            return
        with told(self._at(blob.id)):
            os.fsync(blob.fd)
            Path(self._at(blob.id + PART)).rename(self._at(blob.id))
            sync_directory(self._directory)

    def drop(self, blob: Blob) -> None:
        """Let a blob or a part go."""
        self._blobs.pop(blob.id)
        os.close(blob.fd)
        if self._directory is not None:
            with told(self._at(blob.id)):
                Path(self._at(blob.id + ("" if blob.whole else PART))).unlink(missing_ok=True)

    def movers(self, blob: Blob, within_s: float = MOVING_S) -> list[bytes]:
        """Who has sent or asked for a piece of it within this time."""
        since = self._clock() - within_s
        return [peer for peer, at in blob.moving.items() if at > since]

    def close(self) -> None:
        for blob in self._blobs.values():
            os.close(blob.fd)
        self._blobs.clear()

    def _at(self, name: str) -> str:
        return f"{self._directory or tempfile.gettempdir()}/{name}"

    def _create(self, id: str) -> int:
        with told(self._at(id)):
            if self._directory is not None:
                return os.open(self._at(id + PART), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with tempfile.TemporaryFile() as file:
                return os.dup(file.fileno())

    def _read(self, blob: Blob, offset: int, nbytes: int) -> bytes:
        nbytes = max(min(nbytes, blob.nbytes - offset), 0)
        with told(self._at(blob.id)):
            data = os.pread(blob.fd, nbytes, offset)
            while len(data) < nbytes and (more := os.pread(blob.fd, nbytes - len(data), offset + len(data))):
                data += more
        return data

    def _know_crc(self, blob: Blob, offset: int, nbytes: int, crc: int) -> None:
        # Whoever asks for other pieces than these must not make the hub remember more and more.
        if not offset % PIECE_BYTES:
            blob.crcs[offset, nbytes] = crc

    def _touch(self, blob: Blob, peer: bytes) -> None:
        blob.moving[peer] = self._clock()
        self._blobs.move_to_end(blob.id)

    def _make_room(self, nbytes: int, but: Blob | None) -> None:
        needed = max(nbytes, LEAST_BYTES)
        if needed > self._limit_bytes:
            raise RefusedError(
                "too_large", f"blobs take at most blob_bytes={self._limit_bytes} here, got one of {nbytes} bytes: raise it"
            )
        others = [blob for blob in self._blobs.values() if blob is not but]
        total = needed + sum(blob.cost for blob in others)
        going: list[Blob] = []
        for blob in others:
            if total <= self._limit_bytes and len(others) - len(going) < MAX_BLOBS:
                break
            if not blob.checking and not self.movers(blob):
                going.append(blob)
                total -= blob.cost
        if total > self._limit_bytes or len(others) - len(going) >= MAX_BLOBS:
            raise RefusedError(
                "full",
                f"{len(others) - len(going)} blobs are on the move, got one more of {nbytes} bytes, of blob_bytes="
                f"{self._limit_bytes} (and {MAX_BLOBS} blobs) in all: try later, or raise it",
            )
        for blob in going:
            self.drop(blob)
            self.evicted += 1

    def _recover(self, directory: Path) -> None:
        """Take up the blobs and parts of an earlier hub; those that were used last are kept, within the budget."""
        with told(directory):
            if not directory.is_dir():
                directory.mkdir(mode=0o700)
                sync_directory(directory.parent)
            found = []
            for path in directory.iterdir():
                try:
                    check_blob_id(path.name.removesuffix(PART))
                except ValueError:
                    continue  # not one of ours
                found.append((path.stat().st_mtime_ns, path))
            room = self._limit_bytes
            for count, (_, path) in enumerate(sorted(found, reverse=True)):
                nbytes = path.stat().st_size
                room -= max(nbytes, LEAST_BYTES)
                if room < 0 or count >= MAX_BLOBS:
                    path.unlink()
                    continue
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                id, whole = path.name.removesuffix(PART), path.suffix != PART
                self._blobs[id] = Blob(id=id, nbytes=nbytes, fd=fd, end=nbytes, whole=whole)
                self._blobs.move_to_end(id, last=False)
