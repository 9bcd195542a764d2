"""Whether all of mutualrl works on this machine's GPU, and how fast: without a network, in at most eight minutes.

    benchmarks/gpu_check.sh [--smoke]             # looks for an interpreter with torch first, then runs this
    python benchmarks/gpu_check.py [--smoke]

One JSON object per line, one or more for each part; exit code 1 when a part failed, 2 without a GPU:

    environment   versions, GPU, memory
    policy        SmolLM2-135M and Gemma-3-270M in their real shapes with random weights, bfloat16, sdpa: tokens per second
                  and peak memory of sampling and of learning; how far the log-probs of the two lie apart
    run           `mutualrl up`, both agents on one device, 20 steps with sgt; some rescues must happen
    vllm          the same policies through vLLM, where an interpreter with vLLM is there (.venv-vllm, or this one)
    tests         the tests that need a GPU

--smoke: tiny shapes on the CPU, without the last two parts; shows that the check itself works.
"""

from __future__ import annotations

import os
import sys

# Python puts a script's own folder first on the path, where `exchange` would be the benchmark of that name.
sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]  # noqa: PTH100, PTH120

import argparse
import json
import subprocess
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agents.config import AgentConfig, HFPolicy, Sampling, TinyPolicy
from agents.objectives.config import Objective
from agents.policies.policy import Policy, build_policy
from agents.policies.tiny import build_tiny
from agents.rows import Row, own_rows
from agents.samplers.choose import build_sampler
from agents.samplers.config import VLLM
from agents.samplers.sampler import Sampler
from agents.tasks.config import Reverse
from agents.tasks.load import load_task
from agents.tasks.schedule import draw
from agents.types import Prompt
from exchange.types import Version
from mutualrl.config import Run
from mutualrl.load import build_run
from mutualrl.manifest import installed_versions
from mutualrl.wiring import build_learner

ROOT = Path(__file__).parents[1]
LEARN_STEPS = 3
RUN_TIMEOUT_S, TESTS_TIMEOUT_S = 240, 60
STOP = "e"
"""Ends a completion of the whole run: one of random weights that never ended would be too long for the other's tokenizer."""
LUCKY = 8
"""One text in so many is a success: groups fail throughout, and their peers' mostly do not."""

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "vocab_size": 49_152,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
}
GEMMA3 = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "vocab_size": 262_144,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
}
SMALLER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 1536,
}

Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is run: prompts × generations completions of `tokens` tokens a step."""

    smoke: bool
    device: str
    prompts: int
    generations: int
    tokens: int
    rows: int
    steps: int


FULL = Size(smoke=False, device="cuda", prompts=32, generations=8, tokens=128, rows=64, steps=20)
SMOKE = Size(smoke=True, device="cpu", prompts=8, generations=4, tokens=24, rows=16, steps=3)


def lucky(completions: Sequence[Any], **_columns: object) -> list[float]:
    """A reward that random weights meet now and then, and on which all agents agree."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [float(zlib.crc32(text.encode()) % LUCKY == 0) for text in texts]


def make_pair(directory: Path, size: Size) -> dict[str, Path]:
    """The two models with random weights, their tokenizers small and of different merges, padded to the real vocabularies."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    paths = {}
    for name, shape, vocab in (("smollm2", SMOLLM2, 400), ("gemma3", GEMMA3, 1200)):
        _, tokenizer = build_tiny(TinyPolicy(hidden_size=8, vocab_size=vocab), seed=0, dtype=torch.float32)
        shape = shape | (SMALLER if size.smoke else {}) | {"tie_word_embeddings": True}
        shape |= {f"{each}_token_id": getattr(tokenizer, f"{each}_token_id") for each in ("bos", "eos", "pad")}
        torch.manual_seed(0)
        config: Any = LlamaConfig(**shape) if name == "smollm2" else Gemma3TextConfig(**shape)
        model: Any = (LlamaForCausalLM if name == "smollm2" else Gemma3ForCausalLM)(config)
        paths[name] = directory / name
        model.to(torch.bfloat16).save_pretrained(paths[name])
        tokenizer.model_max_length = config.max_position_embeddings
        tokenizer.save_pretrained(paths[name])
    return paths


def agent_table(path: Path, size: Size) -> Line:
    """An agent's part of a run file, for the policy in a directory."""
    return {
        "policy": {"kind": "hf", "path": str(path), "attn_implementation": "sdpa"},
        "device": size.device,
        "dtype": "bfloat16",
        "learning_rate": 1e-5,
        "prompts_per_step": size.prompts,
        "num_generations": size.generations,
        "micro_batch_size": size.rows,
        "rewards": ["benchmarks.gpu_check:lucky"],
        "sampling": {"max_completion_length": size.tokens},
        "sharing": {"rule": "sgt", "lambda": 0.3},
    }


def environment() -> Line:
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "python": sys.version.split()[0],
        **{f"version_{name}": version for name, version in installed_versions().items()},
        "cuda": torch.version.cuda,
        "gpu": gpu.name if gpu else None,
        "gpu_memory_bytes": gpu.total_memory if gpu else None,
        "bfloat16": torch.cuda.is_bf16_supported() if gpu else None,
    }


def measure_policy(config: AgentConfig, size: Size) -> Line:
    """Sampling and learning in this process, one policy; the second draw and the last step are timed."""
    assert isinstance(config.policy, HFPolicy)
    policy = build_policy(config.policy, seed=0, device=size.device, dtype=config.dtype, threads=config.threads)
    line: Line = {"policy": Path(config.policy.path).name, "device": str(policy.device), "dtype": config.dtype}
    sampler = build_sampler(config, policy, log=Path(os.devnull))
    drawn, sampling = measure_sampling(sampler, policy, size)
    line |= sampling | {"attention": policy.model.config._attn_implementation}
    learner = build_learner(config, policy)
    _start_peak(size)
    seconds = []
    for _ in range(LEARN_STEPS):
        metrics = learner.step(drawn, prompts=size.prompts)
        seconds.append(metrics["learn_time"])
    tokens = sum(len(row.ids) for row in drawn)
    difference = metrics["sampling/sampling_logp_difference/mean"]
    if metrics["non_finite"] or not np.isfinite(metrics["loss"]):
        raise RuntimeError(f"the learner's step is not finite, got {metrics}")
    return line | {
        "learn_tokens_per_s": tokens / seconds[-1],
        "learn_peak_bytes": _peak(size),
        "sampling_logp_difference": difference,
    }


def measure_sampling(sampler: Sampler, policy: Policy, size: Size) -> tuple[list[Row], Line]:
    """Rows of a step for the learner, half of them with positive advantages, and how fast they were drawn."""
    prompts = prompts_of(size)
    sampler.preflight(prompts)
    for step in range(2):
        sampler.update(Version(0, step))
        _start_peak(size)
        started = time.perf_counter()
        groups = sampler.sample(prompts, num_generations=size.generations, step=step, version=Version(0, step), seed=0)
        seconds = time.perf_counter() - started
    advantages = [np.resize(np.array([1.0, -1.0]), size.generations)] * len(groups)
    rows = own_rows(groups, advantages, Objective())
    tokens = sum(len(row.ids) for row in rows)
    return rows, {"sample_tokens_per_s": tokens / seconds, "sample_tokens": tokens, "sample_peak_bytes": _peak(size)}


def prompts_of(size: Size) -> list[Prompt]:
    task = load_task(Reverse(name="reverse"), seed=0)
    return draw(task.train, seed=0, step=0, count=size.prompts)


def _start_peak(size: Size) -> None:
    if size.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def _peak(size: Size) -> int | None:
    if size.device != "cuda":
        return None
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def whole_run(tables: Line, directory: Path, size: Size) -> Iterator[Line]:
    """`mutualrl up` with both agents on the one device, in processes of their own."""
    run_file, run_dir = directory / "run.toml", directory / "run"
    run_file.write_text(to_toml(tables))
    command = [sys.executable, "-m", "mutualrl", "up", str(run_file), "--output-dir", str(run_dir)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    started = time.perf_counter()
    most = 0
    free = torch.cuda.mem_get_info()[0] if size.device == "cuda" else 0
    with (directory / "up.log").open("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                if time.perf_counter() - started > RUN_TIMEOUT_S:
                    raise TimeoutError(f"the run took longer than {RUN_TIMEOUT_S} s")
                if size.device == "cuda":
                    most = max(most, free - torch.cuda.mem_get_info()[0])
                time.sleep(0.2)
        finally:
            process.terminate()
            process.wait()
        if process.returncode:
            log.seek(0)
            raise RuntimeError(f"mutualrl up ended with {process.returncode}:\n{log.read()[-4000:]}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for name in tables["agents"]:
        steps = [line for line in lines if f"{name}/step_time" in line]

        def late(metric: str, name: str = name, steps: Sequence[Line] = steps) -> float:
            """Median over the second half of the steps."""
            values = [step[f"{name}/{metric}"] for step in steps[len(steps) // 2 :] if f"{name}/{metric}" in step]
            return float(np.median(values))

        rescues = sum(step[f"{name}/rescues"] for step in steps)
        if len(steps) < size.steps or not rescues:
            raise RuntimeError(f"{name} made {len(steps)} of {size.steps} steps with {rescues} rescues")
        yield {
            "agent": name,
            "steps": len(steps),
            "wall_s": time.perf_counter() - started,
            "device_bytes": most or None,
            "rescues": rescues,
            "tokens_per_s": late("tokens_per_s"),
            "sample_s": late("sample_time"),
            "learn_s": late("learn_time"),
            "sampling_logp_difference": late("sampling/sampling_logp_difference/mean"),
        }


def to_toml(tables: Line, path: str = "") -> str:
    """Tables of scalars and short lists as TOML; JSON's spelling of those is TOML's."""
    scalars = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in scalars.items() if key != "tasks"]
    for task in tables.get("tasks", []):
        lines += ["[[tasks]]", *(f"{key} = {json.dumps(value)}" for key, value in task.items())]
    for key, value in tables.items():
        if isinstance(value, dict):
            lines += [f"[{path}{key}]", to_toml(value, f"{path}{key}.")]
    return "\n".join(lines)


def through_vllm(config: AgentConfig, size: Size, log: Path) -> Line:
    for python in (ROOT / ".venv-vllm/bin/python", Path(sys.executable)):
        found = python.is_file() and subprocess.run([python, "-c", "import vllm"], capture_output=True, check=False)
        if found and found.returncode == 0:
            break
    else:
        return {"skipped": "no interpreter with vLLM"}
    assert isinstance(config.policy, HFPolicy)
    policy = build_policy(config.policy, seed=0, device=size.device, dtype=config.dtype, threads=config.threads)
    line: Line = {"policy": Path(config.policy.path).name}
    started = time.perf_counter()
    sampler = build_sampler(
        AgentConfig(
            policy=config.policy, sampling=Sampling(max_completion_length=size.tokens), sampler=VLLM(python=str(python))
        ),
        policy,
        log=log,
    )
    try:
        _, measured = measure_sampling(sampler, policy, size)
    finally:
        sampler.close()
    return line | measured | {"sample_peak_bytes": None, "wall_s": time.perf_counter() - started}


def gpu_tests() -> Line:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cuda", "-o", "addopts=", "tests/agents"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    return {"result": done.stdout.strip().splitlines()[-1]}


class Report:
    """Prints a line for each result, and goes on behind a part that fails."""

    def __init__(self) -> None:
        self.failed = False

    def part(self, name: str, work: Callable[[], Line | Iterator[Line]]) -> None:
        try:
            result = work()
            for line in [result] if isinstance(result, dict) else result:
                print(json.dumps({"check": name, "ok": True} | line), flush=True)
        except Exception as error:  # whatever one part meets on a machine, the others tell more
            self.failed = True
            traceback.print_exc()
            print(json.dumps({"check": name, "ok": False, "error": f"{type(error).__name__}: {error}"}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--steps", type=int, help="of the run; default 20, or 3 in a smoke test")
    arguments = parser.parse_args()
    size = SMOKE if arguments.smoke else FULL
    size = replace(size, steps=arguments.steps or size.steps)
    report = Report()
    report.part("environment", environment)
    if not (arguments.smoke or torch.cuda.is_available()):
        print("torch sees no GPU here; --smoke runs the check with tiny shapes on the CPU", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        pair = make_pair(directory, size)
        tables: Line = {
            "name": "gpu-check",
            "mode": "lockstep",
            "steps": size.steps,
            "evaluation": {"every": 0},
            "tasks": [{"name": "reverse", "kind": "reverse", "heldout": 8}],
            "agents": {name: agent_table(path, size) for name, path in pair.items()},
        }
        run: Run = build_run(tables, source="gpu_check")
        for table in tables["agents"].values():
            table["sampling"] = table["sampling"] | {"stop": [STOP]}
        for config in run.agents.values():
            report.part("policy", lambda config=config: measure_policy(config, size))  # type: ignore[misc]
        if size.device == "cuda":
            torch.cuda.empty_cache()
        report.part("run", lambda: whole_run(tables, directory, size))
        if not size.smoke:
            for config in run.agents.values():
                report.part("vllm", lambda config=config: through_vllm(config, size, directory / "vllm.log"))  # type: ignore[misc]
            report.part("tests", gpu_tests)
    sys.exit(report.failed)


if __name__ == "__main__":
    main()
