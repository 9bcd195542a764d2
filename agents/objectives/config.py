"""GRPO's options, under TRL's names."""

from __future__ import annotations

from typing import Literal

import msgspec

from agents.bounds import check_range


class Objective(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """GRPO under TRL's option names and with TRL's meaning (agents/objectives/grpo.py has the formulas)."""

    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo"] = "dapo"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    baseline: Literal["group", "leave_one_out"] = "group"
    importance_sampling_level: Literal["token", "sequence"] = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    num_iterations: int = 1
    mask_truncated_completions: bool = False

    def __post_init__(self) -> None:
        check_range(self, "epsilon", gt=0, lt=1)
        check_range(self, "epsilon_high", gt=0)
        check_range(self, "delta", gt=1)
        check_range(self, "beta", ge=0)
        check_range(self, "num_iterations", ge=1, le=1024)

    @property
    def upper_epsilon(self) -> float:
        """The clip's upper side: `epsilon_high`, or `epsilon` where none is set."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high
