"""What one agent is made of, as frozen structs: policy, sampling, objective, sharing rule, warm start.

Nothing here imports torch, so that the command line can read, check and print a config at once. Field names follow TRL
where TRL has the thing. Defaults are the method's recommended setting.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from agents.bounds import LONG_S, MANY, check_range
from agents.objectives.config import Objective
from agents.policies.config import HFPolicy, LoRA, PolicyConfig, TinyPolicy
from agents.rewards.config import SandboxedReward
from agents.samplers.config import InProcess, SamplerConfig, Sampling
from agents.sharing.config import SGT, SharingConfig
from agents.tasks.config import TaskConfig

__all__ = [
    "AgentConfig",
    "HFPolicy",
    "LoRA",
    "Objective",
    "PolicyConfig",
    "Sampling",
    "SandboxedReward",
    "TaskConfig",
    "TinyPolicy",
    "TranslationConfig",
    "WarmStart",
]


_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu|hpu|npu|mlu|musa)(:[0-9]{1,3})?")


class WarmStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervised steps before RL: `mix` gives each task's share of the training rows (shares are normalised)."""

    steps: int = 0
    mix: dict[str, float] = {}
    learning_rate: float = 2e-3
    batch_size: int = 48

    def __post_init__(self) -> None:
        check_range(self, "steps", ge=0, le=MANY)
        check_range(self, "learning_rate", gt=0)
        check_range(self, "batch_size", ge=1, le=MANY)
        if self.steps and not self.mix:
            raise ValueError(f"`mix` must name at least one task when steps > 0, got steps={self.steps}, mix={{}}")
        for task, share in self.mix.items():
            if not share > 0:
                raise ValueError(f"`mix.{task}` must be > 0, got {share!r}")


class TranslationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a peer's text may lose in the own tokenizer before it is refused; None for no limit.

    max_lost_bytes: bytes of a text for which the vocabulary has no token. max_changed_bytes: bytes that the tokenizer's
    normaliser rewrites. max_struct: share of own tokens that are cut otherwise than the peer's, 0 to 1.
    checked_share: share of the own completions on which tokens that differ from the text's own encoding are counted.
    """

    max_lost_bytes: int | None = 0
    max_changed_bytes: int | None = None
    max_struct: float | None = None
    checked_share: float = 0.01

    def __post_init__(self) -> None:
        check_range(self, "max_lost_bytes", "max_changed_bytes", ge=0, le=MANY)
        check_range(self, "max_struct", "checked_share", ge=0, le=1)


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One agent. `[defaults]` in a run file sets any of these for all agents; `[agents.NAME]` wins over it.

    prompts_per_step: P, prompts drawn each step. num_generations: G, completions per prompt.
    rewards: built-in names, import strings, or tables of functions in a process of their own. reward_error: a function that
    fails ends the run, or abstains from the completions in question.
    micro_batch_size: rows per forward pass; any split gives the same update, but for rounding.
    num_processes: that train the policy together on this machine, each with a part of its weights and of the optimizer's state
    (FSDP). They take as many devices of the kind, from `device` on.
    device: "auto" (cuda when there is one, else cpu), "cpu", "cuda", "cuda:1", "mps", "xpu" … threads: CPU threads of torch.
    skills: the tasks that this agent masters from the start; reports set them apart from its peers' tasks.
    min_step_s: a step takes at least this long; for studying unequal speeds.
    max_staleness: how many versions older than the learner's the weights may be that sampled what it trains on; so many
    batches are sampled ahead. staleness: which of them is trained on next, and what becomes of one that is too old
    (agents/ahead.py).
    dynamic_sampling_rounds: how many times, at most, further prompts are sampled while fewer than P groups have unequal
    rewards; groups of equal ones then count in no denominator (agents/dynamic_sampling.py). 0: off.
    """

    policy: PolicyConfig
    sharing: SharingConfig = SGT()
    objective: Objective = Objective()
    sampling: Sampling = Sampling()
    sampler: SamplerConfig = InProcess()
    translation: TranslationConfig = TranslationConfig()
    warm_start: WarmStart = WarmStart()
    rewards: tuple[str | SandboxedReward, ...] = ("exact_match",)
    reward_weights: tuple[float, ...] | None = None
    reward_error: Literal["raise", "abstain"] = "raise"
    skills: tuple[str, ...] = ()
    prompts_per_step: int = 16
    num_generations: int = 8
    micro_batch_size: int = 256
    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    num_processes: int = 1
    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: int = 1
    min_step_s: float = 0.0
    max_staleness: int = 0
    staleness: Literal["wait", "drop", "withhold"] = "wait"
    dynamic_sampling_rounds: int = 0

    def __post_init__(self) -> None:
        check_range(self, "prompts_per_step", "micro_batch_size", ge=1, le=MANY)
        check_range(self, "threads", ge=1, le=4096)
        check_range(self, "num_processes", ge=1, le=1024)
        check_range(self, "num_generations", ge=2, le=2**20)
        check_range(self, "learning_rate", "max_grad_norm", gt=0)
        check_range(self, "weight_decay", ge=0)
        check_range(self, "min_step_s", ge=0, le=LONG_S)
        check_range(self, "max_staleness", "dynamic_sampling_rounds", ge=0, le=1024)
        self._check_dynamic_sampling()
        if not _DEVICE.fullmatch(self.device):
            raise ValueError(f"`device` must be auto, cpu, mps, cuda or cuda:N (or xpu …), got device={self.device!r}")
        if isinstance(self.policy, HFPolicy) and self.policy.device_map is not None and self.device != "auto":
            raise ValueError(f'`device` must stay "auto" beside `policy.device_map`, got device={self.device!r}')
        if isinstance(self.policy, HFPolicy) and self.policy.device_map is not None and self.num_processes > 1:
            raise ValueError(
                f"`num_processes` must stay 1 beside `policy.device_map`, got num_processes={self.num_processes}: the one lays "
                "whole layers on several devices, the other a part of every layer on each"
            )
        if not self.rewards:
            raise ValueError("`rewards` must name at least one reward function, got rewards=()")
        if self.reward_weights is not None and len(self.reward_weights) != len(self.rewards):
            raise ValueError(
                f"`reward_weights` must have one weight per reward, got {len(self.reward_weights)} weights for "
                f"{len(self.rewards)} rewards"
            )

    def _check_dynamic_sampling(self) -> None:
        rounds = f"got dynamic_sampling_rounds={self.dynamic_sampling_rounds}"
        if self.dynamic_sampling_rounds and self.max_staleness:
            raise ValueError(
                f"`dynamic_sampling_rounds` must stay 0 with samples ahead, {rounds}, max_staleness={self.max_staleness}: "
                "whether a batch needs more prompts is known once it is judged; set one of the two to 0"
            )
        if self.dynamic_sampling_rounds and self.objective.scaling == "batch":
            raise ValueError(
                f'`dynamic_sampling_rounds` must stay 0 beside objective.scale_rewards="batch", {rounds}: the batch\'s spread '
                'would count the groups that are left out; set scale_rewards = "group" or "none"'
            )
