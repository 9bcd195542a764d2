"""How often an agent meets its peers: the share of own prompts for which a peer's row was at hand while it was of use."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

import msgspec

from exchange.types import AgentName, PromptId


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """A step's prompts that each peer has not met yet."""

    step: int
    missing: dict[AgentName, set[PromptId]]

    def copy(self) -> Drawn:
        return Drawn(step=self.step, missing={peer: set(prompts) for peer, prompts in self.missing.items()})


class HitCounter:
    """Counts, per peer, prompts that were met (hits) or whose window closed unmet (misses)."""

    def __init__(self, peers: Iterable[AgentName], *, window: int) -> None:
        self._peers = tuple(peers)
        self._window = window
        self._drawn: deque[Drawn] = deque()
        self._hits = dict.fromkeys(self._peers, 0)
        self._resolved = dict.fromkeys(self._peers, 0)

    def state(self) -> tuple[Drawn, ...]:
        """What waits for its fate; what `take` would give is no part of it."""
        return tuple(drawn.copy() for drawn in self._drawn)

    def restore(self, state: Iterable[Drawn]) -> None:
        """Go on from what `state` gave."""
        self._drawn = deque(drawn.copy() for drawn in state)

    def draw(self, step: int, prompts: Collection[PromptId]) -> None:
        """These prompts were sampled at `step`."""
        self._drawn.append(Drawn(step=step, missing={peer: set(prompts) for peer in self._peers}))

    def meet(self, peer: AgentName, at_hand: Collection[PromptId]) -> None:
        """Rows of `peer` on these prompts are at hand now."""
        for drawn in self._drawn:
            met = drawn.missing[peer] & set(at_hand)
            drawn.missing[peer] -= met
            self._hits[peer] += len(met)
            self._resolved[peer] += len(met)

    def close(self, step: int | None = None) -> None:
        """Count as missed what was drawn `window` steps before `step` or earlier; everything when `step` is None."""
        while self._drawn and (step is None or step - self._drawn[0].step >= self._window):
            for peer, missing in self._drawn.popleft().missing.items():
                self._resolved[peer] += len(missing)

    def take(self) -> dict[str, float]:
        """Metrics since the last call: `peer/<id>/hit_rate` over `peer/<id>/prompts` prompts whose fate is known."""
        metrics: dict[str, float] = {}
        for peer in self._peers:
            if self._resolved[peer]:
                metrics[f"peer/{peer}/hit_rate"] = self._hits[peer] / self._resolved[peer]
                metrics[f"peer/{peer}/prompts"] = float(self._resolved[peer])
            self._hits[peer] = self._resolved[peer] = 0
        return metrics
