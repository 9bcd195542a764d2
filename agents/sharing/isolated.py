"""`isolated`: GRPO on the agent's own rollouts, the control that every sharing rule is held against."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agents.advantages import Advantages, batch_spread, group_advantages
from agents.config import Objective
from agents.rows import own_rows
from agents.sharing.config import Isolated
from agents.sharing.rule import Forgetful, Peers, Receiver, Shared
from agents.types import Group
from exchange.types import Kind, PromptId


def rewards_of(group: Group) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The rewards [G] of a scored group."""
    if group.rewards is None:
        raise ValueError(f"a group must be scored before it is shared, got rewards=None on prompt {group.prompt.id}")
    return group.rewards


def own_advantages(groups: Sequence[Group], objective: Objective) -> list[Advantages]:
    """GRPO advantages of each group against its own rewards."""
    batch_std = batch_spread([rewards_of(group) for group in groups])
    return [group_advantages(rewards_of(group), objective, batch_std) for group in groups]


class IsolatedRule(Forgetful):
    """Nothing is asked of peers and nothing of theirs is used."""

    kinds: frozenset[Kind] = frozenset()
    window = 0
    latest_only = True
    max_lag: int | None = None
    max_age_s: float | None = None

    def __init__(self, config: Isolated, objective: Objective, receiver: Receiver) -> None:
        self._objective = objective

    def wants(self, groups: Sequence[Group]) -> Sequence[PromptId]:
        return ()

    async def share(self, groups: Sequence[Group], peers: Peers, *, step: int, steps: int, rng: np.random.Generator) -> Shared:
        return Shared(rows=own_rows(groups, own_advantages(groups, self._objective), self._objective))
