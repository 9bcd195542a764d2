"""Messages and blobs that are no good: all are counted, few are logged, so that whoever sends a million fills no disk."""

from __future__ import annotations

import logging
from collections import Counter

__all__ = ["BadMessages"]

_log = logging.getLogger(__name__)

# Of each peer so many are logged, then its 4th, 8th, 16th and so on.
LOGGED_FIRST = 3
# A stranger may come under ever new names: those beyond so many share one count.
PEERS = 256


class BadMessages:
    """What peers have sent in vain. what: for people, as in "message on the bulk lane"."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._counts: Counter[bytes] = Counter()
        self.count = 0

    def add(self, peer: bytes, error: Exception) -> None:
        """Count one; a few of each peer are logged. peer: empty when it is not known any more."""
        self.count += 1
        key = peer if peer in self._counts or len(self._counts) < PEERS else b""
        self._counts[key] += 1
        count = self._counts[key]
        if count <= LOGGED_FIRST or not count & (count - 1):
            whose = "of this peer" if key else "of all others"
            _log.warning("bad %s from peer %s (%d %s so far): %s", self._what, peer.hex(), count, whose, error)
