"""What a run says about the loop of its agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agents.seam import Seam


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What a run says about the loop of each of its agents. seams: where it was taken up again."""

    seed: int
    steps: int
    mode: Literal["async", "lockstep"]
    schedule: Literal["seed", "follow"]
    evaluate_every: int
    evaluation_batch_size: int
    success_threshold: float
    save_steps: int
    dump_every: int
    step_timeout_s: float
    seams: Sequence[Seam] = ()
