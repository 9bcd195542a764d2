"""manifest.json: what a run is, which processes it has, and how it ended."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from agents.seam import Seam

Status = Literal["starting", "running", "done", "failed", "stopped"]

_REPORTED_VERSIONS = ("mutualrl", "torch", "transformers", "tokenizers", "numpy", "pyzmq", "msgspec")


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a run. exit_code: None while it runs; -N when signal N ended it."""

    name: str
    pid: int
    exit_code: int | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run, rewritten whole whenever something in it changes.

    pid: of `mutualrl up`. started, ended: ISO 8601, UTC. endpoint: where the hub listens. seams: where it was taken up again,
    oldest first. checkpoint: steps in the name of the checkpoint from which it was, the last time.
    """

    run_id: str
    name: str
    status: Status
    pid: int
    started: str
    ended: str | None = None
    exit_code: int | None = None
    endpoint: str
    roles: tuple[Role, ...] = ()
    seams: tuple[Seam, ...] = ()
    checkpoint: int | None = None
    python: str = platform.python_version()
    versions: dict[str, str] = {}


def now() -> str:
    """The time of day as manifests write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def installed_versions() -> dict[str, str]:
    """Versions of the packages on which a run's numbers depend, without importing them."""
    found = {}
    for name in _REPORTED_VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file so that a reader, or a crash, meets the old content or the new and nothing between."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
