"""Runs with an agent of two processes: the numbers of one process, resumed by either, and ended whole."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from processes import alive, eventually

from mutualrl.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]

RUN = """
name = "two"
steps = 4
save_steps = 2
evaluation = { every = 0 }
[[tasks]]
name = "reverse"
kind = "reverse"
heldout = 8
[agents.alpha]
num_processes = 2
prompts_per_step = 6
num_generations = 4
micro_batch_size = 4
learning_rate = 1e-3
policy = { kind = "tiny", hidden_size = 32, num_hidden_layers = 2 }
objective = { beta = 0.1 }
sampling = { max_completion_length = 4 }
sharing = { rule = "isolated" }
rewards = ["benchmarks.gpu_check:lucky"]
"""


async def mutualrl(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mutualrl", *arguments),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def run_to_its_end(*arguments: str) -> None:
    process = await mutualrl(*arguments)
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["alpha/loss"] for line in lines if "alpha/loss" in line]


async def test_two_processes_learn_what_one_learns_also_when_they_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    config, two, one = tmp_path / "run.toml", tmp_path / "two", tmp_path / "one"
    config.write_text(RUN)
    await run_to_its_end("up", str(config), "--output-dir", str(two))
    await run_to_its_end("resume", str(two), "steps=6")
    await run_to_its_end("up", str(config), "steps=6", "agents.alpha.num_processes=1", "--output-dir", str(one))
    assert len(losses(two)) == 6
    assert losses(two) == pytest.approx(losses(one), abs=2e-4)
    assert (two / "checkpoints" / "alpha" / "final" / "model.safetensors").is_file()


async def test_a_process_that_is_killed_ends_its_agent_and_the_run_and_leaves_nobody(tmp_path: Path) -> None:
    config, run_dir = tmp_path / "run.toml", RunDir(tmp_path / "run")
    config.write_text(RUN.replace("steps = 4", "steps = 100000"))
    process = await mutualrl("up", str(config), "--output-dir", str(run_dir.path))
    await eventually(lambda: run_dir.metrics.exists() and run_dir.metrics.read_text(), within_s=120)
    family = psutil.Process(process.pid).children(recursive=True)
    (follower,) = [each for each in family if "mutualrl.follower" in each.cmdline()]
    follower.send_signal(signal.SIGKILL)
    output, _ = await process.communicate()
    assert process.returncode == 1, output.decode()
    assert "rank 1 of the 2 processes of alpha ended with exit code -9" in output.decode()
    assert [each.pid for each in family if alive(each.pid)] == []
