"""Where the named consumers of each worker stand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from exchange.messages import Commit, Refused, refused
from exchange.types import START, AgentName, Cursor

__all__ = ["ConsumerKey", "Consumers"]

MAX_CONSUMERS = 64

ConsumerKey = tuple[AgentName, str]


class Consumers:
    """Cursors of consumers, by worker and name. known: as an earlier hub of the run had them."""

    def __init__(self, known: Mapping[ConsumerKey, Cursor] | None = None) -> None:
        self._cursors: defaultdict[AgentName, dict[str, Cursor]] = defaultdict(dict)
        for (agent, name), cursor in (known or {}).items():
            self._cursors[agent][name] = cursor

    def of(self, key: ConsumerKey) -> Cursor:
        """Up to where a consumer is done; START for one that has never said so."""
        agent, name = key
        return self._cursors[agent].get(name, START) if agent in self._cursors else START

    def refusal(self, agent: AgentName, commit: Commit, newest: Cursor) -> Refused | None:
        """Why a worker may not say that its consumer is there; otherwise the consumer has a place from now on."""
        consumers = self._cursors[agent]
        if commit.cursor > newest:
            return refused("invalid", f"no record has this cursor yet, got cursor={commit.cursor}")
        if commit.consumer not in consumers and len(consumers) >= MAX_CONSUMERS:
            detail = f"a worker may have {MAX_CONSUMERS} named consumers, got one more: {commit.consumer!r}"
            return refused("too_many", detail)
        consumers.setdefault(commit.consumer, START)
        return None

    def tell(self, key: ConsumerKey, cursor: Cursor) -> Cursor:
        """Move a consumer forward; where it is then."""
        agent, name = key
        self._cursors[agent][name] = max(cursor, self.of(key))
        return self._cursors[agent][name]

    def lowest(self, alive: Callable[[AgentName], bool]) -> Cursor | None:
        """The lowest cursor of a worker that is alive, None without any."""
        cursors = (cursor for agent, each in self._cursors.items() if alive(agent) for cursor in each.values())
        return min(cursors, default=None)
