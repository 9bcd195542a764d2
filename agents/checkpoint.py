"""Checkpoints in Hugging Face layout: a directory appears under its name only when it is whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from agents.policies.policy import Policy
from exchange.types import Version

STATE_FILE = "mutualrl.json"


def save_checkpoint(policy: Policy, directory: Path, *, name: str, step: int, version: Version) -> Path:
    """Write `directory/name`, replacing one of that name; `from_pretrained` works on it at once.

    A kill in the middle leaves the earlier checkpoint, or, between its removal and the rename, only a `.tmp` directory.
    """
    target = directory / name
    scratch = directory / f".{name}.{os.getpid()}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    policy.save(scratch)
    state = {"step": step, "version": {"epoch": version.epoch, "step": version.step}}
    (scratch / STATE_FILE).write_bytes(msgspec.json.encode(state))
    if target.exists():
        shutil.rmtree(target)
    scratch.rename(target)
    return target
