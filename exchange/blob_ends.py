"""Where the bytes of a blob come from and go to at a worker: memory or a file.

Everything here may block and runs in threads; hashing, copying and checksums let other threads run.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from exchange.files import sync_directory, told
from exchange.wire import Buffer

__all__ = ["BlobData", "FileSource", "FileTarget", "MemoryTarget", "Source", "Target", "source_of"]

BlobData = bytes | bytearray | memoryview | npt.NDArray[Any] | Path
# A page: what torch, numpy and direct reads of files want at most.
ALIGNMENT = 4096
CACHED_BYTES = 256 << 10


class Source(Protocol):
    """Bytes to be sent; they must not change before the sending has ended."""

    nbytes: int

    def read(self, offset: int, nbytes: int) -> Buffer:
        """The bytes from `offset` on, fewer at the end."""
        ...

    def close(self) -> None: ...


class MemorySource:
    """A buffer of the caller, not copied."""

    def __init__(self, data: bytes | bytearray | memoryview | npt.NDArray[Any]) -> None:
        if isinstance(data, str):
            raise TypeError(f"a blob is bytes, an array or a Path, got data={data[:80]!r}: pathlib.Path for a file")
        array = data if isinstance(data, np.ndarray) else np.asarray(memoryview(data))
        if not array.flags.c_contiguous:
            raise ValueError(
                f"a blob is one piece of memory, got an array with strides={array.strides}: np.ascontiguousarray copies it"
            )
        self._data = array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")
        self.nbytes = array.nbytes

    def read(self, offset: int, nbytes: int) -> memoryview:
        return self._data[offset : offset + nbytes]

    def close(self) -> None:
        pass


class FileSource:
    """A file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with told(path):
            # Not blocking, in case the path leads to a pipe.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self.nbytes = os.fstat(self._fd).st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        with told(self._path):
            return os.pread(self._fd, nbytes, offset)

    def read_into(self, offset: int, target: memoryview) -> memoryview:
        """The part of `target` that was filled from `offset` on; less than all of it at the end.

        Through a little room that stays in the processor's caches: the system writes more slowly to memory than numpy does.
        """
        room, done = memoryview(bytearray(CACHED_BYTES)), 0
        with told(self._path):
            while count := os.preadv(self._fd, [room[: target.nbytes - done]], offset + done):
                np.copyto(np.frombuffer(target[done : done + count], np.uint8), np.frombuffer(room[:count], np.uint8))
                done += count
        return target[:done]

    def close(self) -> None:
        os.close(self._fd)


def source_of(data: BlobData) -> Source:
    """Raises ValueError for an array that is not contiguous, StorageError for a file that cannot be read."""
    return FileSource(data) if isinstance(data, Path) else MemorySource(data)


class Target(Protocol):
    """Where fetched bytes go."""

    def write(self, offset: int, data: memoryview) -> Buffer:
        """Put a piece in its place; what is returned stays as it is and can be hashed."""
        ...

    def fill(self, source: FileSource, offset: int, nbytes: int) -> Buffer:
        """Put the bytes of a file in their place, as `write`."""
        ...

    def finish(self) -> None:
        """Everything is there and verified."""
        ...

    def close(self) -> None:
        """Let go; without a `finish` before, nothing is left."""
        ...


class MemoryTarget:
    """One aligned buffer, allocated at once."""

    def __init__(self, nbytes: int) -> None:
        room = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -room.ctypes.data % ALIGNMENT
        self.data = room[start : start + nbytes]

    def write(self, offset: int, data: memoryview) -> memoryview:
        target = self.data[offset : offset + data.nbytes]
        target[:] = np.frombuffer(data, np.uint8)
        return target.data

    def fill(self, source: FileSource, offset: int, nbytes: int) -> memoryview:
        return source.read_into(offset, self.data[offset : offset + nbytes].data)

    def finish(self) -> None:
        self.data.flags.writeable = False

    def close(self) -> None:
        pass


class FileTarget:
    """A file that appears under its name when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with told(path):
            self._fd, name = tempfile.mkstemp(prefix=f".{path.name[:64]}-", suffix=".part", dir=path.parent)
        self._part = Path(name)

    def write(self, offset: int, data: memoryview) -> memoryview:
        with told(self._part):
            done = 0
            while done < data.nbytes:
                done += os.pwrite(self._fd, data[done:], offset + done)
        return data

    def fill(self, source: FileSource, offset: int, nbytes: int) -> memoryview:
        return self.write(offset, memoryview(source.read(offset, nbytes)))

    def finish(self) -> None:
        with told(self._path):
            os.fsync(self._fd)
            self._part.rename(self._path)
            sync_directory(self._path.parent)

    def close(self) -> None:
        os.close(self._fd)
        self._part.unlink(missing_ok=True)
