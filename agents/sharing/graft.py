"""`graft`: a group that failed throughout is replaced by a peer's group on the same prompt in which some succeeded.

    all R^n < tau  and  a peer with min R^m < tau <= max R^m:
        the own group leaves the batch; the peer's enters with its own advantages, A over R^m,
        and the weight 1[s > min_ratio] * min(s, 1) of agents/objectives/peer_sequence.py

The replacement, the weight and its bound of 0.8 are a published rule's for failed groups; the name is ours. A peer's mixed
group carries its failures too, so that it teaches a difference and not only a success.

Decided by us: rewards are the receiver's own; of several peers with a mixed group one is drawn uniformly; advantages are over
the whole peer group, also where the receiver cannot hold one of its rows; grafted rows have their own denominator. The
published order, peers' minibatches last, has no meaning here, where a step is one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agents.advantages import Rewards, batch_spread, group_advantages
from agents.config import Objective
from agents.rows import Row, Stream, own_rows
from agents.sharing.config import Graft
from agents.sharing.isolated import rewards_of
from agents.sharing.rollouts import Offered, judge, offers, receive
from agents.sharing.rule import Forgetful, Peers, Receiver, Shared, newest_of_each_peer
from agents.types import Group
from exchange.types import Kind, PromptId, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grafted:
    """A peer's mixed group in the place of an own one, judged by the receiver."""

    group: Group
    offered: Sequence[Offered]
    rewards: Rewards


class GraftRule(Forgetful):
    """Needs its peers' whole rollouts, on prompts where all own ones failed."""

    kinds: frozenset[Kind] = frozenset({"rollouts"})
    window = 0
    latest_only = True
    max_age_s: float | None = None

    def __init__(self, config: Graft, objective: Objective, receiver: Receiver) -> None:
        self._config = config
        self._objective = objective
        self._receiver = receiver
        self.max_lag: int | None = config.max_lag

    def wants(self, groups: Sequence[Group]) -> Sequence[PromptId]:
        return [group.prompt.id for group in groups if self._failed(group)]

    async def share(self, groups: Sequence[Group], peers: Peers, *, step: int, steps: int, rng: np.random.Generator) -> Shared:
        grafted = await self._grafted([group for group in groups if self._failed(group)], peers, rng)
        replaced = {each.group.prompt.id for each in grafted}
        kept = [group for group in groups if group.prompt.id not in replaced]
        batch_std = batch_spread([*map(rewards_of, kept), *(each.rewards for each in grafted)])
        advantages = [group_advantages(rewards_of(group), self._objective, batch_std) for group in kept]
        rows = own_rows(kept, advantages, self._objective)
        for each in grafted:
            rows += self._rows(each, batch_std)
        return Shared(
            rows=rows,
            counters={"graft/groups": len(grafted), "graft/rows": sum(row.stream is Stream.PEER for row in rows)},
        )

    def _failed(self, group: Group) -> bool:
        """Whether the group was judged and no own completion is a success."""
        rewards = rewards_of(group)
        return not np.isnan(rewards).all() and not bool((rewards >= self._config.threshold).any())

    async def _grafted(self, failed: Sequence[Group], peers: Peers, rng: np.random.Generator) -> list[_Grafted]:
        """At most one peer's group per failed own group, in their order."""
        offered = [
            (group, offers(record))
            for group in failed
            for record in newest_of_each_peer(peers.get(group.prompt.id, ()), RolloutGroup)
        ]
        judged = await judge([group for group, _ in offered], [each for _, each in offered], self._receiver)
        mixed: dict[PromptId, list[_Grafted]] = {}
        for (group, each), rewards in zip(offered, judged, strict=True):
            successes = rewards >= self._config.threshold
            if successes.any() and bool((rewards < self._config.threshold).any()):
                mixed.setdefault(group.prompt.id, []).append(_Grafted(group=group, offered=each, rewards=rewards))
        return [candidates[int(rng.integers(len(candidates)))] for candidates in mixed.values()]

    def _rows(self, grafted: _Grafted, batch_std: float) -> list[Row]:
        advantages = group_advantages(grafted.rewards, self._objective, batch_std)
        cut = self._objective.mask_truncated_completions
        wanted = [
            (each, float(advantage))
            for each, advantage in zip(grafted.offered, advantages, strict=True)
            if not np.isnan(advantage) and (each.trace.finished or not cut)
        ]
        received = receive([each for each, _ in wanted], self._receiver)
        return [
            Row(stream=Stream.PEER, prompt_ids=grafted.group.prompt_ids, ids=row.ids, advantage=advantage, spans=row.spans)
            for (_, advantage), row in zip(wanted, received, strict=True)
            if row is not None
        ]
