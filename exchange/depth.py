"""Nesting check of foreign msgpack bytes before any decoder sees them.

A decoder recurses into containers, also into those of fields that it skips: 5,000 levels raise RecursionError, and on a
thread with a small stack they kill the process.
"""

from __future__ import annotations

from exchange.errors import WireError

__all__ = ["MAX_DEPTH", "check_depth"]

MAX_DEPTH = 32

_OPENERS = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])
# Bytes that follow a type byte, for types of fixed size; and width of the length field, for those of stated length.
_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8} | {
    0xD4 + k: 1 + (1 << k) for k in range(5)
}
_STATED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXT_STATED = range(0xC7, 0xCA)
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def check_depth(data: bytes, limit: int = MAX_DEPTH) -> None:
    """Raise WireError when `data` nests containers deeper than `limit`; other faults are left to the decoder."""
    if len(data) - len(data.translate(None, _OPENERS)) <= limit:
        return
    remaining = [1]
    position = 0
    while remaining:
        if remaining[-1] == 0:
            remaining.pop()
            continue
        if position >= len(data):
            return
        remaining[-1] -= 1
        items, position = _step(data, position)
        if items:
            if len(remaining) > limit:
                raise WireError(f"containers must nest at most {limit} deep, got more at byte {position}")
            remaining.append(items)


def _step(data: bytes, position: int) -> tuple[int, int]:
    """Read one type byte: (items that it opens, position behind it)."""
    byte = data[position]
    position += 1
    if 0x80 <= byte <= 0x8F:
        return 2 * (byte & 0x0F), position
    if 0x90 <= byte <= 0x9F:
        return byte & 0x0F, position
    if 0xA0 <= byte <= 0xBF:
        return 0, position + (byte & 0x1F)
    if byte in _CONTAINERS:
        width, per_entry = _CONTAINERS[byte]
        return per_entry * int.from_bytes(data[position : position + width], "big"), position + width
    if byte in _STATED:
        width = _STATED[byte]
        length = int.from_bytes(data[position : position + width], "big") + (byte in _EXT_STATED)
        return 0, position + width + length
    return 0, position + _FIXED.get(byte, 0)
