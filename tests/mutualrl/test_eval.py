"""`mutualrl eval`: what is a checkpoint, what are the prompts, and the numbers beside those of a run's own evaluation."""

import asyncio
import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console
from synthetic_run import TAUGHT, write_run
from test_agents_together import graded, train
from typer.testing import CliRunner

from agents.config import LoRA, TinyPolicy
from agents.policies.lora import add_adapter, save_adapter
from agents.policies.tiny import build_tiny
from mutualrl.checkpoint_paths import find_checkpoints
from mutualrl.cli import app
from mutualrl.errors import ConfigError, InputError
from mutualrl.eval_settings import read_settings, split_overrides
from mutualrl.evaluation import read_held_out, run_eval
from mutualrl.manifest import Manifest
from mutualrl.rundir import RunDir

SMALL = TinyPolicy(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)


def settings(data: object, *overrides: str, **options: Any) -> Any:
    return read_settings({"data": str(data), "pass_k": [1], **options}, overrides)


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    words = [a + b for a in "abcd" for b in "abcd"]
    path.write_bytes(b"\n".join(msgspec.json.encode({"prompt": f"reverse {w}:", "answer": w[::-1]}) for w in words))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    for each in build_tiny(SMALL, seed=0, dtype=torch.float32):
        each.save_pretrained(path)
    return path


def test_settings_stand_beside_the_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    given = ["one", "max_completion_length=8", str(tmp_path / "a=b"), "org/name"]
    assert split_overrides(given) == (["one", str(tmp_path / "a=b"), "org/name"], ["max_completion_length=8"])
    read = settings("d", "prompt_format=Q: {prompt}", "dtype=bfloat16", limit=None)
    assert (read.prompt_format, read.dtype, read.limit) == ("Q: {prompt}", "bfloat16", None)


@pytest.mark.parametrize(
    ("overrides", "options", "said"),
    [
        (["max_completion_lenght=8"], {}, "did you mean 'max_completion_length'"),
        (["temperature=0"], {}, "temperature: must be > 0"),
        ([], {"pass_k": ["x"]}, "whole numbers separated by commas"),
        ([], {"pass_k": ["1", "8"], "num_samples": 4}, "pass_k: must hold numbers from 1 to num_samples"),
    ],
)
def test_settings_that_cannot_be_used_are_named(overrides: list[str], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings("d", *overrides, **options)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it has neither config"):
        list(find_checkpoints(str(tmp_path)))
    with pytest.raises(InputError, match="no checkpoint at"):
        list(find_checkpoints(str(tmp_path / "gone")))
    unfinished = write_run(tmp_path / "run", TAUGHT)
    with pytest.raises(InputError, match="alpha has no final checkpoint"):
        list(find_checkpoints(str(unfinished)))
    assert [each.path for each in find_checkpoints("org/name")] == ["org/name"]


def test_a_runs_held_out_prompts_are_taken_from_its_config(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", TAUGHT)
    found, tasks = read_held_out(settings(run, limit=5, task="sort"))
    assert found is not None and [(task.name, len(task.heldout)) for task in tasks] == [("sort", 5)]
    with pytest.raises(InputError, match="did you mean 'sort'"):
        read_held_out(settings(run, task="sorted"))
    with pytest.raises(InputError, match="--data"):
        read_held_out(settings(tmp_path / "gone.jsonl"))


@pytest.mark.parametrize("arguments", [["--data", "gone.jsonl"], ["--data", "gone.toml"]])
def test_the_command_ends_with_a_message(arguments: list[str], model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["eval", str(model), *arguments])
    assert isinstance(result.exception, ConfigError | InputError)


@pytest.mark.slow
async def test_a_run_is_evaluated_as_it_evaluated_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = graded({"rule": "isolated"}, agents=2)
    await train(run, tmp_path)
    run_dir = RunDir(tmp_path)
    run_dir.write_config(run)
    run_dir.write_manifest(Manifest(run_id="r", name="r", status="done", pid=0, started="", endpoint=""))
    told = [msgspec.json.decode(line) for line in run_dir.evals.read_bytes().splitlines()]
    own = {(line["agent"], line["task"]): line["correct"] for line in told if line["step"] == run.steps}
    await asyncio.to_thread(run_eval, [str(tmp_path)], settings(tmp_path), as_json=True)
    found = {(line["checkpoint"].rpartition(":")[2], line["task"]): line["correct"] for line in lines_of(capsys)}
    assert found == own


@pytest.mark.slow
def test_an_adapter_is_evaluated_on_its_base_and_compared_pair_by_pair(
    rows: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, _ = build_tiny(SMALL, seed=0, dtype=torch.float32)
    base.name_or_path = str(model)
    add_adapter(base, LoRA(r=2), seed=0)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_adapter(base, adapter)
    chosen = settings(rows, "max_completion_length=4", "batch_size=7", num_samples=4, pass_k=["1", "4"])
    run_eval([str(model), str(adapter)], chosen, as_json=True)
    first, second = lines_of(capsys)
    assert first["gain"] is None and second["gain"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert first["correct"] == second["correct"] and first["pass_at_k"] == second["pass_at_k"]
    assert first["prompts"] == 16 and first["task"] == "rows"
    text = io.StringIO()
    run_eval([str(model), str(adapter)], chosen, as_json=False, console=Console(file=text, width=200))
    assert "pass@4" in text.getvalue() and "over the first" in text.getvalue() and "±0 to ±0" in text.getvalue()
