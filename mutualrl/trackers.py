"""`report_to`: a run's metrics in TensorBoard, Weights & Biases or Trackio.

One thread of the process that owns the run follows metrics.jsonl, so that agents know nothing of it and a tracker that is slow,
or fails, costs them nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import msgspec

from mutualrl.config import Run
from mutualrl.manifest import Manifest
from mutualrl.progress import MetricsTail, Row
from mutualrl.rundir import RunDir

POLL_S = 1.0
PROJECT = "mutualrl"

PACKAGES: Mapping[str, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


class Tracker(Protocol):
    """Where metrics go."""

    def log(self, agent: str, step: int, metrics: Mapping[str, float]) -> None:
        """Take an agent's metrics behind `step` of its steps, by `<agent>/<leaf>`. Agents are at different steps."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoard:
    """Event files in the run's directory: `tensorboard --logdir RUN`, or its parent for several runs."""

    def __init__(self, run: Run, run_dir: RunDir, manifest: Manifest) -> None:
        # tensorboard's own writer: torch's would bring torch into a process that has no need of it.
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        writers = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._writer = writers.EventFileWriter(str(run_dir.path / "tensorboard"))

    def log(self, agent: str, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """One run of project $WANDB_PROJECT, else `mutualrl`; the same one where the run is resumed."""

    def __init__(self, run: Run, run_dir: RunDir, manifest: Manifest) -> None:
        self._run: Any = importlib.import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_dir.path.name,
            id=manifest.run_id,
            resume="allow",
            config=msgspec.to_builtins(run),
            dir=str(run_dir.path),
        )
        # wandb drops what comes with a step below the last one, and agents are at different steps: each has its own axis.
        for agent in run.agents:
            self._run.define_metric(f"{agent}/step")
            self._run.define_metric(f"{agent}/*", step_metric=f"{agent}/step")

    def log(self, agent: str, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, f"{agent}/step": step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """One run of project $TRACKIO_PROJECT, else `mutualrl`; the same one where the run is resumed."""

    def __init__(self, run: Run, run_dir: RunDir, manifest: Manifest) -> None:
        self._run: Any = importlib.import_module("trackio").init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=manifest.run_id,
            resume="allow",
            config=msgspec.to_builtins(run),
        )

    def log(self, agent: str, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: Mapping[str, Callable[[Run, RunDir, Manifest], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


def missing_packages(run: Run) -> list[str]:
    """One line for each tracker of the run whose package is not installed, with what to do."""
    absent = [name for name in run.trackers if importlib.util.find_spec(PACKAGES[name]) is None]
    return [f"report_to: {name!r} is not installed: pip install {PACKAGES[name]}" for name in absent]


class Reporter:
    """Copies what is added to the run's metrics.jsonl into its trackers while the block lasts, and to its end.

    tell: receives one line for a tracker that fails; the run and the other trackers go on without it. Leaving the block
    waits until the trackers have written everything.
    """

    def __init__(self, run: Run, run_dir: RunDir, manifest: Manifest, *, tell: Callable[[str], None]) -> None:
        self._run, self._run_dir, self._manifest = run, run_dir, manifest
        self._tell = tell
        self._trackers: dict[str, Tracker] = {}
        self._tail = MetricsTail(run_dir.metrics)
        self._tail.skip()  # what is there already was reported before the run was taken up again
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="reporter", daemon=True) if run.trackers else None

    def __enter__(self) -> Reporter:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.finish()

    def finish(self) -> None:
        """Wait until the trackers have written everything. May be called again."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _follow(self) -> None:
        for name in self._run.trackers:
            self._attempt(name, partial(self._open, name))
        while not self._ended.wait(POLL_S):
            self._copy()
        self._copy()
        for opened, tracker in list(self._trackers.items()):
            self._attempt(opened, tracker.close)

    def _open(self, name: str) -> None:
        self._trackers[name] = TRACKERS[name](self._run, self._run_dir, self._manifest)

    def _copy(self) -> None:
        for row in self._tail.read():
            agent, step, metrics = _parts_of(row)
            for name, tracker in list(self._trackers.items()):
                self._attempt(name, partial(tracker.log, agent, step, metrics))

    def _attempt(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # foreign code, and often a network behind it
            self._trackers.pop(name, None)
            self._tell(f"warning: no more reports to {name}: {type(error).__name__}: {error}")


def _parts_of(row: Row) -> tuple[str, int, dict[str, float]]:
    agent, step = str(row.get("agent")), int(row.get("step") or 0)
    return agent, step, {key: float(v) for key, v in row.items() if key.startswith(f"{agent}/") and isinstance(v, int | float)}
