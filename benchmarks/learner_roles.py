"""The processes of benchmarks/learner.py: `python learner_roles.py SIDE SETTINGS`, SIDE being ours, trl or gap.

Says "ready" when it has loaded, makes one training step for every line on stdin, and answers with its seconds (gap:
with the greatest difference between sampled and recomputed log-probs). At the end of its input it tells, as JSON, the bytes
that it held with its libraries alone and at its peak.
"""

from __future__ import annotations

import os
import sys

# Python puts a script's own folder first on the path, where `exchange` would be the benchmark of that name.
sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]  # noqa: PTH100, PTH120
os.environ["HF_HUB_OFFLINE"] = "1"

import json
import resource
import tempfile
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np
import psutil
import torch
from transformers import TrainerCallback

from agents.advantages import group_advantages
from agents.config import HFPolicy, Objective, Sampling
from agents.learner import Learner, LearnerSettings
from agents.objectives.choose import components
from agents.optimizer import MasterAdamW
from agents.policies.policy import build_policy
from agents.rows import own_rows
from agents.samplers.hf import HFSampler
from agents.sharing.config import Isolated
from agents.testing import make_prompt
from exchange.types import Version

LEARNING_RATE = 1e-6
MAX_GRAD_NORM = 1.0


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """The one configuration of both sides."""

    model: str
    dtype: Literal["float32", "bfloat16"]
    prompts: int
    completions: int
    tokens: int
    threads: int
    gradient_checkpointing: bool


def texts(count: int) -> list[str]:
    """Word problems of about a hundred tokens."""
    return [
        f"A gardener has {number + 12} beds of roses and {number + 7} beds of lilies. In every bed of roses there are "
        f"{3 * number + 20} plants, and in every bed of lilies {2 * number + 15}. On Monday she sells a quarter of all the "
        f"roses and {number + 30} lilies, and on Tuesday a neighbour gives her {number + 4} more beds with {number + 9} roses "
        "each. How many plants does she have at the end of Tuesday, roses and lilies together? Think step by step."
        for number in range(count)
    ]


def reward(text: str) -> float:
    """Something that differs from completion to completion."""
    return text.count("e") / max(1, len(text))


def ours(setting: Setting) -> Callable[[int], dict[str, float]]:
    """A step of this package."""
    config = HFPolicy(path=setting.model, gradient_checkpointing=setting.gradient_checkpointing)
    policy = build_policy(config, seed=0, device="cpu", dtype=setting.dtype, threads=setting.threads)
    policy.tokenizer.eos_ids = frozenset()  # all completions are as long as can be
    sampler = HFSampler(policy, Sampling(max_completion_length=setting.tokens))
    learner = Learner(
        policy.model,
        components(Objective(), Isolated(), max_completion_length=setting.tokens),
        LearnerSettings(
            temperature=1.0,
            pad_id=policy.tokenizer.pad_id,
            micro_batch_size=setting.prompts * setting.completions,
            num_iterations=1,
            learning_rate=LEARNING_RATE,
            weight_decay=0.0,
            max_grad_norm=MAX_GRAD_NORM,
        ),
    )
    prompts = [make_prompt(str(number), text=text) for number, text in enumerate(texts(setting.prompts))]

    def step(number: int) -> dict[str, float]:
        groups = sampler.sample(prompts, num_generations=setting.completions, step=number, version=Version(0, 0), seed=0)
        rewards = [
            np.array([reward(each.text.decode(errors="replace")) for each in group.completions], dtype=np.float32)
            for group in groups
        ]
        objective = Objective()
        rows = own_rows(groups, [group_advantages(each, objective, 0.0) for each in rewards], objective)
        return learner.step(rows, prompts=len(prompts))

    return step


def rewards_of(completions: list[list[dict[str, str]]], **_: Any) -> list[float | None]:
    """The same reward, as TRL calls it."""
    return [reward(completion[0]["content"]) for completion in completions]


class SharedAdamW(torch.optim.Optimizer):
    """This package's optimizer, with its float32 master weights and its clipping, for TRL's trainer."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": LEARNING_RATE})
        self._adam = MasterAdamW(model.parameters(), learning_rate=LEARNING_RATE, weight_decay=0.0, max_grad_norm=MAX_GRAD_NORM)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        self._adam.step(0.0)


class OnDemand(TrainerCallback):
    """Lets the trainer make a step for every line of input."""

    def __init__(self) -> None:
        self._began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for a line."""
        if not sys.stdin.readline():
            tell_memory()
            os._exit(0)
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Answer it."""
        say(time.perf_counter() - self._began)


def trl(setting: Setting) -> None:
    """The same step in TRL's trainer."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    torch.set_num_threads(setting.threads)
    batch = setting.prompts * setting.completions
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=setting.gradient_checkpointing,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        num_generations=setting.completions,
        max_completion_length=setting.tokens,
        generation_kwargs={"min_new_tokens": setting.tokens},
        max_steps=10_000,
        max_grad_norm=0.0,  # the optimizer clips
        lr_scheduler_type="constant",
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=getattr(torch, setting.dtype))
    say_ready = OnDemand()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards_of,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts(setting.prompts)]),
        optimizers=(SharedAdamW(model), None),
        callbacks=[say_ready],
    )
    say("ready")
    trainer.train()


def say(what: object) -> None:
    """A line for the parent, past whatever libraries print."""
    print(what, file=ANSWERS, flush=True)


def tell_memory() -> None:
    """What the process held."""
    say(json.dumps({"libraries": LIBRARIES, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


def main() -> None:
    """Be one side."""
    sys.stdout = sys.stderr
    side, setting = sys.argv[1], msgspec.json.decode(sys.argv[2], type=Setting)
    if side == "trl":
        trl(setting)
        return
    step = ours(setting)
    say("ready")
    for number, _ in enumerate(sys.stdin):
        began = time.perf_counter()
        metrics = step(number)
        seconds = time.perf_counter() - began
        say(metrics["sampling/sampling_logp_difference/max"] if side == "gap" else seconds)
    tell_memory()


ANSWERS = sys.stdout
if sys.argv[1:2] == ["trl"]:
    import trl as _trl  # noqa: F401  counted among the libraries
LIBRARIES = psutil.Process().memory_info().rss
if __name__ == "__main__":
    main()
