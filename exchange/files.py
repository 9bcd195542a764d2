"""The files of one directory, and the only way in which segments touch the disk."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from exchange.errors import StorageError
from exchange.wire import Buffer

__all__ = ["Files", "OSFiles", "claim_run", "hold_directory", "sync_directory", "told"]

LOCK = "lock"
RUN = "run"
MAX_RUN_BYTES = 4096
# The most buffers that Linux takes in one writev.
MAX_BUFFERS = 1024

_ADVICE = {
    errno.ENOSPC: "free space on that disk, or lower the limits of the exchange's storage",
    errno.EDQUOT: "free space within the quota, or lower the limits of the exchange's storage",
    errno.EIO: "the device fails, see the kernel's log; move the directory to another disk",
    errno.EROFS: "the file system has become read-only, see the kernel's log",
    errno.EACCES: "the directory must belong to the user of the hub",
}


class Files(Protocol):
    """A flat directory. Everything raises StorageError where the disk refuses.

    Reads may come from any thread, everything else from one at a time. Nothing is durable before `sync` of its file has
    returned, nor a new or removed name before `sync_directory` has.
    """

    def append(self, name: str, buffers: Sequence[Buffer]) -> None:
        """Write the buffers behind the end of a file, which is created if missing. Raising, it may have written a part."""
        ...

    def sync(self, name: str) -> None:
        """Make the data of a file durable. After it has raised, what was not yet durable may be gone."""
        ...

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        """Fill `target` from `offset` on; the number of bytes read is smaller only at the end of the file."""
        ...

    def truncate(self, name: str, nbytes: int) -> None:
        """Cut a file down to its first `nbytes`."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is no error."""
        ...

    def sizes(self) -> dict[str, int]:
        """Every file with its size in bytes."""
        ...

    def sync_directory(self) -> None:
        """Make names durable."""
        ...


class OSFiles:
    """Files in a directory of the system, which is created with mode 0700 if missing."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # The file that was appended to last stays open: batch follows batch.
        self._open: tuple[str, int] | None = None
        with told(directory):
            if not directory.is_dir():
                directory.mkdir(mode=0o700, parents=True)
                sync_directory(directory.parent)

    def append(self, name: str, buffers: Sequence[Buffer]) -> None:
        with told(self._at(name)):
            fd = self._appending(name)
            for start in range(0, len(buffers), MAX_BUFFERS):
                _write_all(fd, buffers[start : start + MAX_BUFFERS])

    def sync(self, name: str) -> None:
        with told(self._at(name)):
            os.fdatasync(self._appending(name))

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        # Opened for every read (some microseconds): no descriptor can be closed under a reader in another thread.
        with told(self._at(name)):
            fd = os.open(self._at(name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                done = 0
                while done < target.nbytes and (count := os.preadv(fd, [target[done:]], offset + done)):
                    done += count
                return done
            finally:
                os.close(fd)

    def truncate(self, name: str, nbytes: int) -> None:
        with told(self._at(name)):
            fd = self._appending(name)
            os.ftruncate(fd, nbytes)
            # fdatasync need not keep a size that has only become smaller.
            os.fsync(fd)

    def remove(self, name: str) -> None:
        if self._open is not None and self._open[0] == name:
            self.close()
        with told(self._at(name)):
            Path(self._at(name)).unlink(missing_ok=True)

    def sizes(self) -> dict[str, int]:
        with told(self._directory), os.scandir(self._directory) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False)}

    def sync_directory(self) -> None:
        with told(self._directory):
            sync_directory(self._directory)

    def close(self) -> None:
        """Close the file that was appended to last."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def _at(self, name: str) -> str:
        return f"{self._directory}/{name}"

    def _appending(self, name: str) -> int:
        if self._open is None or self._open[0] != name:
            self.close()
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._open = (name, os.open(self._at(name), flags, 0o600))
        return self._open[1]


def hold_directory(directory: Path) -> int:
    """Lock a directory for this process; the lock ends when the returned descriptor is closed.

    Raises StorageError naming the process that holds it.
    """
    path = directory / LOCK
    with told(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise StorageError(
                f"another hub stores its records here, got directory={str(directory)!r}, held by pid={holder}: "
                f"end that hub, or choose another directory"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def claim_run(files: Files, run_id: str) -> None:
    """Write the run's id into a new directory. Raises StorageError in one of another run."""
    wanted = f"{run_id}\n".encode()
    found = bytearray(min(files.sizes().get(RUN, 0), MAX_RUN_BYTES))
    files.read_into(RUN, 0, memoryview(found)) if found else 0
    if bytes(found) == wanted:
        return
    if found.endswith(b"\n"):
        stored = found.decode("utf-8", "replace").strip()
        raise StorageError(
            f"the directory holds the records of another run, got run_id={run_id!r}, stored run={stored!r}: choose another "
            f"directory, or start with that run's id"
        )
    # New, or a crash came while it was written.
    files.truncate(RUN, 0)
    files.append(RUN, [wanted])
    files.sync(RUN)
    files.sync_directory()


def _write_all(fd: int, buffers: Sequence[Buffer]) -> None:
    left = list(buffers)
    while left:
        count, whole = os.writev(fd, left), 0
        for buffer in left:
            nbytes = len(buffer) if isinstance(buffer, bytes) else buffer.nbytes
            if nbytes > count:
                break
            count, whole = count - nbytes, whole + 1
        del left[:whole]
        if count:
            left[0] = memoryview(left[0])[count:]


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def told(path: Path | str) -> Iterator[None]:
    """Turns the system's errors into ones that say which path, and what to do."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "see the kernel's log, and that the directory still exists")
        raise StorageError(error.errno, f"{error.strerror}, got path={str(path)!r}: {advice}") from error
