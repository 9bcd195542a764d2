"""A GRPO step on a real model, generation included, against TRL's GRPOTrainer on the same machine at the same time.

    python benchmarks/learner.py [--json] [--runs 3] [--model models/smollm2] [--dtype auto] [--prompts 8] [--tokens 32]

Both sides: SmolLM2-135M-Instruct, 8 prompts of about 150 tokens × 4 completions × 32 new tokens, no end tokens, one microbatch,
no gradient checkpoints, no reference, full support at temperature 1, weights in one dtype, AdamW with float32 moments and
master weights (this package's, lent to TRL) and clipping. Each side is a process of its own; after a step to warm up, they
take turns. dtype "auto" is bfloat16 where the processor multiplies it at least half as fast as float32, else float32; what was
taken is printed with the name of the line.

* step_vs_trl: completion tokens per second of whole steps.
* memory_vs_trl: most gigabytes that the process ever held. memory_above_libraries: less what its imports alone take.
* logprob_gap: greatest difference between a sampled token's log-prob and the learner's, float32. logprob_gap_bf16: in bfloat16,
  as it comes, on fewer tokens.
"""

from __future__ import annotations

import os
import sys

# Python puts a script's own folder first on the path, where `exchange` would be the benchmark of that name.
sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]  # noqa: PTH100, PTH120

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch

from benchmarks.exchange import Line

ROLES = Path(__file__).with_name("learner_roles.py")
GAP_BOUND = 1e-3


class Side:
    """A process that makes one training step for each line that it is told."""

    def __init__(self, name: str, setting: dict[str, object]) -> None:
        command = [sys.executable, str(ROLES), name, json.dumps(setting)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._name = name
        self._hear()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"a process of the benchmark has ended, got side={self._name}; run {ROLES.name} alone to see why"
            )
        return line

    def step(self) -> float:
        """One step; its seconds, or what else the side answers with."""
        assert self._process.stdin is not None
        print("step", file=self._process.stdin, flush=True)
        return float(self._hear())

    def close(self) -> dict[str, float]:
        """End it; bytes at its peak, and of its libraries."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        memory: dict[str, float] = json.loads(self._hear())
        self._process.wait()
        return memory


def native_dtype(threads: int) -> Literal["float32", "bfloat16"]:
    """bfloat16 where the processor multiplies it at least half as fast as float32."""
    torch.set_num_threads(threads)
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.ones(512, 576, dtype=dtype), torch.ones(576, 1536, dtype=dtype)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            left @ right
            times.append(time.perf_counter() - began)
        seconds[dtype] = min(times)
    return "bfloat16" if seconds[torch.bfloat16] <= 2 * seconds[torch.float32] else "float32"


def against_trl(setting: dict[str, object], tokens: int, runs: int) -> Iterator[Line]:
    """Speed, then memory, of the same processes."""
    sides = [Side("ours", setting), Side("trl", setting)]
    for side in sides:
        side.step()
    times: list[list[float]] = [[], []]
    for _ in range(runs):
        for side, seconds in zip(sides, times, strict=True):
            seconds.append(side.step())
    speeds = [tokens / statistics.median(each) for each in times]
    ratios = tuple(theirs / own for own, theirs in zip(*times, strict=True))
    what = f"[{setting['dtype']}]"
    yield line(f"step_vs_trl {what}", *speeds, wanted=">= 1.3", unit="tokens/s", ratios=ratios, ratio=statistics.median(ratios))
    own, theirs = [side.close() for side in sides]
    yield line(f"memory_vs_trl {what}", own["peak"] / 1e9, theirs["peak"] / 1e9, wanted="<= 0.8", unit="GB")
    above = [each["peak"] - each["libraries"] for each in (own, theirs)]
    yield line(f"memory_above_libraries {what}", above[0] / 1e9, above[1] / 1e9, wanted="", unit="GB")


def line(
    name: str,
    value: float,
    reference: float,
    *,
    wanted: str,
    unit: str,
    ratios: Sequence[float] = (),
    ratio: float | None = None,
) -> Line:
    """A result as it is printed."""
    ratio = value / reference if ratio is None else ratio
    return Line(
        name=name,
        value=value,
        reference=reference,
        ratio=ratio,
        wanted=wanted,
        unit=unit,
        runs=max(1, len(ratios)),
        ratios=tuple(ratios),
    )


def gap(setting: dict[str, object], dtype: str) -> float:
    """Greatest difference between the sampler's log-probs and the learner's, in one step."""
    side = Side("gap", {**setting, "dtype": dtype, "prompts": 2, "completions": 2, "tokens": 16 if dtype == "float32" else 4})
    greatest = side.step()
    side.close()
    return greatest


def main() -> None:
    """Print one line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", default=os.environ.get("MUTUALRL_SMOLLM2", "models/smollm2"), help="directory")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--completions", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    setting: dict[str, object] = {
        "model": options.model,
        "dtype": native_dtype(options.threads) if options.dtype == "auto" else options.dtype,
        "prompts": options.prompts,
        "completions": options.completions,
        "tokens": options.tokens,
        "threads": options.threads,
        "gradient_checkpointing": False,
    }

    def results() -> Iterator[Line]:
        yield from against_trl(setting, options.prompts * options.completions * options.tokens, options.runs)
        yield line("logprob_gap", gap(setting, "float32"), GAP_BOUND, wanted="value <= 0.001", unit="nats")
        yield line("logprob_gap_bf16", gap(setting, "bfloat16"), GAP_BOUND, wanted="", unit="nats")

    for each in results():
        told = f"{each.name:<34}{each.value:10.4g} {each.unit:<9} reference {each.reference:10.4g}   ratio {each.ratio:.3f}"
        print(json.dumps(asdict(each)) if options.json else f"{told}   wanted: {each.wanted}", flush=True)


if __name__ == "__main__":
    main()
