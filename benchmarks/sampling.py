"""Sampling speed of a tiny policy, against transformers' `generate` on the same prompts in the same process.

    python benchmarks/sampling.py [--repeats 7] [--json]

Prints the medians over the repeats, with their ratio (above 1: HFSampler is faster), for the two tiny architectures:
32 prompts × 6 completions × at most 8 tokens on one thread. Both draw at temperature 1 with full support and return the
log-probs of what they drew. `--json` gives one object per line.
"""

from __future__ import annotations

import os
import sys

# Python puts a script's own folder first on the path, where `exchange` would be the benchmark of that name.
sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]  # noqa: PTH100, PTH120

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from transformers import GenerationConfig

from agents.config import Sampling, TinyPolicy, WarmStart
from agents.policies.policy import Policy, build_policy
from agents.samplers.hf import HFSampler
from agents.tasks.config import Reverse, Sort
from agents.tasks.load import load_task
from agents.tasks.schedule import draw
from agents.types import Prompt
from agents.warm_start import warm_start
from exchange.types import Version

PROMPTS, GENERATIONS, TOKENS = 32, 6, 8
TINY: tuple[tuple[Literal["llama", "gpt_neox"], Literal["byte_bpe", "char"]], ...] = (
    ("llama", "byte_bpe"),
    ("gpt_neox", "char"),
)


@torch.inference_mode()
def generate(policy: Policy, prompts: list[Prompt], step: int) -> None:
    """The same work through `generate`, log-probs from its raw logits included."""
    rendered = [policy.tokenizer.render(prompt.messages) for prompt in prompts]
    width = max(len(ids) for ids in rendered)
    ids = np.full((len(prompts), width), policy.tokenizer.pad_id, dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, prompt_ids in enumerate(rendered):
        ids[row, width - len(prompt_ids) :] = prompt_ids
        mask[row, width - len(prompt_ids) :] = 1
    torch.manual_seed(step)
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        top_k=0,
        num_return_sequences=GENERATIONS,
        max_new_tokens=TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=policy.tokenizer.pad_id,
        eos_token_id=list(policy.tokenizer.eos_ids),
    )
    generate_tokens: Any = policy.model.generate
    output = generate_tokens(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), generation_config=config)
    drawn = output.sequences[:, width:]
    log_probs = torch.log_softmax(torch.stack(output.logits, dim=1), dim=-1)
    log_probs.gather(-1, drawn[..., None])


def median_seconds(work: Callable[[int], object], repeats: int) -> float:
    """Median wall time of `work(step)` after one call to warm up."""
    times = []
    for step in range(repeats + 1):
        start = time.perf_counter()
        work(step)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    tasks = [load_task(Reverse(name="reverse"), seed=0), load_task(Sort(name="sort"), seed=0)]
    prompts = draw([prompt for task in tasks for prompt in task.train], seed=0, step=0, count=PROMPTS)
    for arch, tokenizer in TINY:
        policy = build_policy(TinyPolicy(arch=arch, tokenizer=tokenizer), seed=0, device="cpu", dtype="float32", threads=1)
        # A few supervised steps give completions the lengths that training meets.
        warm_start(policy, WarmStart(steps=40, mix={"reverse": 0.5, "sort": 0.5}), tasks, seed=0)
        sampler = HFSampler(policy, Sampling(max_completion_length=TOKENS))

        def sample(step: int, sampler: HFSampler = sampler) -> object:
            return sampler.sample(prompts, num_generations=GENERATIONS, step=step, version=Version(0, 0), seed=0)

        def baseline(step: int, policy: Policy = policy) -> object:
            return generate(policy, prompts, step)

        ours, theirs = median_seconds(sample, arguments.repeats), median_seconds(baseline, arguments.repeats)
        row = {"policy": f"{arch}/{tokenizer}", "sampler_s": ours, "generate_s": theirs, "ratio": theirs / ours}
        if arguments.json:
            print(json.dumps(row))
        else:
            print(f"{row['policy']:<18} HFSampler {ours:.3f} s   generate {theirs:.3f} s   ratio {theirs / ours:.2f}")


if __name__ == "__main__":
    main()
