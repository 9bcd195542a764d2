"""A run's directory: the one place where everything that a run knows and leaves behind is found.

config.json     the resolved config              metrics.jsonl   one line per agent and step
manifest.json   processes, versions, status      evals.jsonl     one line per agent, evaluation and task
lock            held by the `up` that runs here  rescues.jsonl   one line per rescued prompt shown in the report
logs/ROLE.log   what each process printed        coin.jsonl      one line per prompt of a rescue trial
records/        what crossed the exchange        exchange.json   the hub's last statistics
checkpoints/    models in Hugging Face layout    completions.jsonl, where a reward logs columns
dumps/          steps, for `mutualrl replay`     report.html, and tensorboard/ by `report_to`
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

import msgspec

from mutualrl.config import Run
from mutualrl.errors import ConfigError, RunDirError
from mutualrl.manifest import Manifest, write_atomically


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths inside one run directory, and the files that are read and written as a whole."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evals(self) -> Path:
        return self.path / "evals.jsonl"

    @property
    def rescues(self) -> Path:
        return self.path / "rescues.jsonl"

    @property
    def exchange(self) -> Path:
        return self.path / "exchange.json"

    @property
    def records(self) -> Path:
        """Where the hub records what crosses it, unless the run has `exchange.disk_bytes = 0`."""
        return self.path / "records"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def dumps(self) -> Path:
        return self.path / "dumps"

    def final_checkpoint(self, agent: str) -> Path:
        """Where an agent that has made all its steps leaves its model."""
        return self.checkpoints / agent / "final"

    def log(self, role: str) -> Path:
        """Where a role's standard output and error go."""
        return self.path / "logs" / f"{role}.log"

    def write_config(self, run: Run) -> None:
        """Save the resolved config; `read_config` gives an equal one. ConfigError when JSON cannot hold it."""
        try:
            content = msgspec.json.encode(run)
            kept = msgspec.json.decode(content, type=Run) == run
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"the config cannot be written as JSON: {error}") from None
        if not kept:
            raise ConfigError("the config does not come back from JSON as it was: it holds a value that JSON has not")
        write_atomically(self.config, msgspec.json.format(content, indent=2))

    def read_config(self) -> Run:
        """The resolved config of this run."""
        return msgspec.json.decode(self.config.read_bytes(), type=Run)

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest."""
        write_atomically(self.manifest, msgspec.json.format(msgspec.json.encode(manifest), indent=2))

    def read_manifest(self) -> Manifest:
        """The manifest as last written."""
        return msgspec.json.decode(self.manifest.read_bytes(), type=Manifest)


@contextmanager
def new_run_dir(path: Path) -> Iterator[RunDir]:
    """A new run's directory, locked until the block is left (the lock ends with the process, however it ends).

    Raises RunDirError, naming the directory, when another run is using it, when it holds anything already, or when it
    cannot be made.
    """
    with ExitStack() as held:
        with usable(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context((path / "lock").open("a+"))
            _take(path, lock)
        yield RunDir(path)


@contextmanager
def old_run_dir(path: Path) -> Iterator[RunDir]:
    """The directory of a run that has ended, however it did, locked until the block is left.

    Raises RunDirError, naming the directory, when it is in use or none of a run.
    """
    run_dir = RunDir(path)
    if not (run_dir.config.is_file() and run_dir.manifest.is_file()):
        raise RunDirError(f"{path} is no directory of a run: it has no config.json and manifest.json")
    with ExitStack() as held:
        with usable(path):
            lock = held.enter_context((path / "lock").open("a+"))
            _lock(path, lock)
        yield run_dir


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Inside, what the system refuses (no space, no permission, a file in the way, a name too long) is a RunDirError."""
    try:
        yield
    except RunDirError:
        raise
    except (OSError, ValueError) as error:
        raise RunDirError(f"run directory {path} cannot be used: {error}; give another --output-dir") from None


def _take(path: Path, lock: TextIO) -> None:
    """Lock an empty directory for this process and lay out what every run has."""
    _lock(path, lock)
    if any(entry.name != "lock" for entry in path.iterdir()):
        raise RunDirError(
            f"run directory {path} already holds something; give another --output-dir, or remove it if it is no longer wanted"
        )
    (path / "logs").mkdir()
    (path / "checkpoints").mkdir()


def _lock(path: Path, lock: TextIO) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        raise RunDirError(
            f"run directory {path} is in use by another run (pid {owner}); wait for it or give another --output-dir"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()


def fresh_path(output_dir: Path, name: str, *, at: datetime) -> Path:
    """OUTPUT_DIR/NAME-YYYYmmdd-HHMMSS, created, with -2, -3, … behind it when two runs start within one second.

    Raises RunDirError when it cannot be made.
    """
    stamp = f"{name}-{at:%Y%m%d-%H%M%S}"
    with usable(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
    attempt = 1
    while True:
        path = output_dir / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        with usable(path), suppress(FileExistsError):
            path.mkdir()
            return path
        attempt += 1
