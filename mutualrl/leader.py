"""Starts the processes that train an agent's policy beside the agent's own, which leads them."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from agents.learner import Learner
from agents.learner_group import Followers, LearnerGroup
from agents.policies.policy import Policy
from agents.ranks import Ranks, Sharded
from exchange.types import AgentName
from mutualrl import exit_codes
from mutualrl.rundir import RunDir

logger = logging.getLogger("mutualrl.agent")


def lead(
    run_dir: RunDir, name: AgentName, policy: Policy, *, size: int, build: Callable[[Policy, Ranks], Learner]
) -> LearnerGroup:
    """Start `size` - 1 followers and return when all have their part of the policy. build: a learner over a policy.

    A follower that ends early ends this process, whose log has its traceback.
    """
    directory = Path(tempfile.mkdtemp(prefix="ranks-"))
    command = [sys.executable, "-m", "mutualrl.follower", str(run_dir.path), name, str(directory / "store")]

    def end_with(rank: int, code: int) -> None:
        logger.error("rank %d of the %d processes of %s ended with exit code %d", rank, size, name, code)
        os._exit(exit_codes.RUN_FAILED)

    followers = Followers([[*command, str(rank)] for rank in range(1, size)], on_death=end_with)
    ranks = Sharded(directory / "store", rank=0, size=size, device=policy.device)
    with ranks.here():
        learner = build(replace(policy, model=copy.deepcopy(policy.model)), ranks)
    shutil.rmtree(directory, ignore_errors=True)
    return LearnerGroup(learner, policy.model, ranks, followers)
