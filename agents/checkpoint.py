"""One agent's part of a checkpoint: a directory in Hugging Face layout with what it takes to go on from there.

    model.safetensors, config.json, tokenizer.json …    loads by from_pretrained at once
    learner.safetensors                                 optimizer moments, master weights, reference policy
    agent.msgpack                                       everything else (agents/state.py)
    part.json                                           step, version, and the size and BLAKE3 digest of every file

A part appears under its name when it is whole and on disk, and is never changed afterwards: whatever moment the process is
killed at, it is there or it is not. It may lack the middle two: the weights can be used then, but not resumed.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from agents.errors import CheckpointError
from agents.learner import LearnerState
from agents.parts import AGENT_FILE, LEARNER_FILE, PART_FILE, PartFacts, files_below, files_of, read_part, step_name
from agents.policies.policy import Policy
from agents.state import AgentState
from exchange.files import sync_directory
from exchange.types import Version

COUNTERS = "steps, non_finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumable:
    """What goes into a part beside the policy. learner_state: of `Learner.state`, non-tensors included."""

    learner: LearnerState
    agent: AgentState


def save_part(policy: Policy, directory: Path, *, step: int, version: Version, state: Resumable | None) -> Path:
    """Write `directory/step-NNNNNN` unless it is there, and return it.

    state: None where the weights are those of no step.
    """
    target = directory / step_name(step)
    if target.exists():
        return target
    scratch = directory / f".{target.name}.{os.getpid()}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    policy.save(scratch)
    if state is not None:
        tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in state.learner.tensors.items()}
        counters = msgspec.json.encode([state.learner.steps, state.learner.non_finite]).decode()
        # One entry: of several the order in the file would be another each time.
        save_file(tensors, scratch / LEARNER_FILE, metadata={COUNTERS: counters})
        (scratch / AGENT_FILE).write_bytes(msgspec.msgpack.encode(state.agent))
    facts = PartFacts(step=step, version=version, files=files_of(scratch))
    (scratch / PART_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=2))
    _sync(scratch)
    scratch.rename(target)
    sync_directory(directory)
    return target


def load_state(part: Path) -> Resumable:
    """What `save_part` wrote beside the policy. Raises CheckpointError where there is none, or it cannot be read."""
    if not read_part(part).resumable:
        raise CheckpointError(f"{part} has weights alone, of a step that failed in its middle; take an earlier checkpoint")
    try:
        with safe_open(part / LEARNER_FILE, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            steps, non_finite = msgspec.json.decode(file.metadata()[COUNTERS], type=tuple[int, int])
        learner = LearnerState(tensors=tensors, steps=steps, non_finite=non_finite)
        agent = msgspec.msgpack.decode((part / AGENT_FILE).read_bytes(), type=AgentState)
    except (OSError, SafetensorError, KeyError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{part} cannot be read: {error}") from error
    return Resumable(learner=learner, agent=agent)


def _sync(directory: Path) -> None:
    """Everything below a directory, and itself, to the disk."""
    for path in files_below(directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    for path in (*(each for each in directory.rglob("*") if each.is_dir()), directory):
        sync_directory(path)


def point_at(directory: Path, name: str, target: Path) -> None:
    """Make `directory/name` a link to a part beside it, in place of an earlier one, at once."""
    partial = directory / f".{name}.{os.getpid()}.tmp"
    partial.unlink(missing_ok=True)
    partial.symlink_to(target.name, target_is_directory=True)
    partial.replace(directory / name)
    sync_directory(directory)
