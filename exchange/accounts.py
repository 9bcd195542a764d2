"""The account of requests between workers: who asked whom for what, and what came of it."""

from __future__ import annotations

from collections import Counter, defaultdict

from exchange.stats import AskerStats, PairStats, PairTally
from exchange.types import AgentName

__all__ = ["Accounts"]

# Kinds that are counted apart, as workers choose them.
MAX_KINDS = 64
OTHER_KINDS = "…"


class Accounts:
    """Counts by asker, server and kind; kinds beyond 64 together. late_replies: answers whose request was over."""

    def __init__(self) -> None:
        self._pairs: defaultdict[tuple[AgentName, AgentName, str], PairTally] = defaultdict(PairTally)
        self._refused: defaultdict[AgentName, Counter[str]] = defaultdict(Counter)
        self._duplicates: Counter[AgentName] = Counter()
        self._kinds: set[str] = set()
        self.late_replies = 0

    def _pair(self, asker: AgentName, server: AgentName, kind: str) -> PairTally:
        if len(self._kinds) < MAX_KINDS:
            self._kinds.add(kind)
        return self._pairs[asker, server, kind if kind in self._kinds else OTHER_KINDS]

    def refuse(self, asker: AgentName, reason: str) -> None:
        self._refused[asker][reason] += 1

    def duplicate(self, asker: AgentName) -> None:
        self._duplicates[asker] += 1

    def ask(self, asker: AgentName, server: AgentName, kind: str, nbytes: int, tokens: int) -> None:
        pair = self._pair(asker, server, kind)
        pair.asked += 1
        pair.asked_bytes += nbytes
        pair.asked_tokens += tokens

    def answer(self, asker: AgentName, server: AgentName, kind: str, nbytes: int, tokens: int) -> None:
        pair = self._pair(asker, server, kind)
        pair.answered += 1
        pair.served_bytes += nbytes
        pair.served_tokens += tokens

    def end(self, asker: AgentName, server: AgentName, kind: str, reason: str) -> None:
        self._pair(asker, server, kind).unanswered[reason] += 1

    def stats(self) -> dict[AgentName, AskerStats]:
        pairs: defaultdict[AgentName, defaultdict[AgentName, dict[str, PairStats]]] = defaultdict(lambda: defaultdict(dict))
        for (asker, server, kind), tally in self._pairs.items():
            pairs[asker][server][kind] = PairStats(
                asked=tally.asked,
                answered=tally.answered,
                unanswered=dict(tally.unanswered),
                asked_bytes=tally.asked_bytes,
                served_bytes=tally.served_bytes,
                asked_tokens=tally.asked_tokens,
                served_tokens=tally.served_tokens,
            )
        return {
            asker: AskerStats(pairs=dict(pairs[asker]), refused=dict(self._refused[asker]), duplicates=self._duplicates[asker])
            for asker in {*pairs, *self._refused, *self._duplicates}
        }
