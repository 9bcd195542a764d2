"""Keys of a hub and its workers: who may connect to a hub that other machines can reach, and under which name.

A directory has a pair for each name, in pyzmq's certificate format: `NAME.key` is public and says the role,
`NAME.key_secret` is for its owner alone. The hub is named `hub`; its directory needs its own secret and every public key.
A worker's needs its own secret and `hub.key`.

With keys, a peer is known at its hub as an address: the holder of its key, and the routing id that it came with. A routing id
under another key is another peer.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import blake3
import zmq
from zmq.utils import z85

from exchange.errors import KeysError
from exchange.message_base import MAX_NAME_CHARS
from exchange.types import AgentName

__all__ = ["Holder", "HubKeys", "WorkerKeys", "address_of", "holder_of", "make_keys", "routing_id_of"]

HUB = "hub"
PUBLIC, SECRET = ".key", ".key_secret"
WORKER_ROLE, OBSERVER_ROLE = "worker", "observer"
# A name is a file's, and no other character has a place in an address.
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}")
_NAMES = f"1 to {MAX_NAME_CHARS} letters, digits, dots, dashes and underscores"
_FIELD = re.compile(r'^\s*(role|public-key|secret-key)\s*=\s*"?([^"\n]*?)"?\s*$', re.MULTILINE)
_ADDRESS = re.compile(rf"\0({WORKER_ROLE}|{OBSERVER_ROLE}):({_NAME.pattern})\0".encode())
MAX_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Whom a key belongs to."""

    name: AgentName
    observer: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise KeysError(f"no key can have this name, got name={self.name!r}: {_NAMES}")

    @property
    def user_id(self) -> str:
        """What the transport says of each message that came with this holder's key."""
        return f"{OBSERVER_ROLE if self.observer else WORKER_ROLE}:{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubKeys:
    """What a hub needs. holders: by public key. Keys are in Z85, 40 characters for 32 bytes."""

    public: bytes
    secret: bytes = field(repr=False)
    holders: Mapping[bytes, Holder]

    @classmethod
    def load(cls, directory: Path) -> HubKeys:
        """The hub's pair and all public keys of a directory. Raises KeysError."""
        public, secret = _load_pair(directory, HUB)
        holders: dict[bytes, Holder] = {}
        for path in sorted(directory.glob(f"*{PUBLIC}")):
            name = path.name.removesuffix(PUBLIC)
            if name == HUB:
                continue
            found = _fields(path)
            role = found.get("role", WORKER_ROLE)
            if role not in (WORKER_ROLE, OBSERVER_ROLE):
                raise KeysError(f"a key's role is {WORKER_ROLE} or {OBSERVER_ROLE}, got path={str(path)!r}, role={role!r}")
            key = _key(found, "public-key", path)
            if key in holders or key == public:
                raise KeysError(f"two names have one key, got path={str(path)!r}: remove it, and make a new pair")
            holders[key] = Holder(name=AgentName(name), observer=role == OBSERVER_ROLE)
        return cls(public=public, secret=secret, holders=holders)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKeys:
    """What a worker needs. hub: the public key of its hub. Keys are in Z85, 40 characters for 32 bytes."""

    public: bytes
    secret: bytes = field(repr=False)
    hub: bytes

    @classmethod
    def load(cls, directory: Path, name: str) -> WorkerKeys:
        """The pair of `name`, and the hub's public key, from a directory. Raises KeysError."""
        public, secret = _load_pair(directory, name)
        path = directory / f"{HUB}{PUBLIC}"
        return cls(public=public, secret=secret, hub=_key(_fields(path), "public-key", path))


def make_keys(directory: Path, names: Collection[str], *, observers: Collection[str] = ()) -> list[Path]:
    """Make a pair for each name, and the hub's unless it is there; returns the new files.

    directory: made with mode 0700 if it is not there. Never writes over a file. Raises KeysError.
    """
    wanted = [*names, *observers]
    for name in wanted:
        if not _NAME.fullmatch(name) or name == HUB or wanted.count(name) > 1:
            raise KeysError(f"a worker's name has {_NAMES}, is not {HUB!r} and comes once, got name={name!r}")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise KeysError(f"the directory cannot be made, got directory={str(directory)!r}: {error}") from error
    _check_unwritable(directory, directory.stat())
    roles = dict.fromkeys(names, WORKER_ROLE) | dict.fromkeys(observers, OBSERVER_ROLE)
    if not (directory / f"{HUB}{PUBLIC}").exists():
        roles = {HUB: HUB, **roles}
    paths = [directory / f"{name}{suffix}" for name in roles for suffix in (SECRET, PUBLIC)]
    for path in paths:
        if os.path.lexists(path):
            raise KeysError(f"keys are never written over, got path={str(path)!r}: remove both files of a pair to replace it")
    for name, role in roles.items():
        public, secret = zmq.curve_keypair()
        _write(directory / f"{name}{SECRET}", 0o600, {"role": role}, {"public-key": public, "secret-key": secret})
        _write(directory / f"{name}{PUBLIC}", 0o644, {"role": role}, {"public-key": public})
    return paths


def address_of(user_id: str, routing_id: bytes) -> bytes:
    """The address of a peer whose key belongs to `user_id`."""
    return b"\0%s\0%s" % (user_id.encode(), routing_id)


def holder_of(address: bytes) -> Holder | None:
    """Whose key a peer came with; None at a hub without keys.

    Such a hub takes routing ids as they are. One that looks like an address binds its sender, and nobody else.
    """
    found = _ADDRESS.match(address)
    if found is None:
        return None
    role, name = (group.decode() for group in found.groups())
    return Holder(name=AgentName(name), observer=role == OBSERVER_ROLE)


def routing_id_of(identity: bytes, keys: WorkerKeys) -> bytes:
    """The routing id of a worker with keys: the same for one identity and key, and for others not to be guessed.

    The hub's socket sends to whoever came last with a routing id, before anybody can look at the key.
    """
    return b"\1" + blake3.blake3(identity, key=z85.decode(keys.secret)).digest(length=15)


def _load_pair(directory: Path, name: str) -> tuple[bytes, bytes]:
    path = directory / f"{name}{SECRET}"
    if not _NAME.fullmatch(name):
        raise KeysError(f"no key can have this name, got name={name!r}: {_NAMES}")
    found = _fields(path, secret=True)
    public, secret = _key(found, "public-key", path), _key(found, "secret-key", path)
    if zmq.curve_public(secret) != public:
        raise KeysError(f"the two keys of a pair do not fit, got path={str(path)!r}: make a new pair")
    return public, secret


def _fields(path: Path, *, secret: bool = False) -> dict[str, str]:
    _check_unwritable(path.parent, path.parent.stat() if path.parent.is_dir() else None)
    with _opened(path) as file:
        found = os.fstat(file.fileno())
        _check_unwritable(path, found)
        if secret and found.st_mode & 0o077:
            raise KeysError(
                f"a secret key is for its owner alone, got path={str(path)!r}, mode={stat.S_IMODE(found.st_mode):o}: "
                f"chmod 600, and make a new pair if others may have read it"
            )
        return dict(_FIELD.findall(file.read(MAX_FILE_BYTES).decode(errors="replace")))


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise KeysError(f"there is no key, got path={str(path)!r}: `mutualrl keys` makes keys") from None
    except OSError as error:
        raise KeysError(f"a key cannot be read, got path={str(path)!r}: {error}") from error
    with file:
        yield file


def _check_unwritable(path: Path, found: os.stat_result | None) -> None:
    """Whoever can write public keys decides who may connect."""
    if found is not None and found.st_mode & 0o022:
        raise KeysError(
            f"keys must not be writable for others, got path={str(path)!r}, mode={stat.S_IMODE(found.st_mode):o}: chmod go-w"
        )


def _key(found: Mapping[str, str], name: str, path: Path) -> bytes:
    key = found.get(name, "").encode()
    try:
        if len(z85.decode(key)) == 32 and len(key) == 40:
            return key
    except (KeyError, ValueError, struct.error):  # what pyzmq raises for other characters, lengths and numbers
        pass
    raise KeysError(f"this is no file with a {name}, got path={str(path)!r}: `mutualrl keys` makes keys")


def _write(path: Path, mode: int, metadata: Mapping[str, str], curve: Mapping[str, bytes]) -> None:
    lines = ["metadata", *(f"    {name} = {value}" for name, value in metadata.items())]
    lines += ["curve", *(f'    {name} = "{value.decode()}"' for name, value in curve.items())]
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(file, "w") as text:
            text.write("\n".join(lines) + "\n")
    except OSError as error:
        raise KeysError(f"a key cannot be written, got path={str(path)!r}: {error}") from error
