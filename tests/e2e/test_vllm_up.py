"""A whole run of `mutualrl up` with one agent on its own model and one on vLLM, and what is left when it is killed."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from pathlib import Path

import psutil
import pytest
from processes import alive, eventually

from mutualrl.rundir import RunDir

pytestmark = pytest.mark.vllm

PYTHON = os.environ.get("MUTUALRL_VLLM_PYTHON", str(Path(__file__).parents[2] / ".venv-vllm/bin/python"))
PATIENCE_S = 400.0


def run_file(folder: Path, steps: int) -> Path:
    path = folder / "run.toml"
    tiny = "hidden_size = 64, num_hidden_layers = 1, num_attention_heads = 2"
    path.write_text(f"""
name = "pair"
steps = {steps}
evaluation = {{ every = 1 }}

[[tasks]]
kind = "sort"
name = "sort"
alphabet = "abcd"
length = 2
heldout = 4

[defaults]
prompts_per_step = 4
num_generations = 4
learning_rate = 1e-3
sampling = {{ max_completion_length = 5 }}
sharing = {{ rule = "sgt", lambda = 1.0 }}
warm_start = {{ steps = 30, mix = {{ sort = 1.0 }}, batch_size = 8, learning_rate = 1e-2 }}

[agents.alpha]
policy = {{ kind = "tiny", {tiny} }}

[agents.beta]
policy = {{ kind = "tiny", arch = "gpt_neox", tokenizer = "char", {tiny} }}
sampler = {{ kind = "vllm", python = "{PYTHON}", enforce_eager = true, kv_cache_memory_bytes = 67108864 }}
""")
    return path


async def start_up(config: Path, output_dir: Path) -> Process:
    command = [sys.executable, "-m", "mutualrl", "up", str(config), "--output-dir", str(output_dir)]
    return await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT)


async def test_a_run_with_one_agent_on_vllm(tmp_path: Path) -> None:
    up = await start_up(run_file(tmp_path, 4), tmp_path / "run")
    async with asyncio.timeout(PATIENCE_S):
        output, _ = await up.communicate()
    assert up.returncode == 0, output.decode()
    run_dir = RunDir(tmp_path / "run")
    rows = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    steps = [row for row in rows if row["agent"] == "beta" and "beta/perf/weight_sync_s" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    gaps = [row["beta/sampling/sampling_logp_difference/max"] for row in steps if not row.get("beta/skipped_steps")]
    assert gaps and max(gaps) < 1e-3, "the sampler draws from the weights that the learner has"
    assert run_dir.log("beta.vllm").stat().st_size
    assert run_dir.final_checkpoint("beta").is_dir()


async def test_nothing_outlives_a_killed_run(tmp_path: Path) -> None:
    up = await start_up(run_file(tmp_path, 10**6), tmp_path / "run")
    run_dir = RunDir(tmp_path / "run")
    try:
        await eventually(lambda: run_dir.metrics.exists() and '"beta/loss"' in run_dir.metrics.read_text(), within_s=PATIENCE_S)
        started = psutil.Process(up.pid).children(recursive=True)
        assert any("vllm_server.py" in " ".join(process.cmdline()) for process in started)
    finally:
        up.kill()
    await eventually(lambda: not any(alive(process.pid) for process in started))
