"""What is slow to make and the same everywhere, kept on disk: token tables and converted tokenizers.

A file is trusted only with the checksum of its name and content at its end; any other is as good as none. Where nothing
can be written, nothing is kept. MUTUALRL_CACHE names another place than the user's cache directory; empty, it turns the
cache off.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_DIGEST_BYTES = 32


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
        stored = (directory / name).read_bytes()
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
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None


def store_arrays(name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Keep arrays under a name, as `store` does."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    store(name, buffer.getvalue())


def _digest(name: str, content: bytes) -> bytes:
    digest = hashlib.sha256(name.encode())
    digest.update(content)
    return digest.digest()
