"""Entry point of the other processes that train an agent's policy: `python -m mutualrl.follower RUN_DIR NAME STORE RANK`.

The agent starts them (mutualrl/leader.py), in its process group and with its log, and they end with it.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

import torch

from agents.checkpoint import load_state
from agents.learner_group import follow
from agents.policies.policy import build_policy
from agents.ranks import Sharded
from exchange.types import AgentName
from mutualrl.checkpoints import read_checkpoint
from mutualrl.rundir import RunDir
from mutualrl.wiring import build_learner


def main() -> None:
    """Train until standard input ends. Whatever is raised ends the process with its traceback, and with it the agent."""
    parser = argparse.ArgumentParser(prog="mutualrl.follower", description="One more process of an agent; started by it.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("name")
    parser.add_argument("store", type=Path, help="where the processes find each other")
    parser.add_argument("rank", type=int)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent finishes its step, and ends this process
    run_dir, rank, name = RunDir(arguments.run_dir), arguments.rank, AgentName(arguments.name)
    run, checkpoint = run_dir.read_config(), run_dir.read_manifest().checkpoint
    config = run.agents[name]
    device = device_of(config.device, rank)
    policy = build_policy(config.policy, seed=run.seed, device=device, dtype=config.dtype, threads=config.threads)
    ranks = Sharded(arguments.store, rank=rank, size=config.num_processes, device=policy.device)
    with ranks.here():
        learner = build_learner(config, policy, ranks)
    if checkpoint is not None:
        part = read_checkpoint(run_dir.checkpoints, checkpoint).parts[name].path
        learner.restore(load_state(run_dir.checkpoints / part).learner)
    follow(learner, ranks, sys.stdin)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a process group that its leader has left cannot be taken apart


def device_of(name: str, rank: int) -> str:
    """The device of a rank: as many behind the agent's own as its rank says; the CPU is there for all."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, first = name.partition(":")
    return name if kind == "cpu" else f"{kind}:{int(first or 0) + rank}"


if __name__ == "__main__":
    main()
