"""What the documents show works: Python runs, TOML is a valid piece of a run file, links lead somewhere."""

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from agents.config import TranslationConfig
from agents.tasks.config import TaskConfig

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
    (program,) = blocks(ROOT / "README.md", "python")
    exec(compile(program, "README.md", "exec"), {"__name__": "readme"})
    assert "Critique(agent='alpha'" in capsys.readouterr().out


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
