"""Advantages from rewards, in float64, without torch.

Shape legend: G rewards of one group. A reward of NaN means that every reward function abstained: such a completion has no
advantage and no part in any baseline.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agents.config import Objective

Rewards = npt.NDArray[np.float32]
Advantages = npt.NDArray[np.float64]

EPSILON = 1e-4
"""Added to a standard deviation before dividing by it, as in TRL."""


def spread(rewards: npt.NDArray[np.floating]) -> float:
    """Standard deviation with ddof 1; exactly 0 for equal or fewer than two rewards, whatever their rounding."""
    present = np.asarray(rewards, dtype=np.float64)
    present = present[~np.isnan(present)]
    if len(present) < 2 or present.max() == present.min():
        return 0.0
    return float(present.std(ddof=1))


def mean(rewards: npt.NDArray[np.floating]) -> float:
    """Mean of the rewards that are present; exactly their value when all are equal; NaN when there is none."""
    present = np.asarray(rewards, dtype=np.float64)
    present = present[~np.isnan(present)]
    if not len(present):
        return float("nan")
    low = float(present.min())
    # The mean of equal floats may differ from them in the last bit, which a division by EPSILON would blow up.
    return low if low == present.max() else float(present.mean())


def scaled(differences: Advantages, std: float, objective: Objective, batch_std: float) -> Advantages:
    """Divide reward differences as `scale_rewards` says: by the group's std, by the batch's, or not at all."""
    match objective.scaling:
        case "group":
            return differences / (std + EPSILON)
        case "batch":
            return differences / (batch_std + EPSILON)
        case "none":
            return differences


def group_advantages(rewards: Rewards, objective: Objective, batch_std: float) -> Advantages:
    """GRPO: A_i = (r_i - mean R) / (std R + eps), ddof 1 (Shao et al., arXiv 2402.03300, outcome supervision; std as in TRL).

    baseline = "leave_one_out" takes the mean of the other rewards instead (RLOO, Ahmadian et al., arXiv 2402.14740).
    Returns float64 [G], NaN where the reward is; exactly 0 for a group of equal rewards and for a lone reward.
    """
    values = rewards.astype(np.float64)
    differences = values - mean(rewards)
    if objective.baseline == "leave_one_out":
        present = int((~np.isnan(values)).sum())
        differences = differences * (present / (present - 1)) if present > 1 else differences * 0.0
    return scaled(differences, spread(rewards), objective, batch_std)


def batch_spread(groups: Sequence[Rewards]) -> float:
    """Standard deviation over all rewards of a step, for `scale_rewards = "batch"`."""
    return spread(np.concatenate(groups)) if groups else 0.0
