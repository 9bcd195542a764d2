"""Addresses of a hub: which are allowed, private directories for sockets, and one hub per socket path.

Closed by default: without keys a hub listens on loopback or in a directory that only its user may enter.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, get_args

from exchange.errors import EndpointError

__all__ = [
    "check_endpoint",
    "check_reachable",
    "claim",
    "lane_endpoint",
    "lane_port",
    "loopback_of",
    "private_ipc_dir",
    "remove_private_dir",
    "silence_at",
]

_PREFIX = "mrl-"
# A directory that somebody has just made, or will use again at once, is not yet left behind.
ABANDONED_S = 3600.0

# The system's limit is 107 bytes; the rest is for the names of the sockets.
MAX_DIR_CHARS = 90
MAX_PATH_BYTES = 107 - len(".bulk")
# What a hub may bind to, and how it is reached on its own machine.
EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "[::]": "[::1]"}

Lane = Literal["data", "bulk"]


def private_ipc_dir() -> Path:
    """Make a directory `mrl-<8 hex>`, mode 0700, in $XDG_RUNTIME_DIR or the temporary directory (/tmp if too long).

    A hub leaves the directory there, so remove it when the hub has ended. Those of this user beside it
    that are an hour old and have no hub any more are removed. Raises OSError.
    """
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    name = f"{_PREFIX}{secrets.token_hex(4)}"
    if len(str(base / name)) > MAX_DIR_CHARS or not os.access(base, os.W_OK | os.X_OK):
        base = Path("/tmp")
    path = base / name
    path.mkdir(mode=0o700)
    _check_private(path)
    _sweep(base)
    return path


def remove_private_dir(endpoint: str) -> None:
    """Remove the directory of an endpoint if `private_ipc_dir` made it; anything else is left alone."""
    directory = Path(endpoint.removeprefix("ipc://")).parent
    if endpoint.startswith("ipc://") and directory.name.startswith(_PREFIX):
        shutil.rmtree(directory, ignore_errors=True)


def _sweep(base: Path) -> None:
    for directory in base.glob(f"{_PREFIX}{'[0-9a-f]' * 8}"):
        with suppress(OSError, EndpointError):
            _check_private(directory)
            if time.time() - directory.stat().st_mtime < ABANDONED_S:
                continue
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while a hub is there
                shutil.rmtree(directory)
            finally:
                os.close(lock)


def check_endpoint(endpoint: str, *, keyed: bool = False) -> None:
    """Raise EndpointError unless `endpoint` is ipc:// with a usable path, or tcp:// with a port.

    keyed: whoever listens or connects there has keys; without them a host is loopback.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        if not rest.startswith("/") or len(os.fsencode(rest)) > MAX_PATH_BYTES:
            raise EndpointError(
                f"an ipc path must be absolute with at most {MAX_PATH_BYTES} bytes, got endpoint={endpoint!r} "
                f"({len(os.fsencode(rest))} bytes): exchange.private_ipc_dir() makes a short one"
            )
    elif scheme == "tcp":
        _check_tcp(endpoint, rest, keyed)
    else:
        raise EndpointError(f"an endpoint starts with ipc:// or tcp://, got endpoint={endpoint!r}")


def lane_endpoint(endpoint: str, lane: Lane, port: int) -> str:
    """Another lane of a hub: beside its ipc path, or at another port of its host (0 for the hub to take a free one)."""
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.{lane}"
    return f"{endpoint.rpartition(':')[0]}:{port}"


def lane_port(real_endpoint: str) -> int:
    """The port that finds a bound lane by `lane_endpoint`, 0 where its path does."""
    return 0 if real_endpoint.startswith("ipc://") else int(real_endpoint.rpartition(":")[2])


def check_reachable(endpoint: str) -> None:
    """Raise EndpointError for an address to which nobody can connect: that of all interfaces."""
    if endpoint.startswith("tcp://") and endpoint.removeprefix("tcp://").rpartition(":")[0] in EVERY_INTERFACE:
        raise EndpointError(
            f"a hub may listen on all interfaces, a worker connects to one, got endpoint={endpoint!r}: name the hub's host"
        )


def loopback_of(endpoint: str) -> str:
    """The address under which the hub's own process reaches what it has bound."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"tcp://{EVERY_INTERFACE[host]}:{port}" if endpoint.startswith("tcp://") and host in EVERY_INTERFACE else endpoint


def silence_at(endpoint: str, waited_s: float) -> str:
    """What to say to whoever waited there for a hub in vain; on another machine a loopback address finds nobody, ever."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    if endpoint.startswith("ipc://") or _is_loopback(host):
        reach = "it reaches this machine alone; a hub on another one needs keys and is called by its host's name"
    else:
        reach = "a hub there must listen on that address and not on its own loopback"
    return f"no WELCOME within {waited_s:g} s, got endpoint={endpoint!r}: does a hub of this run listen there? ({reach})"


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def _check_tcp(endpoint: str, rest: str, keyed: bool) -> None:
    host, _, port = rest.rpartition(":")
    if not port.isdigit() or int(port) > 65_535:
        raise EndpointError(f"a tcp endpoint ends with a port, got endpoint={endpoint!r}")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise EndpointError(f"an IPv6 address stands in brackets, got endpoint={endpoint!r}: write tcp://[::1]:{port}")
    if (keyed and host) or _is_loopback(host):
        return
    raise EndpointError(
        f"without keys an exchange serves one machine only, got endpoint={endpoint!r}: use ipc:// or tcp://127.0.0.1, "
        f"or give hub and workers keys (`mutualrl keys`)"
    )


@contextmanager
def claim(endpoint: str) -> Iterator[None]:
    """Hold an ipc path for one hub: a second bind would succeed and steal its workers without an error.

    The lock is a file `lock` beside the socket and ends with its process, so that a stale socket of a killed hub is no
    obstacle. Anything at the path that is no socket is left alone. Raises EndpointError.
    """
    if not endpoint.startswith("ipc://"):
        yield
        return
    path = Path(endpoint.removeprefix("ipc://"))
    _check_private(path.parent)
    lock = os.open(path.parent / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EndpointError(f"another hub serves this directory, got endpoint={endpoint!r}") from None
        if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
            raise EndpointError(f"the path is taken by something else, got endpoint={endpoint!r}: move it away")
        yield
        path.unlink(missing_ok=True)
        for lane in get_args(Lane):
            Path(f"{path}.{lane}").unlink(missing_ok=True)
    finally:
        os.close(lock)


def _check_private(directory: Path) -> None:
    try:
        found = directory.lstat()
    except FileNotFoundError:
        raise EndpointError(f"the directory of an ipc endpoint must exist, got directory={str(directory)!r}") from None
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    if not private:
        raise EndpointError(
            f"the directory of an ipc endpoint must be yours with mode 0700, got directory={str(directory)!r}, "
            f"mode={stat.S_IMODE(found.st_mode):o}, owner={found.st_uid}: exchange.private_ipc_dir() makes one"
        )
