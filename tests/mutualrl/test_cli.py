"""The command line: what it prints, its exit codes, what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mutualrl import cli, exit_codes
from mutualrl.errors import ConfigError, RunDirError
from mutualrl.load import load_run
from mutualrl.validate import validate


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Exit code of `mutualrl ARGUMENTS` in this process."""
    monkeypatch.setattr(sys, "argv", ["mutualrl", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "init", "run.toml") == 0
    return tmp_path / "run.toml"


def test_init_writes_a_valid_file_and_never_over_another(
    starter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validate(load_run(starter)) == []
    starter.write_text("mine")
    assert call(monkeypatch, "init", starter) == exit_codes.BAD_CONFIG
    assert "exists already" in capsys.readouterr().err
    assert starter.read_text() == "mine"


def test_dry_run_shows_the_plan_and_starts_nothing(
    starter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code = call(monkeypatch, "up", starter, "steps=3", "agents.beta.sharing.rule=xgrpo", "--dry-run")
    shown = capsys.readouterr().out
    assert code == 0
    for text in ('"steps": 3', "processes", "tiny gpt_neox, char tokenizer", "beta publishes successes", "endpoint"):
        assert text in shown
    assert [path.name for path in starter.parent.iterdir()] == ["run.toml"]


def test_a_bad_file_ends_with_2_and_no_traceback(
    starter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "up", starter, "defaults.learning_rte=3") == exit_codes.BAD_CONFIG
    shown = capsys.readouterr().err
    assert "did you mean 'learning_rate'?" in shown
    assert "Traceback" not in shown
    assert [path.name for path in starter.parent.iterdir()] == ["run.toml"]


def test_a_run_name_that_is_no_file_name_is_refused(
    starter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "up", starter, "--dry-run", "--run-name", "../x") == exit_codes.BAD_CONFIG
    assert "--run-name: `name` must be" in capsys.readouterr().err


def test_a_directory_that_is_not_empty_is_refused(
    starter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "up", starter, "--output-dir", starter.parent) == exit_codes.BAD_CONFIG
    assert f"run directory {starter.parent} already holds something" in capsys.readouterr().err


def test_an_unknown_option_ends_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(monkeypatch, "up", "run.toml", "--no-such-option") == exit_codes.BAD_CONFIG


def test_a_report_on_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "report", tmp_path / "absent") == exit_codes.BAD_CONFIG
    assert "does not exist" in " ".join(capsys.readouterr().err.split())
    assert call(monkeypatch, "report", tmp_path) == exit_codes.BAD_CONFIG
    assert f"no run or comparison in {tmp_path}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("key", "code"), [("steps", 0), ("stepz", 2)])
def test_output_that_nobody_reads_changes_no_exit_code(starter: Path, key: str, code: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mutualrl", "up", str(starter), "--dry-run", f"{key}=3"]
    ended = subprocess.run(command, stdout=writer, stderr=writer, check=False)
    os.close(writer)
    assert ended.returncode == code


def test_ctrl_c_while_python_loads_ends_without_a_traceback() -> None:
    script = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "import mutualrl.cli"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "version") == 0
    assert capsys.readouterr().out.strip() == "0.1.0"


def test_errors_map_to_exit_codes() -> None:
    assert exit_codes.of_error(ConfigError()) == exit_codes.of_error(RunDirError()) == 2
    assert exit_codes.of_error(RuntimeError()) == 1
    assert exit_codes.of_error(KeyboardInterrupt()) == 130


def test_help_imports_nothing_that_is_slow() -> None:
    script = (
        "import sys; sys.argv = ['mutualrl', '--help']\n"
        "from mutualrl import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "slow = {'torch', 'transformers', 'numpy', 'networkx', 'zmq', 'rich', 'matplotlib', 'asyncio'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "compare" in ended.stdout
