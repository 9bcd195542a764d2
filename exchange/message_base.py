"""What messages between a worker and the hub are made of."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from exchange.types import Cursor, Kind

__all__ = ["MAX_KINDS", "MAX_NAME_CHARS", "RowHeader", "Wire", "check_kinds", "check_name", "sayable"]

MAX_NAME_CHARS = 64
MAX_DETAIL_CHARS = 1000
# What a hub holds by kind must not grow with what workers make up.
MAX_KINDS = 64


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


def check_kinds(kinds: Collection[Kind]) -> None:
    """Raise ValueError for more kinds than a hub takes."""
    if len(kinds) > MAX_KINDS:
        raise ValueError(f"`kinds` has at most {MAX_KINDS}, as many as a hub takes, got {len(kinds)}")


def sayable(detail: str) -> str:
    """A text for people as a message can carry it: not too long, and in Unicode, which names of files need not be."""
    detail = detail if len(detail) <= MAX_DETAIL_CHARS else detail[:MAX_DETAIL_CHARS] + "…"
    return detail.encode(errors="replace").decode()


def check_name(field: str, name: str) -> None:
    """Raise ValueError for a name that is empty or too long."""
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise ValueError(f"`{field}` must have 1 to {MAX_NAME_CHARS} characters, got {len(name)}")
