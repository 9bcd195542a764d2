"""Checkpoints of a whole run: a manifest that names one part of every agent, written when all of them are whole.

    checkpoints/AGENT/step-000040/    an agent's part (agents/checkpoint.py)
    checkpoints/AGENT/final           link to its last part, once it has made all steps
    checkpoints/step-000040.json      the manifest

What no manifest names is no checkpoint of the run. While a run goes on, a manifest joins parts of the same step, and the
agent that comes last writes it; when a run has ended it joins the last part of each agent, and its name is the lowest step.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from agents.errors import CheckpointError
from agents.parts import PART_FILE, PartFacts, read_part, step_name
from mutualrl.config import Run
from mutualrl.errors import RunDirError
from mutualrl.manifest import installed_versions, write_atomically

_PART = re.compile(r"step-[0-9]{6,}")
_MANIFEST = re.compile(r"step-([0-9]{6,})\.json")


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's part. path: below the directory of checkpoints. digest: BLAKE3 of its part.json, which has all others."""

    path: str
    step: int
    digest: str


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest. step: the lowest of its parts'. config: of the run. versions: of packages that numbers depend on."""

    step: int
    parts: dict[str, Part]
    config: dict[str, Any]
    versions: dict[str, str] = {}


def manifest_path(directory: Path, step: int) -> Path:
    """Where the manifest of a step lies."""
    return directory / f"{step_name(step)}.json"


def join(directory: Path, run: Run, step: int | None = None) -> Checkpoint | None:
    """Write the manifest of the agents' parts of `step`, of each agent's last one for None; None while any is missing.

    Any number of processes may do so at the same time: they write the same. Older checkpoints than `save_total_limit`
    allows are removed.
    """
    parts = {name: _part(directory, name, step) for name in run.agents}
    found = {name: part for name, part in parts.items() if part is not None}
    if len(found) < len(parts):
        return None
    checkpoint = Checkpoint(
        step=min(part.step for part in found.values()),
        parts=found,
        config=plain(run),
        versions=installed_versions(),
    )
    write_atomically(manifest_path(directory, checkpoint.step), msgspec.json.encode(checkpoint))
    if run.save_total_limit is not None:
        _prune(directory, run.save_total_limit)
    return checkpoint


def _part(directory: Path, agent: str, step: int | None) -> Part | None:
    """An agent's part of a step, or its last that can be resumed."""
    folder = directory / agent
    wanted = [folder / step_name(step)] if step is not None else sorted(part_folders(folder), key=_step_of, reverse=True)
    for part in wanted:
        try:
            content = (part / PART_FILE).read_bytes()
            facts = msgspec.json.decode(content, type=PartFacts)
        except (OSError, msgspec.MsgspecError):
            continue
        if facts.resumable:
            return Part(path=f"{agent}/{part.name}", step=facts.step, digest=blake3(content).hexdigest())
    return None


def part_folders(folder: Path) -> Iterator[Path]:
    """The parts below an agent's directory of checkpoints."""
    return (path for path in (folder.iterdir() if folder.is_dir() else ()) if _PART.fullmatch(path.name))


def _step_of(part: Path) -> int:
    return int(part.name.removeprefix("step-"))


def steps_saved(directory: Path) -> list[int]:
    """The steps of all manifests, the newest first."""
    names = (_MANIFEST.fullmatch(path.name) for path in (directory.iterdir() if directory.is_dir() else ()))
    return sorted((int(name[1]) for name in names if name), reverse=True)


def read_checkpoint(directory: Path, step: int) -> Checkpoint:
    """The manifest of a step. Raises CheckpointError when it cannot be read."""
    path = manifest_path(directory, step)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Checkpoint)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} is no manifest of a checkpoint: {error}") from error


def newest_whole(directory: Path) -> tuple[Checkpoint, list[str]]:
    """The newest checkpoint all of whose files are as they were saved, and what is wrong with newer ones.

    Raises RunDirError when there is none.
    """
    damage: list[str] = []
    for step in steps_saved(directory):
        try:
            checkpoint = read_checkpoint(directory, step)
            for part in checkpoint.parts.values():
                facts = directory / part.path / PART_FILE
                if not facts.is_file() or blake3(facts.read_bytes()).hexdigest() != part.digest:
                    raise CheckpointError(f"{facts} is not as it was saved")
                read_part(directory / part.path, check=True)
            return checkpoint, damage
        except CheckpointError as error:
            damage.append(str(error))
    raise RunDirError(
        "\n".join([f"{directory} has no whole checkpoint to go on from; set save_steps, and start the run anew", *damage])
    )


def forget_rest(directory: Path, checkpoint: Checkpoint) -> None:
    """Remove what was saved behind a checkpoint, and what saving left behind when it was killed.

    Earlier checkpoints stay. What the agents save from here on is of another course of the run.
    """
    for step in steps_saved(directory):
        if step > checkpoint.step:
            manifest_path(directory, step).unlink()
    named = _named(directory)
    for name in checkpoint.parts:
        for path in (directory / name).iterdir():
            if path.is_symlink():
                path.unlink()
            elif path.name.endswith(".tmp") or (_PART.fullmatch(path.name) and path not in named):
                shutil.rmtree(path)


def _named(directory: Path) -> set[Path]:
    """The parts that some manifest names."""
    named: set[Path] = set()
    for step in steps_saved(directory):
        try:
            named |= {directory / part.path for part in read_checkpoint(directory, step).parts.values()}
        except CheckpointError:
            if manifest_path(directory, step).exists():  # else another agent has just removed it
                raise
    return named


def _prune(directory: Path, limit: int) -> None:
    """Keep the newest manifests and their parts, and parts that no manifest could name yet."""
    kept, *_ = steps = steps_saved(directory)
    for step in steps[limit:]:
        manifest_path(directory, step).unlink(missing_ok=True)
    named = _named(directory)
    newest = read_checkpoint(directory, kept)
    for name, part in newest.parts.items():
        for path in part_folders(directory / name):
            if path not in named and _step_of(path) < part.step:
                shutil.rmtree(path, ignore_errors=True)


def plain(run: Run) -> dict[str, Any]:
    """A config as JSON gives it back."""
    values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(run))
    return values


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Every setting in which two configs differ, `name: value then -> value now`."""
    for key in dict.fromkeys([*saved, *now]):
        then, current = saved.get(key), now.get(key)
        if isinstance(then, Mapping) and isinstance(current, Mapping):
            yield from differences(then, current, f"{path}{key}.")
        elif then != current:
            yield f"{path}{key}: {then!r} -> {current!r}"
