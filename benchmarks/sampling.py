"""Sampling speed of `HFSampler`, against transformers' `generate` on the same prompts in the same process.

    python benchmarks/sampling.py [--json] [--runs 5] [--model models/smollm2]

Tokens per second on one thread, float32; ratio above 1: HFSampler is faster. Both draw at temperature 1 with full support and
return the log-probs of what they drew; both are warmed up on the same shapes, then take turns. One line each:

* hf_vs_generate: SmolLM2-135M-Instruct, 8 prompts of 200 tokens × 8 completions × 16 new tokens, no end tokens.
* hf_vs_generate_short: the same, 8 prompts of 40 tokens × 4 × 32.
* tiny_vs_generate_ARCH: the two tiny architectures, 32 prompts × 6 completions × at most 8 tokens, which end as they do in
  training.

Where there is an interpreter with vLLM (--vllm, `make venv-vllm`), on the same model and with one thread too:

* vllm_vs_hf: VLLMSampler against HFSampler, 8 prompts of 200 tokens × 8 completions × 16 new tokens.
* vllm_sync: milliseconds for taking over all weights.
* logprob_gap_vllm: greatest difference between a sampled token's log-prob and the policy's own, in nats.
"""

from __future__ import annotations

import os
import sys

# Python puts a script's own folder first on the path, where `exchange` would be the benchmark of that name.
sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]  # noqa: PTH100, PTH120
os.environ["HF_HUB_OFFLINE"] = "1"

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig

from agents.config import HFPolicy, Sampling, TinyPolicy, WarmStart
from agents.policies.policy import Policy, build_policy
from agents.samplers.config import VLLM
from agents.samplers.hf import HFSampler
from agents.samplers.sampler import Sampler
from agents.samplers.vllm import VLLMSampler
from agents.tasks.config import Reverse, Sort
from agents.tasks.load import load_task
from agents.tasks.schedule import draw
from agents.testing import make_prompt
from agents.types import Completion, Prompt
from agents.warm_start import warm_start
from benchmarks.exchange import Line
from exchange.types import Version

TINY: tuple[tuple[Literal["llama", "gpt_neox"], Literal["byte_bpe", "char"]], ...] = (
    ("llama", "byte_bpe"),
    ("gpt_neox", "char"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What both sides do. ends: whether completions may end before the last token."""

    policy: Policy
    prompts: Sequence[Prompt]
    generations: int
    tokens: int
    ends: bool


@torch.inference_mode()
def generate(work: Work, step: int) -> int:
    """Through `generate`, with log-probs from its raw logits; returns how many tokens it drew, up to each row's end."""
    policy = work.policy
    rendered = [policy.tokenizer.render(prompt.messages) for prompt in work.prompts]
    width = max(len(ids) for ids in rendered)
    ids = np.full((len(rendered), width), policy.tokenizer.pad_id, dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, prompt_ids in enumerate(rendered):
        ids[row, width - len(prompt_ids) :] = prompt_ids
        mask[row, width - len(prompt_ids) :] = 1
    torch.manual_seed(step)
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        top_k=0,
        num_return_sequences=work.generations,
        max_new_tokens=work.tokens,
        min_new_tokens=None if work.ends else work.tokens,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=policy.tokenizer.pad_id,
        eos_token_id=list(policy.tokenizer.eos_ids) if work.ends else policy.model.config.eos_token_id,
    )
    generate_tokens: Any = policy.model.generate
    output = generate_tokens(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), generation_config=config)
    drawn = output.sequences[:, width:]
    log_probs = torch.log_softmax(torch.stack(output.logits, dim=1), dim=-1)
    log_probs.gather(-1, drawn[..., None])
    ended = torch.isin(drawn, torch.tensor(list(policy.tokenizer.eos_ids)))
    return int((ended.cumsum(dim=-1) - ended.long() == 0).sum())


def sample(work: Work, sampler: Sampler, step: int) -> int:
    """Through the sampler; returns how many tokens it drew."""
    groups = sampler.sample(work.prompts, num_generations=work.generations, step=step, version=Version(0, 0), seed=0)
    return sum(len(each.ids) for group in groups for each in group.completions)


Side = Callable[[int], int]
"""Does one step's work; returns how many tokens it drew."""


def compared(name: str, sides: tuple[Side, Side], runs: int, *, wanted: str = "") -> Line:
    """Tokens per second of both sides, which take turns."""
    speeds: list[list[float]] = [[], []]
    for step in range(runs + 1):
        for side, found in zip(sides, speeds, strict=True):
            began = time.perf_counter()
            tokens = side(step)
            if step:  # the first warms up
                found.append(tokens / (time.perf_counter() - began))
    ratios = tuple(own / theirs for own, theirs in zip(*speeds, strict=True))
    own, theirs = (statistics.median(each) for each in speeds)
    return Line(
        name=name,
        value=own,
        reference=theirs,
        ratio=statistics.median(ratios),
        wanted=wanted,
        unit="tokens/s",
        runs=runs,
        ratios=ratios,
    )


def against_generate(work: Work) -> tuple[Side, Side]:
    """HFSampler and transformers' `generate`."""
    sampler = HFSampler(work.policy, Sampling(max_completion_length=work.tokens))
    return lambda step: sample(work, sampler, step), lambda step: generate(work, step)


def with_vllm(model: str, python: str, runs: int) -> Iterator[Line]:
    """Lines of the vLLM sampler."""
    policy = build_policy(HFPolicy(path=model), seed=0, device="cpu", dtype="float32", threads=1)
    policy.tokenizer.eos_ids = frozenset()
    prompts = [make_prompt(str(number), text=text_of(policy, 200, number)) for number in range(8)]
    work = Work(policy=policy, prompts=prompts, generations=8, tokens=16, ends=False)
    sampling = Sampling(max_completion_length=work.tokens)
    with tempfile.TemporaryDirectory() as folder:
        engine = VLLMSampler(
            policy, sampling, VLLM(python=python, enforce_eager=True), threads=1, log=Path(folder) / "vllm.log"
        )
        try:
            engine.preflight(prompts)
            syncs = [1e3 * engine.update(Version(0, 0))["perf/weight_sync_s"] for _ in range(runs + 1)]
            hf = HFSampler(policy, sampling)
            yield compared("vllm_vs_hf", (lambda step: sample(work, engine, step), lambda step: sample(work, hf, step)), runs)
            groups = engine.sample(prompts, num_generations=2, step=0, version=Version(0, 0), seed=0)
        finally:
            engine.close()
    found = max(gap(policy, group.prompt_ids, each) for group in groups for each in group.completions)
    for name, value, unit, wanted in (
        ("vllm_sync", statistics.median(syncs[1:]), "ms", ""),
        ("logprob_gap_vllm", found, "nats", "value <= 0.001"),
    ):
        yield Line(name=name, value=value, reference=value, ratio=1.0, wanted=wanted, unit=unit, runs=runs, ratios=(1.0,))


@torch.inference_mode()
def gap(policy: Policy, prompt_ids: npt.NDArray[np.int32], completion: Completion) -> float:
    """Greatest difference in log-prob between a completion's tokens and one forward pass over them."""
    ids = torch.from_numpy(np.concatenate([prompt_ids, completion.ids]).astype(np.int64))
    logits = policy.model(input_ids=ids[None], use_cache=False).logits[0, len(prompt_ids) - 1 : -1].float()
    own = torch.log_softmax(logits, dim=-1)[range(len(completion.ids)), completion.ids]
    return float(np.abs(own.numpy() - completion.logprobs).max())


def text_of(policy: Policy, tokens: int, number: int) -> str:
    """A text that renders to at least so many tokens, template included, and hardly more."""
    words = [f"{number}:"]
    while len(policy.tokenizer.render(make_prompt(text=" ".join(words)).messages)) < tokens:
        words.append(("count", "the", "plants", "in", "every", "bed")[len(words) % 6])
    return " ".join(words)


def real(model: str, runs: int) -> Iterator[Line]:
    """Lines of a real model."""
    policy = build_policy(HFPolicy(path=model), seed=0, device="cpu", dtype="float32", threads=1)
    policy.tokenizer.eos_ids = frozenset()
    for name, tokens, generations, new in (("hf_vs_generate", 200, 8, 16), ("hf_vs_generate_short", 40, 4, 32)):
        prompts = [make_prompt(str(number), text=text_of(policy, tokens, number)) for number in range(8)]
        work = Work(policy=policy, prompts=prompts, generations=generations, tokens=new, ends=False)
        yield compared(name, against_generate(work), runs, wanted=">= 2" if name == "hf_vs_generate" else "")


def tiny(runs: int) -> Iterator[Line]:
    """Lines of tiny policies."""
    tasks = [load_task(Reverse(name="reverse"), seed=0), load_task(Sort(name="sort"), seed=0)]
    prompts = draw([prompt for task in tasks for prompt in task.train], seed=0, step=0, count=32)
    for arch, tokenizer in TINY:
        policy = build_policy(TinyPolicy(arch=arch, tokenizer=tokenizer), seed=0, device="cpu", dtype="float32", threads=1)
        # A few supervised steps give completions the lengths that training meets.
        warm_start(policy, WarmStart(steps=40, mix={"reverse": 0.5, "sort": 0.5}), tasks, seed=0)
        work = Work(policy=policy, prompts=prompts, generations=6, tokens=8, ends=True)
        yield compared(f"tiny_vs_generate_{arch}", against_generate(work), runs)


def main() -> None:
    """Print one line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", default=os.environ.get("MUTUALRL_SMOLLM2", "models/smollm2"), help="directory")
    parser.add_argument("--vllm", default=".venv-vllm/bin/python", help="an interpreter with vLLM; without, no such lines")
    options = parser.parse_args()
    every = [tiny(options.runs), real(options.model, options.runs)]
    if Path(options.vllm).exists():
        every.append(with_vllm(options.model, options.vllm, options.runs))
    for lines in every:
        for line in lines:
            told = f"{line.name:<26}{line.value:10.4g} {line.unit:<10} against {line.reference:10.4g}   ratio {line.ratio:.2f}"
            print(json.dumps(asdict(line)) if options.json else f"{told}   wanted: {line.wanted}", flush=True)


if __name__ == "__main__":
    main()
