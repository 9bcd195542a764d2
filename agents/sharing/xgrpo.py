"""`xgrpo`: Cross-Policy GRPO Advantage Sharing. Peers' rewards enter the baseline; their rollouts do not enter the batch.

    b   = (1 - a) mean R^n + a mean R^m
    A_i = (r_i - b) / (std + eps)          for own i

Source: Mutual Reinforcement Learning (arXiv 2605.07244), which says it in words; the formula is our reading. a is the
peers' share, by default G_m / (G_n + G_m), which makes b the union's mean. std is the union's or the own group's.

`scale_rewards = "batch"` divides by the spread of all own rewards of the step instead, whatever `std` says. Where peer
rewards are present the shared baseline takes the place of `baseline = "leave_one_out"`.

Deviations of ours: rewards are pooled only between equal reward fingerprints; the newest group of each peer counts; with
std = "own" a group of equal own rewards has advantage 0 (the formula would divide by eps alone).

Degenerate case, counted as `xgrpo/all_fail_peer_success`: all own rewards are equal and a peer has a better one. Every own
row then has the same negative advantage, a push away from what was sampled whose expected direction vanishes with the own
success rate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agents.advantages import Advantages, Rewards, batch_spread, group_advantages, mean, scaled, spread
from agents.config import Objective
from agents.rows import own_rows
from agents.sharing.config import XGRPO
from agents.sharing.isolated import rewards_of
from agents.sharing.rule import Forgetful, PeerExperience, Peers, Receiver, Shared, newest_of_each_peer
from agents.types import Group
from exchange.types import GroupRewards, Kind, PromptId


def shared_baseline_advantages(
    own: Rewards, peers: npt.NDArray[np.float32], config: XGRPO, objective: Objective, batch_std: float
) -> Advantages:
    """Advantages [G_n] of the own rewards against a baseline that peer rewards [G_m] share in.

    No present peer reward gives `group_advantages` of the own rewards, bit for bit.
    """
    peers = peers[~np.isnan(peers)]
    if not len(peers) or np.isnan(own).all():
        return group_advantages(own, objective, batch_std)
    union = np.concatenate([own, peers])
    own_count = int((~np.isnan(own)).sum())
    share = len(peers) / (own_count + len(peers)) if config.peer_share is None else config.peer_share
    baseline = mean(union) if config.peer_share is None else (1 - share) * mean(own) + share * mean(peers)
    std = spread(union) if config.std == "union" else spread(own)
    differences = own.astype(np.float64) - baseline
    if spread(union) == 0.0 or (std == 0.0 and objective.scaling == "group"):
        differences = differences * 0.0
    return scaled(differences, std, objective, batch_std)


class XGRPORule(Forgetful):
    """Needs only rewards of its peers."""

    kinds: frozenset[Kind] = frozenset({"rewards"})
    window = 0
    latest_only = True
    max_age_s: float | None = None

    def __init__(self, config: XGRPO, objective: Objective, receiver: Receiver) -> None:
        self._config = config
        self._objective = objective
        self._receiver = receiver
        self.max_lag: int | None = config.max_lag

    def wants(self, groups: Sequence[Group]) -> Sequence[PromptId]:
        return [group.prompt.id for group in groups]

    def _poolable(self, experience: Sequence[PeerExperience]) -> list[Rewards]:
        """The newest rewards of each peer that judges as the receiver does."""
        mine = self._receiver.reward_fingerprint
        alike = [record for record in experience if isinstance(record, GroupRewards) and record.reward_fingerprint == mine]
        return [record.rewards for record in newest_of_each_peer(alike, GroupRewards)]

    async def share(self, groups: Sequence[Group], peers: Peers, *, step: int, steps: int, rng: np.random.Generator) -> Shared:
        batch_std = batch_spread([rewards_of(group) for group in groups])
        advantages: list[Advantages] = []
        pooled = degenerate = 0
        for group in groups:
            own = rewards_of(group)
            records = self._poolable(peers.get(group.prompt.id, ()))
            peer_rewards = np.concatenate(records) if records else np.empty(0, dtype=np.float32)
            advantages.append(shared_baseline_advantages(own, peer_rewards, self._config, self._objective, batch_std))
            pooled += bool(records)
            degenerate += spread(own) == 0.0 and bool((peer_rewards > mean(own)).any())
        return Shared(
            rows=own_rows(groups, advantages, self._objective),
            counters={"xgrpo/pooled_groups": pooled, "xgrpo/all_fail_peer_success": degenerate},
        )
