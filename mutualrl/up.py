"""`mutualrl up` and `mutualrl resume`: from a run file, or an unfinished run, to a finished run directory."""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import msgspec
from rich.console import Console

from agents.errors import AgentError
from mutualrl.checkpoints import Checkpoint, join
from mutualrl.config import Run
from mutualrl.errors import ConfigError, MutualRLError
from mutualrl.live import View
from mutualrl.load import load_run
from mutualrl.manifest import Manifest, installed_versions, now
from mutualrl.plan import show_plan
from mutualrl.progress import AgentProgress, MetricsTail
from mutualrl.resume import take_up, wait_for_former
from mutualrl.rundir import RunDir, fresh_path, new_run_dir, old_run_dir
from mutualrl.supervise import Outcome, Supervisor, role_command
from mutualrl.trackers import Reporter
from mutualrl.traffic import observe
from mutualrl.validate import validate

Command = Callable[[RunDir, str], list[str]]

LEAVE_HUB_S = 2.0


def run_up(
    config: Path,
    overrides: Sequence[str] = (),
    *,
    dry_run: bool = False,
    run_name: str | None = None,
    output_dir: Path | None = None,
    console: Console | None = None,
    command: Command = role_command,
) -> int:
    """Run a file to its end and return the exit code; raises ConfigError and RunDirError before anything is started.

    output_dir: the run's directory itself; without it, <output_dir>/<name>-<date>-<time> by the file's output_dir.
    """
    console = console or Console()
    _find_rewards_here()
    run = load_run(config, overrides)
    if run_name is not None:
        try:
            run = msgspec.structs.replace(run, name=run_name)
        except ValueError as error:
            raise ConfigError(f"--run-name: {error}") from None
    warnings = validate(run)
    if dry_run:
        directory = str(output_dir or Path(run.output_dir) / f"{run.name}-<date>-<time>")
        show_plan(run, console, directory=directory, warnings=warnings)
        return 0
    _need_torch()
    path = output_dir or fresh_path(Path(run.output_dir), run.name, at=datetime.now())
    with new_run_dir(path) as run_dir, _children_reaped():
        run_dir.write_config(run)
        manifest = Manifest(
            run_id=f"{run.name}-{secrets.token_hex(4)}",
            name=run.name,
            status="starting",
            pid=0,
            started=now(),
            endpoint="",
            versions=installed_versions(),
        )
        outcome = asyncio.run(_run(run, run_dir, manifest, console, warnings, command))
        _close(run, outcome, run_dir, console)
    return outcome.exit_code


def run_resume(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    console: Console | None = None,
    command: Command = role_command,
) -> int:
    """Go on with the run in a directory from its newest whole checkpoint, to its end; returns the exit code.

    Raises ConfigError and RunDirError before anything is started.
    """
    console = console or Console()
    _find_rewards_here()
    _need_torch()
    with old_run_dir(path) as run_dir, _children_reaped():
        wait_for_former(run_dir)
        run, manifest, warnings = take_up(run_dir, overrides)
        outcome = asyncio.run(_run(run, run_dir, manifest, console, warnings + validate(run), command))
        _close(run, outcome, run_dir, console)
    return outcome.exit_code


def _find_rewards_here() -> None:
    """Import strings of rewards are found in the working directory, as they are in the agents."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _need_torch() -> None:
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        raise ConfigError("agents need torch and transformers, which are not installed: pip install 'mutualrl[train]'")


async def _run(
    run: Run, run_dir: RunDir, manifest: Manifest, console: Console, warnings: list[str], command: Command
) -> Outcome:
    with _ipc_dir() as ipc_dir:
        manifest = msgspec.structs.replace(manifest, endpoint=f"ipc://{ipc_dir}/hub")
        run_dir.write_manifest(manifest)
        progress = {name: AgentProgress(name=name, total=run.steps) for name in run.agents}
        view = View(MetricsTail(run_dir.metrics), progress, console)
        begins = "loading, and warming up where asked to"
        if manifest.checkpoint is not None:
            begins = f"going on behind step {manifest.checkpoint}"
        view.tell(f"{run.name}: {', '.join(run.agents)} in {run_dir.path}; {begins}")
        for warning in warnings:
            view.tell(f"warning: {warning}")
        with Reporter(run, run_dir, manifest, tell=view.tell):
            outcome = await _supervise(run, run_dir, manifest, view, command)
        if crossed := view.traffic.describe():
            view.tell(crossed)
        return outcome


async def _supervise(run: Run, run_dir: RunDir, manifest: Manifest, view: View, command: Command) -> Outcome:
    """The run, its view and its observer together; the observer leaves before the hub, the view draws a last time."""

    async def watch_hub() -> None:
        from exchange.errors import ConnectError

        try:
            await observe(view.traffic, manifest.endpoint, manifest.run_id, agents=set(run.agents), tell=view.tell)
        except ConnectError as error:
            supervisor.fail(f"the hub did not answer: {error}")

    async def leave_hub() -> None:
        observer.cancel()
        await asyncio.wait([observer], timeout=LEAVE_HUB_S)

    ended = asyncio.Event()
    supervisor = Supervisor(run, run_dir, manifest, tell=view.tell, before_hub=leave_hub, command=command)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(view.show(ended))
        observer = tasks.create_task(watch_hub())
        try:
            return await supervisor.run()
        finally:
            observer.cancel()
            ended.set()


def _close(run: Run, outcome: Outcome, run_dir: RunDir, console: Console) -> None:
    checkpoint = _join(run, run_dir, console)
    if outcome.failure is not None:
        console.print(outcome.failure, style="red", markup=False, highlight=False, soft_wrap=True)
    if outcome.status != "done" and checkpoint is not None:
        hint = f"to go on behind step {checkpoint.step}: mutualrl resume {run_dir.path}"
        console.print(hint, markup=False, highlight=False, soft_wrap=True)
    if outcome.status == "stopped":
        console.print(f"for a report: mutualrl report {run_dir.path}", markup=False, highlight=False, soft_wrap=True)
    elif run_dir.evals.exists():
        console.print(_report(run_dir), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{outcome.status}: {run_dir.path}", markup=False, highlight=False, soft_wrap=True)


def _join(run: Run, run_dir: RunDir, console: Console) -> Checkpoint | None:
    """The checkpoint of what the agents left; that there is none must not hide how the run ended."""
    try:
        return join(run_dir.checkpoints, run)
    except (OSError, AgentError) as error:
        console.print(f"no checkpoint: {error}", markup=False, highlight=False, soft_wrap=True)
        return None


def _report(run_dir: RunDir) -> str:
    """Write the report; that there is none must not hide how the run ended."""
    from mutualrl.report import write_report

    try:
        return f"report: {write_report(run_dir.path)}"
    except (OSError, MutualRLError) as error:
        return f"no report: {error}"


@contextmanager
def _ipc_dir() -> Iterator[Path]:
    from exchange.endpoints import private_ipc_dir

    path = private_ipc_dir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _children_reaped() -> Iterator[None]:
    """Children's exit codes are lost where SIGCHLD is ignored, which a shell's `trap '' CHLD` hands down."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
