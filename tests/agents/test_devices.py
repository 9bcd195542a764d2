"""A device gives what the CPU gives: completions, log-probs, updates, and what is saved of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agents.config import AgentConfig, LoRA, Objective, Sampling, TinyPolicy
from agents.learner import Learner
from agents.policies.lora import add_adapter
from agents.policies.policy import Policy, build_policy
from agents.rows import Row, own_rows
from agents.samplers.hf import HFSampler
from agents.tasks.config import Reverse
from agents.tasks.load import load_task
from agents.tasks.schedule import draw
from agents.types import Group
from exchange.types import Version
from mutualrl.wiring import build_learner

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
TINY = TinyPolicy(hidden_size=32, num_hidden_layers=2)


def config_of() -> AgentConfig:
    sampling = Sampling(max_completion_length=8, stop=("e",))
    objective = Objective(beta=0.1, num_iterations=2)
    return AgentConfig(policy=TINY, sampling=sampling, objective=objective, learning_rate=1e-3, micro_batch_size=8)


def policy_on(device: str, *, dtype: str = "float32", lora: bool = False) -> Policy:
    policy = build_policy(TINY, seed=0, device="cpu", dtype=dtype, threads=1)
    if lora:
        add_adapter(policy.model, LoRA(r=4), seed=0)
    policy.model.to(device=torch.device(device))  # type: ignore[call-arg]
    return Policy(model=policy.model, tokenizer=policy.tokenizer, device=torch.device(device), max_context=policy.max_context)


def sampled(policy: Policy) -> list[Group]:
    prompts = draw(load_task(Reverse(name="reverse"), seed=0).train, seed=0, step=0, count=6)
    sampler = HFSampler(policy, config_of().sampling)
    return sampler.sample(prompts, num_generations=4, step=0, version=Version(0, 0), seed=0)


def rows_of(groups: list[Group]) -> list[Row]:
    return own_rows(groups, [np.array([1.0, -1.0, 0.5, -0.5])] * len(groups), Objective())


def trained(policy: Policy, rows: list[Row]) -> tuple[Learner, dict[str, float]]:
    learner = build_learner(config_of(), policy)
    return learner, learner.step(rows, prompts=6)


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_tokens_are_drawn_with_the_log_probs_of_the_cpu(device: str) -> None:
    for got, expected in zip(sampled(policy_on(device)), sampled(policy_on("cpu")), strict=True):
        for own, other in zip(got.completions, expected.completions, strict=True):
            assert own.ids.tolist() == other.ids.tolist()
            np.testing.assert_allclose(own.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_a_step_changes_the_weights_as_on_the_cpu(device: str, lora: bool) -> None:
    rows = rows_of(sampled(policy_on("cpu", lora=lora)))
    here, there = policy_on(device, lora=lora), policy_on("cpu", lora=lora)
    (_, metrics), (_, expected) = trained(here, rows), trained(there, rows)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    assert metrics["sampling/sampling_logp_difference/mean"] < 1e-4
    for name, weight in there.trainable_tensors().items():
        torch.testing.assert_close(here.trainable_tensors()[name].cpu(), weight, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_in_half_precision_a_learner_goes_on_from_what_was_saved(device: str, tmp_path: Path) -> None:
    rows = rows_of(sampled(policy_on("cpu")))
    first, second = policy_on(device, dtype="bfloat16"), policy_on(device, dtype="bfloat16")
    learner, _ = trained(first, rows)
    first.save(tmp_path)
    second.load(tmp_path)
    again = build_learner(config_of(), second)
    saved = learner.state()
    tensors = {name: tensor.cpu().clone() for name, tensor in saved.tensors.items()}
    again.restore(replace(saved, tensors=tensors))
    assert again.step(rows, prompts=6)["loss"] == pytest.approx(learner.step(rows, prompts=6)["loss"], abs=1e-6)
    for name, weight in first.trainable_tensors().items():
        assert torch.equal(second.trainable_tensors()[name], weight)
