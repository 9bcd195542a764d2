"""Messages that cannot be read: all are counted, few are logged, so that whoever sends a million of them fills no disk."""

from __future__ import annotations

import logging
from collections import Counter

from exchange.errors import WireError

__all__ = ["BadMessages"]

_log = logging.getLogger(__name__)

# Of each peer so many are logged, then its 4th, 8th, 16th and so on.
LOGGED_FIRST = 3
# A stranger may come under ever new names: those beyond so many share one count.
PEERS = 256


class BadMessages:
    """What came to one socket and could not be read. where: for people, as in "on the bulk lane"."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._counts: Counter[bytes] = Counter()
        self.count = 0

    def add(self, peer: bytes, error: WireError) -> None:
        """Count one; a few of each peer are logged."""
        self.count += 1
        key = peer if peer in self._counts or len(self._counts) < PEERS else b""
        self._counts[key] += 1
        count = self._counts[key]
        if count <= LOGGED_FIRST or not count & (count - 1):
            who = f"peer {peer.hex()}" if key else f"one of many strangers, {peer.hex()}"
            _log.warning("bad message %s from %s (%d so far): %s", self._where, who, count, error)
