"""`prp`: Peer Rollout Pooling. Whole peer rollouts, retokenised, enter the batch next to the own ones.

    A over R^n u R^m;  loss = own clipped surrogate + weight * peer clipped surrogate

Source: Mutual Reinforcement Learning (arXiv 2605.07244), which says it in words; the formula is ours. What the ratio of a
peer row divides by is ambiguous there, and the two readings test different things:

* denominator = "behaviour": rho_s = exp(sum over span s of log pi_n - the peer's log-prob of the span), one surrogate term
  per span (agents/objectives/peer_surrogate.py). An importance correction.
* denominator = "receiver": the receiver's own log-probs at the start of the step. A trust region and no correction; with
  one inner iteration the ratio is 1 and the clip never acts.

Published results have unguarded pooling below training alone, so guards are always on: at most `max_peer_share` of a
group's rows are peers', subsampled without looking at rewards; peer rows have a denominator of their own and a weight of at
most 0.5. Advantages stay over the union of own and kept peer rows, with the receiver's own rewards on both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from agents.advantages import Advantages, batch_spread, group_advantages
from agents.config import Objective
from agents.rows import Row, Stream, own_rows
from agents.sharing.config import PRP
from agents.sharing.isolated import rewards_of
from agents.sharing.rollouts import PeerRow, judge, offers, receive
from agents.sharing.rule import Forgetful, PeerExperience, Peers, Receiver, Shared, newest_of_each_peer
from agents.types import Group
from exchange.types import Kind, PromptId, RolloutGroup


class PRPRule(Forgetful):
    """Needs its peers' whole rollouts."""

    kinds: frozenset[Kind] = frozenset({"rollouts"})
    window = 0
    latest_only = True
    max_age_s: float | None = None

    def __init__(self, config: PRP, objective: Objective, receiver: Receiver) -> None:
        self._config = config
        self._objective = objective
        self._receiver = receiver
        self.max_lag: int | None = config.max_lag

    def wants(self, groups: Sequence[Group]) -> Sequence[PromptId]:
        return [group.prompt.id for group in groups]

    async def share(self, groups: Sequence[Group], peers: Peers, *, step: int, steps: int, rng: np.random.Generator) -> Shared:
        counters: Counter[str] = Counter({"prp/peer_rows": 0, "prp/pooled_groups": 0})
        kept = [self._keep(group, peers.get(group.prompt.id, ()), rng) for group in groups]
        peer_rewards = await judge(groups, [[row.source for row in rows] for rows in kept], self._receiver)
        unions = [np.concatenate([rewards_of(group), theirs]) for group, theirs in zip(groups, peer_rewards, strict=True)]
        batch_std = batch_spread(unions)
        advantages = [group_advantages(union, self._objective, batch_std) for union in unions]
        own = [each[: len(group.completions)] for group, each in zip(groups, advantages, strict=True)]
        rows = own_rows(groups, own, self._objective)
        for group, rows_kept, each in zip(groups, kept, advantages, strict=True):
            rows += self._rows(group, rows_kept, each[len(group.completions) :])
            counters["prp/peer_rows"] += len(rows_kept)
            counters["prp/pooled_groups"] += bool(rows_kept)
        return Shared(rows=rows, counters=dict(counters))

    def _rows(self, group: Group, kept: Sequence[PeerRow], advantages: Advantages) -> list[Row]:
        return [
            Row(
                stream=Stream.PEER,
                prompt_ids=group.prompt_ids,
                ids=row.ids,
                advantage=float(advantage),
                weight=self._config.weight,
                spans=row.spans if self._config.denominator == "behaviour" else None,
            )
            for row, advantage in zip(kept, advantages, strict=True)
            if not np.isnan(advantage)
        ]

    def _keep(self, group: Group, experience: Sequence[PeerExperience], rng: np.random.Generator) -> list[PeerRow]:
        """Translate the newest group of each peer and keep a share of it, drawn without looking at rewards."""
        newest = newest_of_each_peer(experience, RolloutGroup)
        offered = [each for record in newest for each in offers(record)]
        most = self._most_peer_rows(group)
        order = [offered[int(chosen)] for chosen in rng.permutation(len(offered))]
        if self._objective.mask_truncated_completions:
            order = [each for each in order if each.trace.finished]
        kept: list[PeerRow] = []
        while order and len(kept) < most:
            drawn, order = order[: most - len(kept)], order[most - len(kept) :]
            kept += [row for row in receive(drawn, self._receiver) if row is not None]
        return kept

    def _most_peer_rows(self, group: Group) -> int:
        """How many peer rows may stand beside the own rows that enter the batch, so that they are `max_peer_share` of all."""
        present = ~np.isnan(rewards_of(group))
        if self._objective.mask_truncated_completions:
            present &= np.array([completion.finished for completion in group.completions])
        share = Fraction(self._config.max_peer_share).limit_denominator(1000)
        return int(int(present.sum()) * share / (1 - share))
