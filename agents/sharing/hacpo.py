"""`hacpo`: Heterogeneous Agent Collaborative Policy Optimization. Every peer rollout is learned from, by capability.

    P_i   = agent i's mean reward over its last `capability_window` batches
    mu_j  = mean over all agents i and their rewards r of (P_j / P_i) r
    A^j_i = (r_i - mu_j) / (std of all agents' rewards + eps)
    own rows (receiver k): A^k, by the agent's own objective
    rows of peer j:        (P_j / P_k) A^j, with the sequence ratio of agents/objectives/peer_sequence.py

Source: Zhang et al., arXiv 2603.02604. A stronger peer's rows count more and a weaker one's less, and the baseline of each
agent is in expectation its own success rate.

Deviations of ours: rewards are the receiver's own on all rows, and P is what it sees of them. P_i / P_j stays within
`max_capability_ratio`, for agents that hardly ever succeed. All rewards of a prompt equal: all its advantages are 0, as in
GRPO (the weighted means would differ from them). `scale_rewards` "batch" and "none" take the place of the joint std.
A prompt without peers' rollouts is GRPO's, `baseline` included.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from agents.advantages import Advantages, Rewards, batch_spread, group_advantages, mean, scaled, spread
from agents.config import Objective
from agents.rows import Row, Stream, own_rows
from agents.sharing.config import HACPO
from agents.sharing.isolated import rewards_of
from agents.sharing.rollouts import Offered, judge, offers, receive
from agents.sharing.rule import Forgetful, Peers, Receiver, Shared, Waiting, newest_of_each_peer
from agents.types import Group
from exchange.types import AgentName, Kind, PromptId, RolloutGroup

RECEIVER = AgentName("")
"""Stands for the receiver itself among the agents; no worker of an exchange has an empty name."""


class Capabilities:
    """P of each agent: its mean reward, negative ones counted as 0, over its last batches."""

    def __init__(self, *, window: int, max_ratio: float) -> None:
        self._batches: defaultdict[AgentName, deque[tuple[float, int]]] = defaultdict(lambda: deque(maxlen=window))
        self._max_ratio = max_ratio

    def note(self, agent: AgentName, rewards: Rewards) -> None:
        """One batch of an agent's rewards; none that is present is no batch."""
        present = rewards[~np.isnan(rewards)].astype(np.float64)
        if len(present):
            self._batches[agent].append((float(np.maximum(present, 0.0).sum()), len(present)))

    def state(self) -> dict[AgentName, list[tuple[float, int]]]:
        """Sum and count of each agent's last batches."""
        return {agent: list(batches) for agent, batches in self._batches.items()}

    def restore(self, state: Mapping[AgentName, list[tuple[float, int]]]) -> None:
        """Go on from what `state` gave."""
        for agent, batches in state.items():
            self._batches[agent].extend(batches)

    def of(self, agent: AgentName) -> float:
        """P, 0 for an agent without a batch."""
        batches = self._batches[agent]
        return sum(total for total, _ in batches) / max(sum(count for _, count in batches), 1)

    def ratio(self, one: AgentName, other: AgentName) -> float:
        """P_one / P_other within 1 / max_ratio .. max_ratio; 1 between equal ones, also where neither succeeds."""
        one_p, other_p = self.of(one), self.of(other)
        if one_p == other_p:
            return 1.0
        ratio = one_p / other_p if other_p > 0 else np.inf
        return float(np.clip(ratio, 1 / self._max_ratio, self._max_ratio))


def joint_advantages(
    rewards: Mapping[AgentName, Rewards], capabilities: Capabilities, objective: Objective, batch_std: float
) -> dict[AgentName, Advantages]:
    """A^j [G_j] of every agent's rewards on one prompt, before the factor P_j / P_k; NaN where the reward is."""
    union = np.concatenate(list(rewards.values()))
    std = spread(union)
    advantages: dict[AgentName, Advantages] = {}
    for agent, own in rewards.items():
        weighted = [capabilities.ratio(agent, other) * theirs.astype(np.float64) for other, theirs in rewards.items()]
        differences = own.astype(np.float64) - mean(np.concatenate(weighted))
        advantages[agent] = scaled(differences if std else differences * 0.0, std, objective, batch_std)
    return advantages


class HACPORule(Forgetful):
    """Needs its peers' whole rollouts."""

    kinds: frozenset[Kind] = frozenset({"rollouts"})
    window = 0
    latest_only = True
    max_age_s: float | None = None

    def __init__(self, config: HACPO, objective: Objective, receiver: Receiver) -> None:
        self._objective = objective
        self._receiver = receiver
        self._capabilities = Capabilities(window=config.capability_window, max_ratio=config.max_capability_ratio)
        self.max_lag: int | None = config.max_lag

    def memory(self) -> object:
        return self._capabilities.state()

    def recall(self, memory: object, waiting: Mapping[PromptId, Waiting]) -> None:
        self._capabilities.restore(msgspec.convert(memory, dict[AgentName, list[tuple[float, int]]]))

    def wants(self, groups: Sequence[Group]) -> Sequence[PromptId]:
        return [group.prompt.id for group in groups]

    async def share(self, groups: Sequence[Group], peers: Peers, *, step: int, steps: int, rng: np.random.Generator) -> Shared:
        newest = [newest_of_each_peer(peers.get(group.prompt.id, ()), RolloutGroup) for group in groups]
        offered = [[each for record in records for each in offers(record)] for records in newest]
        judged = await judge(groups, offered, self._receiver)
        batch_std = batch_spread([*map(rewards_of, groups), *judged])
        self._note(groups, offered, judged)
        own: list[Advantages] = []
        cross: list[Advantages] = []
        for group, theirs, rewards in zip(groups, offered, judged, strict=True):
            mine, others = self._advantages(rewards_of(group), theirs, rewards, batch_std)
            own.append(mine)
            cross.append(others)
        rows = own_rows(groups, own, self._objective)
        peer_rows = self._peer_rows(groups, offered, cross)
        counters = Counter({"hacpo/peer_rows": len(peer_rows), "hacpo/pooled_groups": sum(map(bool, offered))})
        metrics: dict[str, float] = dict(counters)
        for agent in sorted({each.record.agent for theirs in offered for each in theirs}):
            metrics[f"peer/{agent}/capability"] = self._capabilities.ratio(agent, RECEIVER)
        return Shared(rows=[*rows, *peer_rows], counters=metrics)

    def _note(self, groups: Sequence[Group], offered: Sequence[Sequence[Offered]], judged: Sequence[Rewards]) -> None:
        """Take this step's rewards into every agent's P."""
        if groups:
            self._capabilities.note(RECEIVER, np.concatenate([rewards_of(group) for group in groups]))
        batches: defaultdict[AgentName, list[float]] = defaultdict(list)
        for theirs, rewards in zip(offered, judged, strict=True):
            for each, reward in zip(theirs, rewards.tolist(), strict=True):
                batches[each.record.agent].append(reward)
        for agent, batch in batches.items():
            self._capabilities.note(agent, np.array(batch, dtype=np.float32))

    def _advantages(
        self, own: Rewards, offered: Sequence[Offered], rewards: npt.NDArray[np.float32], batch_std: float
    ) -> tuple[Advantages, Advantages]:
        """Advantages of the own rows and, in the order of the offers, of the peers'."""
        authors = np.array([each.record.agent for each in offered], dtype=object)
        if np.isnan(rewards).all():
            return group_advantages(own, self._objective, batch_std), np.full(len(offered), np.nan)
        by_agent = {RECEIVER: own} | {agent: rewards[authors == agent] for agent in sorted(set(authors.tolist()))}
        joint = joint_advantages(by_agent, self._capabilities, self._objective, batch_std)
        cross = np.empty(len(offered), dtype=np.float64)
        for agent in by_agent.keys() - {RECEIVER}:
            cross[authors == agent] = self._capabilities.ratio(agent, RECEIVER) * joint[agent]
        return joint[RECEIVER], cross

    def _peer_rows(
        self, groups: Sequence[Group], offered: Sequence[Sequence[Offered]], advantages: Sequence[Advantages]
    ) -> list[Row]:
        """Rows of those offers that have an advantage and that the receiver can hold."""
        wanted = [
            (each, group, float(advantage))
            for group, theirs, values in zip(groups, offered, advantages, strict=True)
            for each, advantage in zip(theirs, values, strict=True)
            if not np.isnan(advantage) and (each.trace.finished or not self._objective.mask_truncated_completions)
        ]
        received = receive([each for each, _, _ in wanted], self._receiver)
        return [
            Row(stream=Stream.PEER, prompt_ids=group.prompt_ids, ids=row.ids, advantage=advantage, spans=row.spans)
            for (_, group, advantage), row in zip(wanted, received, strict=True)
            if row is not None
        ]
