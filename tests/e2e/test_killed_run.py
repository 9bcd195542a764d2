"""A real run whose `mutualrl up` is killed goes on with `mutualrl resume`, and ends as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from pathlib import Path

import pytest
from processes import HANG_S, eventually

from mutualrl.rundir import RunDir

pytestmark = [pytest.mark.soak, pytest.mark.timeout(240)]

RUN_FILE = """
name = "killed"
steps = 6
mode = "lockstep"
save_steps = 2
evaluation = { every = 3 }
tasks = [{ kind = "reverse", name = "reverse", alphabet = "abc", length = 2, heldout = 2 }]
[defaults]
policy = { kind = "tiny", hidden_size = 16, num_hidden_layers = 1, num_attention_heads = 2 }
sharing = { rule = "sgt", lambda = 1.0 }
prompts_per_step = 4
num_generations = 2
learning_rate = 1e-3
sampling = { max_completion_length = 4 }
warm_start = { steps = 20, mix = { reverse = 1.0 }, learning_rate = 1e-2 }
[agents.alpha]
[agents.beta]
"""


async def mutualrl(*arguments: object) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mutualrl", *map(str, arguments)),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


async def shown_by(process: Process) -> str:
    async with asyncio.timeout(3 * HANG_S):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


def result(run_dir: RunDir) -> tuple[list[bytes], list[dict[str, object]]]:
    """The final weights and optimizers, and the evaluations without times."""
    parts = [run_dir.final_checkpoint(name) for name in ("alpha", "beta")]
    files = [(part / name).read_bytes() for part in parts for name in ("model.safetensors", "learner.safetensors")]
    evaluations = [json.loads(line) for line in run_dir.evals.read_text().splitlines()]
    kept = [{key: value for key, value in line.items() if key != "wall_s"} for line in evaluations]
    return files, sorted(kept, key=lambda line: (line["agent"], line["step"]))


async def test_a_killed_run_goes_on_and_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(RUN_FILE)
    whole, broken = RunDir(tmp_path / "whole"), RunDir(tmp_path / "broken")
    await shown_by(await mutualrl("up", config, "--output-dir", whole.path))
    up = await mutualrl("up", config, "--output-dir", broken.path, "defaults.min_step_s=0.5")
    await eventually((broken.checkpoints / "step-000002.json").exists, within_s=3 * HANG_S)
    up.kill()
    await up.communicate()
    assert not (broken.checkpoints / "step-000006.json").exists()
    shown = await shown_by(await mutualrl("resume", broken.path))
    assert "going on behind step" in shown
    assert result(broken) == result(whole)
    assert broken.read_manifest().status == "done"
