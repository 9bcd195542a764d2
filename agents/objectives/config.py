"""GRPO's options, under TRL's names."""

from __future__ import annotations

from typing import Literal

import msgspec

from agents.bounds import MANY, check_range


class Objective(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """GRPO under TRL's option names and with TRL's meaning (agents/objectives/grpo.py has the formulas).

    scale_rewards: True is "group" and False is "none". epsilon_high: None is `epsilon`; for `loss_type = "cispo"` the bound
    of the ratio itself, which must be given (5.0 in ScaleRL, arXiv 2510.13786). importance_sampling_correction: rows sampled
    by other weights or another engine than the learner's are weighted by min(pi_old / pi_sampler, C) per token,
    C = `importance_sampling_clip_max` (TRL's vllm_importance_sampling_* in its mode "token_truncate").
    sync_ref_model: every `ref_model_sync_steps` steps the reference becomes alpha * policy + (1 - alpha) * reference,
    alpha = `ref_model_mixup_alpha` (TR-DPO, arXiv 2404.09656).
    """

    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo"] = "dapo"
    scale_rewards: Literal["group", "batch", "none"] | bool = "group"
    baseline: Literal["group", "leave_one_out"] = "group"
    importance_sampling_level: Literal["token", "sequence"] = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    num_iterations: int = 1
    mask_truncated_completions: bool = False
    importance_sampling_correction: bool = True
    importance_sampling_clip_max: float = 2.0
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512

    def __post_init__(self) -> None:
        check_range(self, "epsilon", gt=0, lt=1)
        check_range(self, "epsilon_high", gt=0)
        check_range(self, "delta", gt=1)
        check_range(self, "beta", ge=0)
        check_range(self, "num_iterations", ge=1, le=1024)
        check_range(self, "importance_sampling_clip_max", ge=1)
        check_range(self, "ref_model_mixup_alpha", gt=0, le=1)
        check_range(self, "ref_model_sync_steps", ge=1, le=MANY)
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise ValueError(
                '`epsilon_high` must be set for loss_type="cispo", where it bounds the ratio itself, got epsilon_high=None; '
                "5.0 is a good value"
            )
        if self.sync_ref_model and not self.beta:
            raise ValueError("`sync_ref_model` needs a reference policy, which there is for beta > 0, got beta=0.0")

    @property
    def scaling(self) -> Literal["group", "batch", "none"]:
        """`scale_rewards` by name."""
        if self.scale_rewards is True:
            return "group"
        return self.scale_rewards or "none"

    @property
    def upper_epsilon(self) -> float:
        """The clip's upper side: `epsilon_high`, or `epsilon` where none is set."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high
