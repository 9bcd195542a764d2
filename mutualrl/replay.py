"""`mutualrl replay`: a dumped training step made again from the same weights, its numbers beside the recorded ones.

The weights before step N are the agent's newest part at or before step N - 1, or its weights at the start, trained through the
dumps of the steps from there to N. So either every step is dumped (`dump_every = 1`), or the step is the first behind a
checkpoint. Nothing of the run is changed.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from agents.dump import StepDump, dump_path, read_dump
from agents.errors import AgentError, CheckpointError, NonFiniteError
from agents.learner import Learner
from agents.parts import read_part
from mutualrl import exit_codes
from mutualrl.checkpoints import part_folders
from mutualrl.errors import ConfigError, RunDirError
from mutualrl.rundir import RunDir
from mutualrl.schema import nearest
from mutualrl.wiring import rebuild_learner

TIMES = ("learn_time",)
"""Metrics that no two runs have alike."""


def run_replay(path: Path, agent: str, step: int, *, console: Console | None = None) -> int:
    """Print recorded and recomputed numbers side by side; exit code 0 where they are equal to the bit, else 1.

    Raises ConfigError and RunDirError where the step cannot be made again, saying what it takes.
    """
    console = console or Console()
    run_dir = RunDir(path)
    if not run_dir.config.is_file():
        raise RunDirError(f"{path} is no directory of a run: it has no config.json")
    run = run_dir.read_config()
    if agent not in run.agents:
        raise ConfigError(f"--agent: no agent of this name, got {agent!r}; {nearest(agent, run.agents)}")
    try:
        start = _start(run_dir, agent, step)
        learner = rebuild_learner(run, agent, start)
        begin = 0 if start is None else read_part(start).step
        dumps = [read_dump(dump_path(run_dir.dumps, agent, each)) for each in range(begin + 1, step + 1)]
    except AgentError as error:
        raise RunDirError(str(error)) from error
    origin = "the agent's weights at the start" if start is None else str(start)
    console.print(f"{agent}, step {step}: {len(dumps)} from {origin}", markup=False, highlight=False, soft_wrap=True)
    for dump in dumps:
        computed = _learn(learner, dump)
    return _show(dumps[-1], computed, console)


def _start(run_dir: RunDir, agent: str, step: int) -> Path | None:
    """The part to start from, None for the weights at the start; CheckpointError says what is missing."""
    dumped = [dump_path(run_dir.dumps, agent, each).is_file() for each in range(1, step + 1)]
    if not dumped[-1]:
        raise CheckpointError(f"step {step} of {agent} was not dumped: {dump_path(run_dir.dumps, agent, step)} is not there")
    parts = {facts.step: part for part in part_folders(run_dir.checkpoints / agent) if (facts := read_part(part)).resumable}
    for begin in range(step - 1, 0, -1):
        if begin in parts:
            return parts[begin]
        if not dumped[begin - 1]:
            raise CheckpointError(
                f"step {step} of {agent} cannot be made again: that takes a checkpoint behind step {step - 1}, or dumps of all "
                f"steps from an earlier one on, and step {begin} has neither (dump_every a multiple of save_steps, or 1)"
            )
    return None


def _learn(learner: Learner, dump: StepDump) -> dict[str, float]:
    try:
        return learner.step(dump.rows, prompts=dump.prompts)
    except NonFiniteError:
        return {}


def _show(dump: StepDump, computed: dict[str, float], console: Console) -> int:
    table = Table("metric", "recorded", "recomputed", "")
    equal = True
    for name in dict.fromkeys([*dump.metrics, *computed]):
        if name in TIMES:
            continue
        recorded, again = repr(dump.metrics.get(name)), repr(computed.get(name))
        equal &= recorded == again
        table.add_row(name, recorded, again, "equal" if recorded == again else "DIFFERS")
    if not dump.metrics:
        console.print("the step ended the run: its loss or gradient was not finite; recomputed:", repr(computed.get("loss")))
    console.print(table)
    console.print("equal to the bit" if equal else "the numbers differ: another machine, other packages, or other weights")
    return exit_codes.DONE if equal else exit_codes.RUN_FAILED
