"""What an agent is given: what the run says about its loop, and the parts that it works with."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agents.callbacks import Callback
from agents.evaluate import Draws
from agents.learner import Learner
from agents.learner_group import LearnerGroup
from agents.policies.policy import Policy
from agents.publish import Producer
from agents.receiver import PeerReceiver
from agents.rewards.rewards import Rewards
from agents.samplers.sampler import Sampler
from agents.seam import Seam
from agents.sharing.rule import SharingRule
from agents.sink import JsonlSink
from agents.state import AgentState
from agents.tasks.load import TaskData
from exchange.types import AgentName, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What a run says about the loop of each of its agents. seams: where it was taken up again."""

    seed: int
    steps: int
    mode: Literal["async", "lockstep"]
    schedule: Literal["seed", "follow"]
    evaluate_every: int
    evaluation_batch_size: int
    num_samples: int
    pass_k: Sequence[int]
    success_threshold: float
    save_steps: int
    dump_every: int
    step_timeout_s: float
    seams: Sequence[Seam] = ()

    def draws(self, agent: AgentName, *, step: int, version: Version) -> Draws | None:
        """What an evaluation behind `step` steps samples; None: nothing. No draw is one of training's."""
        if not self.num_samples:
            return None
        seed = zlib.crc32(f"{self.seed}/{agent}/evaluation/{step}".encode())
        return Draws(num_samples=self.num_samples, pass_k=self.pass_k, version=version, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that an agent works with, made by whoever knows the config.

    resume: where to go on, with policy and learner in that state already. on_saved: told, on the torch thread, of every part
    of a checkpoint that was saved, by the number of steps.
    """

    policy: Policy
    sampler: Sampler
    learner: Learner | LearnerGroup
    rewards: Rewards
    receiver: PeerReceiver
    rule: SharingRule
    producer: Producer
    tasks: Sequence[TaskData]
    sink: JsonlSink
    checkpoints: Path
    dumps: Path
    callback: Callback = field(default_factory=Callback)
    resume: AgentState | None = None
    on_saved: Callable[[int], object] = lambda _step: None
