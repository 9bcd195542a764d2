"""What a durable hub writes down of its groups: each thing that may change alone under a key of its own."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from exchange.errors import StorageError
from exchange.lease_messages import DeadLetter
from exchange.types import AgentName, Cursor, Kind

__all__ = ["GROUP", "LETTERS", "LeaseRows", "StoredGroup", "StoredHeld", "StoredLetters", "decode_row", "encode_row"]

# Under a group's name: its counts, its dead letters, and, under their cursors, the records that it has handed out.
GROUP, LETTERS = -1, -2
# None: there is no such thing any more.
LeaseRows = Mapping[tuple[str, int], bytes | None]


class Stored(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What every row is."""


class StoredGroup(Stored, frozen=True, kw_only=True, tag="group/1"):
    """A group. taken: up to where each line of records was handed out. settled_to: up to here no record waits in line."""

    kinds: tuple[Kind, ...]
    agents: tuple[AgentName, ...] | None
    done: int
    dead: int
    lost: int
    deliveries: int
    taken: tuple[tuple[AgentName, Kind, Cursor], ...]
    settled_to: Cursor


class StoredHeld(Stored, frozen=True, kw_only=True, tag="held/1"):
    """A record that was handed out and is not settled. deliveries: those that count."""

    kind: Kind
    deliveries: int


class StoredLetters(Stored, frozen=True, kw_only=True, tag="letters/1"):
    """A group's dead letters, oldest first."""

    letters: tuple[DeadLetter, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StoredGroup | StoredHeld | StoredLetters)


def encode_row(row: StoredGroup | StoredHeld | StoredLetters) -> bytes:
    """The bytes to be stored."""
    return _encoder.encode(row)


def decode_row(body: bytes) -> StoredGroup | StoredHeld | StoredLetters:
    """What was stored. Raises StorageError for anything else."""
    try:
        row: StoredGroup | StoredHeld | StoredLetters = _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise StorageError(f"what is stored of leases is of an unknown kind: {error}: use the version that wrote it") from error
    return row
