"""What the documents show works: Python runs, TOML is a valid piece of a run file, links lead somewhere."""

import ast
import asyncio
import inspect
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from agents.config import TranslationConfig
from agents.tasks.config import TaskConfig
from exchange import BlobStats, GroupStats, HubConfig, HubStats
from exchange.stats import DiskStats, WorkerStats
from mutualrl import MutualConfig, MutualTrainer
from mutualrl.config import Exchange
from mutualrl.trainer_inputs import read_policies

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tasks_in_toml_are_valid(document: Path) -> None:
    for block in blocks(document, "toml"):
        for task in tomllib.loads(block).get("tasks", []):
            msgspec.convert(task, TaskConfig)


def test_the_readmes_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = (block for block in blocks(ROOT / "README.md", "python") if "asyncio.run" in block)
    exec(compile(program, "README.md", "exec"), {"__name__": "readme"})
    assert "Critique(agent='alpha'" in capsys.readouterr().out


@pytest.mark.parametrize("document", [ROOT / "README.md", ROOT / "docs" / "trainer.md"], ids=lambda path: path.name)
def test_what_is_shown_of_the_trainer_has_arguments_that_it_takes(document: Path) -> None:
    (program,) = (block for block in blocks(document, "python") if "MutualTrainer" in block)
    calls = {ast.unparse(node.func): node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)}
    given = {name: {each.arg: each.value for each in calls[name].keywords} for name in ("MutualTrainer", "MutualConfig")}
    assert given["MutualTrainer"].keys() <= inspect.signature(MutualTrainer).parameters.keys()
    MutualConfig(**{str(name): ast.literal_eval(value) for name, value in given["MutualConfig"].items()})
    tables, _ = read_policies(ast.literal_eval(given["MutualTrainer"]["policies"]))
    assert re.findall(r'policies\["(.+?)"\]', program)[0] in tables


@pytest.mark.slow
def test_the_programs_on_the_exchange_run(capfd: pytest.CaptureFixture[str]) -> None:
    programs = blocks(ROOT / "docs" / "exchange.md", "python")
    assert len(programs) > 10
    namespace: dict[str, object] = {"__name__": "exchange_document"}
    for program in programs[:2]:
        exec(compile(program, "exchange.md", "exec"), namespace)
    assert capfd.readouterr().out == "two letters are missing\n1 on disk\n"
    asyncio.run(typed_in(programs[2:], namespace))


async def typed_in(programs: Sequence[str], namespace: dict[str, object]) -> None:
    """Run pieces one after the other on one event loop, as `python -m asyncio` does."""
    for program in programs:
        code = compile(program, "exchange.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, namespace)
        if inspect.iscoroutine(result):
            await asyncio.wait_for(result, 30)


def section(title: str) -> str:
    _, _, behind = (ROOT / "docs" / "exchange.md").read_text().partition(f"\n## {title}\n")
    return behind.partition("\n## ")[0]


def test_every_guarantee_of_the_exchange_names_tests_that_exist() -> None:
    _, *guarantees = section("What is guaranteed").strip().split("\n\n")
    assert len(guarantees) > 12
    for guarantee in guarantees:
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", guarantee)
        assert tests, guarantee
        for file, name in tests:
            assert re.search(rf"^(async def|def|class) {name}\b", (ROOT / "tests" / file).read_text(), re.MULTILINE), name


def test_every_counter_of_the_exchange_is_documented() -> None:
    told = set(re.findall(r"\w+", section("Statistics")))
    assert {*HubStats.__struct_fields__, *WorkerStats.__struct_fields__, *DiskStats.__struct_fields__} - told == {"run_id"}
    assert {*GroupStats.__struct_fields__, *BlobStats.__struct_fields__} - told == {"kinds", "agents"}


def test_every_setting_of_the_exchange_is_documented() -> None:
    table = re.findall(r"^\| (.*?) \|", section("Settings"), re.MULTILINE)
    assert {name for cell in table for name in re.findall(r"`(\w+)`", cell)} >= set(HubConfig.__struct_fields__)
    (settings,) = blocks(ROOT / "docs" / "running.md", "toml")
    documented = tomllib.loads(settings)["exchange"]
    assert set(documented) == set(Exchange.__struct_fields__)
    assert msgspec.convert(documented, Exchange) == Exchange()


def test_the_programs_on_tokenalign_run() -> None:
    programs = blocks(ROOT / "docs" / "tokenalign.md", "python")
    assert len(programs) > 3
    exec(compile("\n".join(programs), "tokenalign.md", "exec"), {"__name__": "tokenalign_document"})


def test_documented_translation_limits_are_valid() -> None:
    (limits,) = blocks(ROOT / "docs" / "tokenalign.md", "toml")
    msgspec.convert(tomllib.loads(limits)["agents"]["alpha"]["translation"], TranslationConfig)


def test_the_documented_reward_judges() -> None:
    (program,) = blocks(ROOT / "docs" / "tasks-and-rewards.md", "python")
    namespace: dict[str, object] = {}
    exec(compile(program, "tasks-and-rewards.md", "exec"), namespace)
    brevity = namespace["brevity"]
    assert callable(brevity)
    assert brevity(completions=["Paris ", "x", "y"], answer=["Paris", "z", None]) == [1.0, 0.0, None]
