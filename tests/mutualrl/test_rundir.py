"""A run's directory: refused by name when in use or not empty, its files replaced atomically."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from agents.config import AgentConfig, TinyPolicy
from agents.tasks.config import Sort
from mutualrl.config import Evaluation, Run
from mutualrl.errors import ConfigError, RunDirError
from mutualrl.manifest import Manifest, Role, installed_versions, write_atomically
from mutualrl.rundir import RunDir, fresh_path, new_run_dir

RUN = Run(tasks=(Sort(name="sort"),), agents={"alpha": AgentConfig(policy=TinyPolicy())})


def test_a_directory_in_use_is_refused_by_name_with_the_pid_of_its_user(tmp_path: Path) -> None:
    with (
        new_run_dir(tmp_path / "run"),
        pytest.raises(RunDirError, match=rf"{tmp_path}/run is in use .*pid {os.getpid()}"),
        new_run_dir(tmp_path / "run"),
    ):
        pass


def test_a_directory_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(RunDirError, match="already holds something"), new_run_dir(tmp_path):
        pass
    assert (tmp_path / "mine.txt").read_text() == "keep"
    with new_run_dir(tmp_path / "run"):
        pass
    with pytest.raises(RunDirError, match="already holds something"), new_run_dir(tmp_path / "run"):
        pass


@pytest.mark.slow
def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from mutualrl.rundir import new_run_dir\n"
        f"with new_run_dir(Path({str(tmp_path)!r})): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    with pytest.raises(RunDirError, match="already holds something"), new_run_dir(tmp_path):
        pass


def test_an_empty_directory_with_an_old_lock_is_taken(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("999")
    with new_run_dir(tmp_path) as run_dir:
        assert (tmp_path / "lock").read_text() == str(os.getpid())
        assert run_dir.log("hub").parent.is_dir()


def test_config_and_manifest_come_back_as_written(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.write_config(RUN)
    assert run_dir.read_config() == RUN
    manifest = Manifest(
        run_id="r",
        name="n",
        status="running",
        pid=1,
        started="now",
        endpoint="ipc://x",
        roles=(Role(name="hub", pid=2),),
        versions=installed_versions(),
    )
    run_dir.write_manifest(manifest)
    assert run_dir.read_manifest() == manifest
    assert "numpy" in manifest.versions


@pytest.mark.parametrize("changes", [{"evaluation": Evaluation(threshold=float("inf"))}, {"output_dir": "\udcff"}])
def test_a_config_that_would_not_come_back_is_not_written(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="JSON"):
        RunDir(tmp_path).write_config(msgspec.structs.replace(RUN, **changes))
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_atomically(path, b"old")
    path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}").mkdir()
    with pytest.raises(OSError):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_failed_write_leaves_no_part_behind(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(OSError):
        write_atomically(tmp_path / "manifest.json", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("place", ["file", "file/below", "x" * 300, "nul\0", "locked"])
def test_a_directory_that_the_system_refuses_is_a_run_dir_error(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "locked" / "lock").mkdir(parents=True)
    with pytest.raises(RunDirError, match=r"cannot be used.*--output-dir"), new_run_dir(tmp_path / place):
        pass
    if place != "locked":
        with pytest.raises(RunDirError, match=r"cannot be used.*--output-dir"):
            fresh_path(tmp_path / place, "two", at=datetime(2026, 1, 2))


def test_what_fails_inside_a_run_is_no_matter_of_its_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), new_run_dir(tmp_path / "run"):
        raise ValueError("mine")


def test_two_runs_of_one_second_get_two_directories(tmp_path: Path) -> None:
    at = datetime(2026, 1, 2, 3, 4, 5)
    paths = [fresh_path(tmp_path / "runs", "two", at=at) for _ in range(3)]
    assert [path.name for path in paths] == ["two-20260102-030405", "two-20260102-030405-2", "two-20260102-030405-3"]
