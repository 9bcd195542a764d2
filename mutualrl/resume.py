"""Taking up a run that has ended: from its newest whole checkpoint, as if what came behind it had never been.

What the run's files say of later steps is cut, what was saved later is removed, and what the exchange recorded later is
marked as abandoned by a seam (agents/seam.py). Doing so twice is doing it once, so that it may be killed at any point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from agents.errors import CheckpointError
from agents.parts import AGENT_FILE
from agents.seam import Seam
from exchange.log import RecordLog
from exchange.types import START, AgentName, Cursor
from mutualrl.checkpoints import Checkpoint, differences, forget_rest, newest_whole, plain
from mutualrl.config import Run
from mutualrl.errors import ConfigError, RunDirError
from mutualrl.load import parse_override
from mutualrl.manifest import Manifest, installed_versions, write_atomically
from mutualrl.rundir import RunDir

FREE = ("steps",)
"""What a resumed run may have otherwise than before."""

LEAVE_S = 60.0
"""How long processes of the run's former life may take to leave."""


class _Lines(msgspec.Struct):
    """Of agent.msgpack what is needed here: how many lines the agent had written into each file."""

    lines: dict[str, int]


class _Line(msgspec.Struct):
    agent: str


def wait_for_former(run_dir: RunDir, *, patience_s: float = LEAVE_S) -> None:
    """Wait until the processes of the run's former life have left, which may outlive a killed `up` by the save of a step.

    Raises RunDirError, naming them, when they do not.
    """
    former = [process for role in run_dir.read_manifest().roles if (process := _process(role.pid, run_dir.path))]
    _, left = psutil.wait_procs(former, timeout=patience_s)
    if left:
        pids = ", ".join(str(process.pid) for process in left)
        raise RunDirError(f"processes of the run in {run_dir.path} are still there, pid {pids}: wait for them, or end them")


def _process(pid: int, path: Path) -> psutil.Process | None:
    """The process of this number if it was started for this run."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        home = Path(process.cwd())
        if any((home / argument).resolve() == path.resolve() for argument in process.cmdline()):
            return process
    return None


def take_up(run_dir: RunDir, overrides: Sequence[str]) -> tuple[Run, Manifest, list[str]]:
    """Make a locked run directory ready to go on; its run, its manifest to be, and warnings.

    Raises ConfigError, naming what changed, where the config is not that of the checkpoint; RunDirError where no checkpoint
    is whole.
    """
    checkpoint, warnings = newest_whole(run_dir.checkpoints)
    before, manifest = run_dir.read_config(), run_dir.read_manifest()
    run = _with_steps(before, overrides)
    changed = [each for each in differences(checkpoint.config, plain(run)) if each.partition(":")[0] not in FREE]
    if changed:
        raise ConfigError("\n".join([f"{run_dir.config} is not that of the run so far:", *(f"  {each}" for each in changed)]))
    steps = {AgentName(name): part.step for name, part in checkpoint.parts.items()}
    if run.steps < max(steps.values()):
        raise ConfigError(f"steps must be at least the {max(steps.values())} that were made, got steps={run.steps}")
    if not run.exchange.disk_bytes and run.mode == "lockstep" and len(set(steps.values())) > 1:
        raise ConfigError(
            f"agents stand at unequal steps ({steps}), and the records that they would meet each other with were not kept "
            "(exchange.disk_bytes=0); start the run anew"
        )
    warnings += [f"{each}, since the checkpoint" for each in differences(checkpoint.versions, installed_versions())]
    seam = Seam(cursor=_newest_record(run_dir.records), steps=steps)
    forget_rest(run_dir.checkpoints, checkpoint)
    _cut_lines(run_dir, checkpoint)
    run_dir.write_config(run)
    seams = (*manifest.seams, seam)
    resumed = msgspec.structs.replace(manifest, status="starting", pid=0, ended=None, exit_code=None, roles=())
    resumed = msgspec.structs.replace(
        resumed, seams=seams, checkpoint=checkpoint.step, versions=installed_versions(), endpoint=""
    )
    return run, resumed, warnings


def _with_steps(run: Run, overrides: Sequence[str]) -> Run:
    for override in overrides:
        keys, value = parse_override(override)
        if keys != ["steps"]:
            raise ConfigError(f"a resumed run keeps its config, only `steps` may be given anew, got {override!r}")
        try:
            run = msgspec.convert({**plain(run), "steps": value}, Run)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{override}: {error}") from None
    return run


def _newest_record(records: Path) -> Cursor:
    if not records.is_dir():
        return START
    return max((row.cursor for row in RecordLog(records).rows(limit=1)), default=START)


def _cut_lines(run_dir: RunDir, checkpoint: Checkpoint) -> None:
    """Leave each agent the lines that it had written when its part was saved."""
    kept: dict[str, dict[str, int]] = {}
    for name, part in checkpoint.parts.items():
        path = run_dir.checkpoints / part.path / AGENT_FILE
        try:
            kept[name] = msgspec.msgpack.decode(path.read_bytes(), type=_Lines).lines
        except (OSError, msgspec.MsgspecError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    for path in run_dir.path.glob("*.jsonl"):
        content = path.read_bytes()
        cut = _cut(content, {name: lines.get(path.name, 0) for name, lines in kept.items()})
        if cut != content:
            write_atomically(path, cut)


def _cut(content: bytes, kept: Mapping[str, int]) -> bytes:
    """Each agent's first so many lines; a torn one at the end is none."""
    seen: Counter[str] = Counter()
    lines = []
    for line in content.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            continue
        agent = msgspec.json.decode(line, type=_Line).agent
        seen[agent] += 1
        if seen[agent] <= kept.get(agent, 0):
            lines.append(line)
    return b"".join(lines)
