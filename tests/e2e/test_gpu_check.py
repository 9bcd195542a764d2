"""The check for machines with a GPU runs to its end without one, in tiny shapes, and says so when there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    command = [str(ROOT / "benchmarks" / "gpu_check.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_in_tiny_shapes_every_part_that_needs_no_gpu_is_found_to_work() -> None:
    done = gpu_check("--smoke")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["check"] for line in lines] == ["environment", "policy", "policy", "run", "run"]
    assert all(line["ok"] for line in lines)
    policies, runs = lines[1:3], lines[3:]
    assert [line["policy"] for line in policies] == [line["agent"] for line in runs] == ["smollm2", "gemma3"]
    assert all(line["sample_tokens_per_s"] > 0 and line["learn_tokens_per_s"] > 0 for line in policies)
    assert all(line["sampling_logp_difference"] < 0.1 for line in policies)
    assert all(line["steps"] == 3 and line["rescues"] > 0 for line in runs)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_fails_and_names_the_smoke_test() -> None:
    done = gpu_check()
    assert done.returncode == 2
    assert "--smoke" in done.stderr
