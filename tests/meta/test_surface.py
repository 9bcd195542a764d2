"""What users type and copy: commands and options, example run files, the public names of the packages."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest
import typer

from mutualrl.cli import app
from mutualrl.load import load_run
from mutualrl.starter import STARTER
from mutualrl.validate import validate

ROOT = Path(__file__).parents[2]

COMMANDS = {
    "up": {"config", "overrides", "--dry-run", "--run-name", "--output-dir"},
    "resume": {"run", "overrides"},
    "replay": {"run", "--agent", "--step"},
    "init": {"path"},
    "report": {"run"},
    "log": {"run", "--kind", "--agent", "--prompt", "--after", "--limit", "--json"},
    "compare": {"config", "overrides", "--rules", "--seeds", "--output-dir", "--require-gain"},
    "eval": {"checkpoints", "--data", "--task", "--limit", "--reward", "--num-samples", "--pass-k", "--json"},
    "align": {"text", "--from", "--to", "--file", "--json", "--svg", "--from-pattern", "--to-pattern"},
    "keys": {"directory", "names", "--observer"},
    "version": set(),
}


def test_commands_and_their_options() -> None:
    group = typer.main.get_command(app)
    found = {
        name: {
            option if option.startswith("--") else parameter.name for parameter in command.params for option in parameter.opts
        }
        for name, command in group.commands.items()  # type: ignore[attr-defined]
    }
    assert {name: options - {"--help"} for name, options in found.items()} == COMMANDS


@pytest.mark.parametrize("path", [*sorted((ROOT / "examples").rglob("*.toml")), STARTER], ids=lambda path: path.name)
def test_every_run_file_that_is_shipped_is_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run = load_run(path)
    assert run.agents
    assert validate(run) == []


def test_the_quickstart_is_among_the_examples() -> None:
    assert (ROOT / "examples" / "quickstart.toml").exists()


def test_help_in_the_makefile_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    told = set(re.findall(r'@echo "make ([\w-]+)', makefile))
    assert told == set(phony.split()) - {"help"}


def test_pins_are_exact_and_cover_what_the_project_asks_for() -> None:
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = {
        re.split(r"[<>=\[ ]", requirement)[0].lower()
        for requirement in [*project["dependencies"], *extras["train"], *extras["data"], *extras["dev"]]
    } - {"mutualrl"}
    assert asked - {name.lower() for name in pins} == set()
    assert pins["torch"] == "2.13.0"


@pytest.mark.parametrize("package", ["mutualrl", "agents", "exchange", "tokenalign", "federated"])
def test_public_names_exist(package: str) -> None:
    module = importlib.import_module(package)
    names = getattr(module, "__all__", [])
    assert [name for name in names if not hasattr(module, name)] == []
    assert len(names) == len(set(names))
