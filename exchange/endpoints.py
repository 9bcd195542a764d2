"""Addresses of a hub: which are allowed, private directories for sockets, and one hub per socket path.

Closed by default: a hub listens on loopback or in a directory that only its user may enter.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from exchange.errors import EndpointError

__all__ = ["check_endpoint", "claim", "private_ipc_dir"]

# The system's limit is 107 bytes; the rest is for the socket's name.
MAX_DIR_CHARS = 90
MAX_PATH_BYTES = 107


def private_ipc_dir() -> Path:
    """Make a directory `mrl-<8 hex>`, mode 0700, in $XDG_RUNTIME_DIR or the temporary directory (/tmp if too long)."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    name = f"mrl-{secrets.token_hex(4)}"
    if len(str(base / name)) > MAX_DIR_CHARS or not os.access(base, os.W_OK | os.X_OK):
        base = Path("/tmp")
    path = base / name
    path.mkdir(mode=0o700)
    _check_private(path)
    return path


def check_endpoint(endpoint: str) -> None:
    """Raise EndpointError unless `endpoint` is ipc:// with a usable path, or tcp:// on loopback with a port."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        if not rest.startswith("/") or len(os.fsencode(rest)) > MAX_PATH_BYTES:
            raise EndpointError(
                f"an ipc path must be absolute with at most {MAX_PATH_BYTES} bytes, got endpoint={endpoint!r} "
                f"({len(os.fsencode(rest))} bytes): exchange.private_ipc_dir() makes a short one"
            )
    elif scheme == "tcp":
        _check_loopback(endpoint, rest)
    else:
        raise EndpointError(f"an endpoint starts with ipc:// or tcp://, got endpoint={endpoint!r}")


def _check_loopback(endpoint: str, rest: str) -> None:
    host, _, port = rest.rpartition(":")
    if not port.isdigit() or int(port) > 65_535:
        raise EndpointError(f"a tcp endpoint ends with a port, got endpoint={endpoint!r}")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise EndpointError(f"an IPv6 address stands in brackets, got endpoint={endpoint!r}: write tcp://[::1]:{port}")
    with suppress(ValueError):
        if host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback:
            return
    raise EndpointError(
        f"without keys an exchange serves one machine only, got endpoint={endpoint!r}: use ipc:// or tcp://127.0.0.1"
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
