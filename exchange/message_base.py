"""What messages between a worker and the hub are made of."""

from __future__ import annotations

import msgspec

from exchange.types import Cursor

__all__ = ["MAX_NAME_CHARS", "RowHeader", "Wire", "check_name"]

MAX_NAME_CHARS = 64


class Wire(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What every message is."""


class RowHeader(msgspec.Struct, frozen=True, kw_only=True):
    """One record within Rows. lag: None when the record is of an earlier epoch of its producer.

    Frame 0 of the record is bytes offset to offset + nbytes of payload frame `frame`; its large arrays are the payload
    frames first_large to first_large + large - 1.
    """

    cursor: Cursor
    age_s: float
    lag: int | None
    body: bytes
    frame: int
    offset: int
    nbytes: int
    first_large: int
    large: int


def check_name(field: str, name: str) -> None:
    """Raise ValueError for a name that is empty or too long."""
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise ValueError(f"`{field}` must have 1 to {MAX_NAME_CHARS} characters, got {len(name)}")
