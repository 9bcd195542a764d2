"""A run, as frozen structs: agents, tasks, topology, exchange, evaluation."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from agents.bounds import LONG_S, MANY, check_range
from agents.config import AgentConfig, TaskConfig

MAX_SEED = 2**63 - 1

_RUN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


TrackerName = Literal["tensorboard", "wandb", "trackio"]


class Edge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`learner` may learn from `teacher`; kinds restricts which experience may cross (None: all)."""

    learner: str
    teacher: str
    kinds: tuple[Literal["rollouts", "rewards", "successes"], ...] | None = None


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may learn from whom.

    shape: "complete", "ring" (each learns from the one before it), "hub:NAME" (spokes and NAME learn from each other),
    or "edges".
    """

    shape: str = "complete"
    edges: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        if self.shape not in ("complete", "ring", "edges") and not self.shape.startswith("hub:"):
            raise ValueError(f"`shape` must be complete, ring, hub:NAME or edges, got shape={self.shape!r}")
        if bool(self.edges) != (self.shape == "edges"):
            raise ValueError(f'`edges` goes with shape="edges", got shape={self.shape!r} with {len(self.edges)} edges')


class Exchange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hub's bounds.

    memory_bytes: experience kept to be handed out; the oldest goes first. credit_*: unacknowledged sends per worker.
    disk_bytes: experience recorded in the run's directory, where `mutualrl log` finds it; the oldest goes first. 0 records
    nothing.
    """

    memory_bytes: int = 256 * 2**20
    credit_messages: int = 64
    credit_bytes: int = 64 * 2**20
    heartbeat_s: float = 2.0
    request_timeout_s: float = 30.0
    disk_bytes: int = 4 * 2**30

    def __post_init__(self) -> None:
        check_range(self, "memory_bytes", "credit_bytes", ge=2**20, le=2**50)
        check_range(self, "credit_messages", ge=1, le=2**20)
        check_range(self, "heartbeat_s", ge=0.01, le=3600)
        check_range(self, "request_timeout_s", gt=0, le=LONG_S)
        check_range(self, "disk_bytes", ge=2**20 if self.disk_bytes else 0, le=2**50)


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Greedy accuracy on held-out prompts before the first step, every `every` steps (0: never), and at the end.

    batch_size: completions decoded at a time. threshold: the reward from which a completion counts as correct.
    num_samples: completions sampled per prompt, as in training, for pass@k at each k of `pass_k`; 0: none.
    """

    every: int = 20
    batch_size: int = 256
    threshold: float = 1.0
    num_samples: int = 0
    pass_k: tuple[int, ...] = (1, 8)

    def __post_init__(self) -> None:
        check_range(self, "every", ge=0, le=MANY)
        check_range(self, "batch_size", ge=1, le=MANY)
        check_range(self, "num_samples", ge=0, le=2**20)
        if not self.pass_k or min(self.pass_k) < 1 or (self.num_samples and max(self.pass_k) > self.num_samples):
            most = self.num_samples or "num_samples"
            raise ValueError(f"`pass_k` must hold numbers from 1 to {most}, got pass_k={list(self.pass_k)!r}")


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of `mutualrl up`.

    name: begins the name of the run's directory.
    mode: "async" (nobody waits for a peer) or "lockstep" (every agent meets its peers' rows of the same step; the same
    seed gives the same numbers on the same machine). schedule: "seed" (all agents draw step t's prompts alike) or
    "follow" (an agent takes the newest prompts that its peers published and it has not met).
    save_steps: steps between checkpoints (0: only at the end). save_total_limit: checkpoints that are kept, the newest
    (None: all). dump_every: the first of every so many steps is dumped, for `mutualrl replay` (0: none); a multiple of
    save_steps dumps the step behind a checkpoint. step_timeout_s: in lockstep, how long a step may wait for a peer; in both
    modes, silence after which the run says who waits for whom. drain_s: how long a run that is being stopped waits for its
    agents to finish what they compute and save. report_to: where metrics go beside the run's own files
    (mutualrl/trackers.py).
    """

    name: str = "run"
    seed: int = 0
    steps: int = 100
    mode: Literal["async", "lockstep"] = "async"
    schedule: Literal["seed", "follow"] = "seed"
    output_dir: str = "runs"
    save_steps: int = 0
    save_total_limit: int | None = None
    dump_every: int = 0
    step_timeout_s: float = 300.0
    drain_s: float = 30.0
    report_to: Literal["none"] | TrackerName | tuple[TrackerName, ...] = "none"
    tasks: tuple[TaskConfig, ...]
    agents: dict[str, AgentConfig]
    topology: Topology = Topology()
    exchange: Exchange = Exchange()
    evaluation: Evaluation = Evaluation()

    def __post_init__(self) -> None:
        if not _RUN_NAME.fullmatch(self.name):
            raise ValueError(
                f"`name` must be 1 to 100 letters, digits, '.', '-' and '_', and not begin with '.', got name={self.name!r}"
            )
        check_range(self, "seed", ge=0, le=MAX_SEED)
        check_range(self, "steps", ge=1, le=MANY)
        check_range(self, "save_steps", "dump_every", ge=0, le=MANY)
        check_range(self, "save_total_limit", ge=1, le=MANY)
        check_range(self, "step_timeout_s", gt=0, le=LONG_S)
        check_range(self, "drain_s", ge=0, le=LONG_S)

    @property
    def trackers(self) -> tuple[TrackerName, ...]:
        """`report_to` as names, each once."""
        if self.report_to == "none":
            return ()
        return (self.report_to,) if isinstance(self.report_to, str) else tuple(dict.fromkeys(self.report_to))
