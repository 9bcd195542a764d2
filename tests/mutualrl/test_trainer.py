"""Whole runs of tiny policies from a program: the same numbers as agents on their own, and every way to end."""

import asyncio
import os
import runpy
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from test_agents_together import assert_equal, graded, overlap, train
from transformers import AutoModelForCausalLM

from agents.errors import CallbackError, RewardError
from agents.policies.tiny import build_tiny
from mutualrl import Callback, MutualConfig, MutualTrainer
from mutualrl.rundir import RunDir
from mutualrl.trainer import TrainResult
from mutualrl.validate import validate

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer.py"
ROWS = [{"prompt": f"reverse {a}{b}:", "answer": b + a} for a in "abcd" for b in "abcd"]


class Journal(Callback):
    def __init__(self) -> None:
        self.events: list[tuple[str, str, int]] = []

    def on_train_begin(self, policy: str) -> None:
        self.events.append(("begin", policy, 0))

    def on_step_end(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        assert "reward" in metrics
        self.events.append(("step", policy, step))

    def on_evaluate(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        assert all(name.startswith("eval/") for name in metrics)
        self.events.append(("evaluate", policy, step))

    def on_log(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append(("log", policy, step))

    def on_save(self, policy: str, step: int, path: Path) -> None:
        assert (path / "config.json").is_file()
        self.events.append(("save", policy, step))

    def on_train_end(self, policy: str, step: int) -> None:
        self.events.append(("end", policy, step))


class At(Callback):
    """Does something at the end of alpha's second step."""

    def __init__(self, act: Any) -> None:
        self._act = act

    def on_step_end(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        if (policy, step) == ("alpha", 2):
            self._act()


def settings(tmp_path: Path, **more: object) -> MutualConfig:
    usual = {"max_steps": 3, "prompts_per_step": 4, "max_completion_length": 4}
    return MutualConfig(output_dir=tmp_path, **(usual | more))


def long(tmp_path: Path) -> MutualConfig:
    return settings(tmp_path, mode="lockstep", max_steps=10_000)


def policies() -> dict[str, Any]:
    """The quickstart's pair in small, with groups of unequal size."""
    agents = graded({"rule": "isolated"}, agents=2).agents
    sizes = {"alpha": 4, "beta": 8}
    return {name: {"policy": agents[name].policy, "num_generations": size} for name, size in sizes.items()}


def threads_left() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith(("torch", "trainer", "build"))]


def test_a_trainer_and_agents_on_their_own_reach_the_same_weights(tmp_path: Path) -> None:
    run = graded({"rule": "sgt", "gate": "off", "threshold": 0.5}, agents=2)
    (tmp_path / "alone").mkdir()
    expected = asyncio.run(train(run, tmp_path / "alone"))
    journal = Journal()
    trainer = MutualTrainer(
        policies=run.agents,
        reward_funcs=overlap,
        args=MutualConfig(output_dir=tmp_path, max_steps=run.steps, mode="lockstep", eval_steps=2, report_to="tensorboard"),
        train_dataset=run.tasks,
        callbacks=[journal],
    )
    result = trainer.train()
    assert result.finished and threads_left() == []
    for name, policy in result.policies.items():
        assert_equal(expected[name], dict(policy.model.named_parameters()))
        assert policy.path is not None
        saved = AutoModelForCausalLM.from_pretrained(policy.path)
        assert_equal(expected[name], dict(saved.named_parameters()))
        own = [(event, step) for event, agent, step in journal.events if agent == name]
        assert [each for each in own if each[0] != "log"] == [
            ("begin", 0), ("evaluate", 0), ("step", 1), ("step", 2), ("evaluate", 2), ("step", 3), ("step", 4),
            ("evaluate", 4), ("save", 4), ("end", 4),
        ]  # fmt: skip
        assert len([each for each in own if each[0] == "log"]) == len(policy.log_history) >= 7
        assert policy.metrics["step"] == 4 and "eval/reverse/accuracy" in policy.metrics
    found = {each.name for each in result.run_dir.iterdir()}
    files = {"config.json", "manifest.json", "metrics.jsonl", "evals.jsonl", "exchange.json", "report.html"}
    assert found >= files | {"records", "tensorboard", "checkpoints"}
    run_dir = RunDir(result.run_dir)
    assert run_dir.read_manifest().status == "done" and validate(run_dir.read_config()) == []


async def test_a_notebooks_loop_runs_it_with_objects_that_no_config_can_hold(tmp_path: Path) -> None:
    from datasets import Dataset

    threads = torch.get_num_threads()
    judged: list[str] = []

    def judge(completions: list[str], answer: list[str], policy: str, **_: object) -> list[float]:
        judged.append(policy)
        return overlap(completions, answer)

    given = policies()
    model, tokenizer = build_tiny(given["beta"]["policy"], seed=3, dtype=torch.float32)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    trainer = MutualTrainer(
        policies={"alpha": given["alpha"], "beta": given["beta"] | {"policy": (model, tokenizer), "learning_rate": 1e-2}},
        reward_funcs=judge,
        args=settings(tmp_path),
        train_dataset=Dataset.from_list(ROWS[4:]),
        eval_dataset={"seen": ROWS[:4]},
    )
    result = await trainer.train_async()
    assert result.finished and set(judged) == {"alpha", "beta"} and torch.get_num_threads() == threads
    assert result.policies["beta"].model is model
    assert any(not torch.equal(before[name], each) for name, each in model.named_parameters())
    for name, group in (("alpha", 4), ("beta", 8)):
        metrics = result.policies[name].metrics
        assert metrics["rows/own"] == 4 * group and "eval/seen/accuracy" in metrics and "eval/train/accuracy" not in metrics
    with pytest.raises(RuntimeError, match="trains once"):
        trainer.train()


def stopped_at_step_two(result: TrainResult | Path) -> None:
    path = result.run_dir if isinstance(result, TrainResult) else result
    assert RunDir(path).read_manifest().status == "stopped"
    for name in ("alpha", "beta"):
        assert any((path / "checkpoints" / name).glob("step-*")) and not RunDir(path).final_checkpoint(name).exists()
    assert threads_left() == []


async def test_a_callback_may_stop_the_run_also_where_a_loop_is_running(tmp_path: Path) -> None:
    stop = Callback()
    trainer = MutualTrainer(policies(), overlap, long(tmp_path), ROWS, callbacks=[stop])
    stop.on_step_end = At(trainer.stop).on_step_end  # type: ignore[method-assign]
    result = trainer.train()
    assert not result.finished and result.policies["alpha"].path is None
    stopped_at_step_two(result)


def test_ctrl_c_leaves_checkpoints_and_no_thread(tmp_path: Path) -> None:
    interrupt = At(lambda: os.kill(os.getpid(), signal.SIGINT))
    trainer = MutualTrainer(policies(), overlap, long(tmp_path), ROWS, callbacks=[interrupt])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    (path,) = tmp_path.iterdir()
    stopped_at_step_two(path)


def test_a_callback_that_raises_ends_the_run_with_its_name(tmp_path: Path) -> None:
    trainer = MutualTrainer(policies(), overlap, settings(tmp_path), ROWS, callbacks=[At(lambda: 1 / 0)])
    with pytest.raises(CallbackError, match="callback 'At' failed in on_step_end: ZeroDivisionError"):
        trainer.train()
    (path,) = tmp_path.iterdir()
    assert RunDir(path).read_manifest().status == "failed" and threads_left() == []


def test_a_reward_that_raises_ends_the_run(tmp_path: Path) -> None:
    def fail(completions: list[str], policy: str) -> list[float]:
        return [0.0] * (len(completions) - (policy == "beta"))

    with pytest.raises(RewardError, match="'fail'"):
        MutualTrainer(policies(), fail, settings(tmp_path), ROWS).train()
    assert threads_left() == []


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["alpha", "beta"]
    assert all((tmp_path / line.split("saved in ")[1]).is_dir() for line in lines)
