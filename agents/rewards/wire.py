"""What an agent and the process of a sandboxed reward say to each other: length-prefixed msgpack over two pipes.

agent    Limits ──────────────> worker     once, at its start
         Described | Broken <──            the function is there, or why not
         Call ────────────────>            for every call
         Judged | Broken <─────
"""

from __future__ import annotations

import struct

import msgspec

LENGTH = struct.Struct("<Q")

MOST_BYTES = 2**30
"""Of one message; a longer one is refused by who would read it."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Agent to worker, first. reference: name or import string of the function. timeout_s: CPU time of one call."""

    reference: str
    timeout_s: float
    memory_bytes: int


class Described(msgspec.Struct, frozen=True, kw_only=True, tag="described"):
    """Worker to agent: the function was found; the fields are those of its Signature."""

    name: str
    named: list[str]
    takes_any: bool
    requires: list[str]
    by_row: bool
    digest: str


class Judged(msgspec.Struct, frozen=True, kw_only=True, tag="judged"):
    """Worker to agent: one verdict for each completion, text being the reason why there is none; and the journal."""

    verdicts: list[float | str | None]
    extra: dict[str, list[object]]
    metrics: dict[str, list[float]]


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag="broken"):
    """Worker to agent: nothing can be told but why."""

    reason: str


Answer = Described | Judged | Broken


def encode(message: object) -> bytes:
    """The message with its length in front. TypeError, ValueError or OverflowError where a value has no msgpack form."""
    payload = msgspec.msgpack.encode(message, enc_hook=_plain)
    return LENGTH.pack(len(payload)) + payload


def _plain(value: object) -> object:
    if hasattr(value, "tolist"):  # arrays and numbers of numpy and torch
        return value.tolist()
    if isinstance(value, str):
        return str(value)
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be sent to a reward's own process")
