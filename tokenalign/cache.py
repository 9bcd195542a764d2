"""What is slow to make and the same everywhere, kept on disk: token tables and converted tokenizers.

A file is trusted only if it is a regular one of this user's, at most a gibibyte, with the checksum of its name and
content at its end; any other is as good as none. The checksum finds damage and no ill will: what a file says is for its
reader to check. Where nothing can be written, nothing is kept. MUTUALRL_CACHE names another place than the user's cache
directory; empty, it turns the cache off.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_DIGEST_BYTES = 32
_MOST_BYTES = 1 << 30


def place() -> Path | None:
    """The directory of the cached files, which need not exist; None when there is to be no cache."""
    given = os.environ.get("MUTUALRL_CACHE")
    if given is not None:
        return Path(given) / "tokenalign" if given else None
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home directory
        return None
    return root / "mutualrl" / "tokenalign"


def load(name: str) -> bytes | None:
    """The content stored under a name; None where there is none, or none whole and readable."""
    directory = place()
    if directory is None:
        return None
    try:
        stored = _read_own(directory / name)
    except OSError:
        return None
    content = stored[:-_DIGEST_BYTES]
    return content if stored[-_DIGEST_BYTES:] == _digest(name, content) else None


def store(name: str, content: bytes) -> None:
    """Keep a content under a name, all of it or nothing; no error when that cannot be."""
    directory = place()
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".part-") as scratch:
            part = Path(scratch) / "file"
            part.write_bytes(content + _digest(name, content))
            part.replace(directory / name)
    except OSError:
        return


def load_arrays(name: str) -> dict[str, npt.NDArray[Any]] | None:
    """The arrays stored under a name; None as in `load`."""
    content = load(name)
    if content is None:
        return None
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                return None  # `store_arrays` packs nothing: this is another's, and may unpack to any size
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception:  # foreign bytes: zipfile and numpy fail on them in a dozen ways
        return None


def store_arrays(name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Keep arrays under a name, as `store` does."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    store(name, buffer.getvalue())


def _read_own(path: Path) -> bytes:
    """A file's content; b"" for what is no regular file of this user, or too large."""
    # Not to wait for the other end of a pipe, nor to follow a link out of the cache.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size > _MOST_BYTES:
            return b""
        with open(handle, "rb", closefd=False) as file:
            return file.read(status.st_size)
    finally:
        os.close(handle)


def _digest(name: str, content: bytes) -> bytes:
    digest = hashlib.sha256(name.encode())
    digest.update(content)
    return digest.digest()
