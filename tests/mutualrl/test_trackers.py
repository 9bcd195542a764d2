"""What `report_to` writes: TensorBoard's files read back by TensorBoard, the others through modules that note their calls."""

import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from synthetic_run import make_config

from mutualrl.config import Run
from mutualrl.errors import ConfigError
from mutualrl.manifest import Manifest
from mutualrl.rundir import RunDir
from mutualrl.schema import check
from mutualrl.trackers import Reporter
from mutualrl.validate import validate

MANIFEST = Manifest(run_id="synthetic-1", name="synthetic", status="running", pid=0, started="", endpoint="")


class Noted(ModuleType):
    """A tracking library that notes what it is asked for. init returns this module itself: a run has the same methods."""

    def __init__(self, name: str, *, broken: bool = False) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, Any]] = []
        self.broken = broken

    def init(self, **settings: object) -> "Noted":
        self.calls.append(("init", settings))
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.calls.append(("define_metric", (name, step_metric)))

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.broken:
            raise ConnectionError("no network")
        self.calls.append(("log", (metrics, step)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def reporting(*names: str) -> Run:
    return msgspec.structs.replace(make_config(), report_to=names)


def write(run_dir: RunDir, agent: str, step: int, **metrics: float) -> None:
    line = {"agent": agent, "step": step, "wall_s": 1.0} | {f"{agent}/{name}": value for name, value in metrics.items()}
    with run_dir.metrics.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def report(run: Run, path: Path, tell: Any = print) -> None:
    """Two agents at different steps, after a line from before the run was taken up again."""
    run_dir = RunDir(path)
    write(run_dir, "alpha", 1, reward=9.0)
    with Reporter(run, run_dir, MANIFEST, tell=tell):
        write(run_dir, "alpha", 2, reward=0.5, loss=0.25)
        write(run_dir, "beta", 1, reward=0.75)


def test_tensorboard_reads_back_what_was_reported(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report(reporting("tensorboard"), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found == {"alpha/reward": [(2, 0.5)], "alpha/loss": [(2, 0.25)], "beta/reward": [(1, 0.75)]}


def test_wandb_gets_an_axis_of_steps_for_every_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    wandb = Noted("wandb")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    report(reporting("wandb"), tmp_path)
    (first, settings), *rest = wandb.calls
    assert first == "init" and settings["config"]["steps"] == 100
    assert (settings["project"], settings["name"], settings["id"]) == ("mutualrl", tmp_path.name, "synthetic-1")
    assert rest == [
        ("define_metric", ("alpha/step", None)),
        ("define_metric", ("alpha/*", "alpha/step")),
        ("define_metric", ("beta/step", None)),
        ("define_metric", ("beta/*", "beta/step")),
        ("log", ({"alpha/reward": 0.5, "alpha/loss": 0.25, "alpha/step": 2}, None)),
        ("log", ({"beta/reward": 0.75, "beta/step": 1}, None)),
        ("finish", None),
    ]


def test_a_tracker_that_fails_is_told_once_and_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, trackio, told = Noted("wandb", broken=True), Noted("trackio"), list[str]()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    report(reporting("wandb", "trackio", "wandb"), tmp_path, told.append)
    assert told == ["warning: no more reports to wandb: ConnectionError: no network"]
    assert [call for call in trackio.calls if call[0] != "init"] == [
        ("log", ({"alpha/reward": 0.5, "alpha/loss": 0.25}, 2)),
        ("log", ({"beta/reward": 0.75}, 1)),
        ("finish", None),
    ]
    assert trackio.calls[0][1]["project"] == "mutualrl"


def test_nothing_runs_where_nothing_is_reported(tmp_path: Path) -> None:
    before = threading.active_count()
    with Reporter(make_config(), RunDir(tmp_path), MANIFEST, tell=print):
        assert threading.active_count() == before


def test_a_missing_package_is_found_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="report_to: 'wandb' is not installed: pip install wandb"):
        validate(reporting("wandb"))


@pytest.mark.parametrize(
    ("given", "trackers"), [("none", ()), ("wandb", ("wandb",)), (["wandb", "trackio"], ("wandb", "trackio"))]
)
def test_report_to_is_a_name_or_several(given: object, trackers: tuple[str, ...]) -> None:
    body = msgspec.to_builtins(make_config()) | {"report_to": given}
    assert msgspec.convert(body, Run).trackers == trackers
    assert [problem.path for problem in check({**body, "report_to": "wandbb"}, Run)] == [("report_to",)]
