"""LoRA policies: what is trained, what is saved, the reference, dropout, gradient checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agents.config import AgentConfig, HFPolicy, LoRA, Objective, Sampling, TinyPolicy, WarmStart
from agents.errors import PolicyError
from agents.learner import Learner, LearnerSettings
from agents.objectives.choose import components
from agents.policies.lora import adapter_off
from agents.policies.policy import Policy, build_policy
from agents.rows import Row, Stream
from agents.samplers.hf import HFSampler
from agents.sharing.config import Isolated
from agents.tasks.config import Reverse
from agents.tasks.load import load_task
from agents.testing import make_prompt
from agents.warm_start import warm_start
from exchange.types import Version

IDS = torch.tensor([[5, 6, 7, 8, 9]])
SETTINGS = LearnerSettings(
    temperature=1.0,
    pad_id=0,
    micro_batch_size=4,
    num_iterations=1,
    learning_rate=1e-2,
    weight_decay=0.0,
    max_grad_norm=1.0,
)
ROWS = [
    Row(stream=Stream.OWN, prompt_ids=np.array([5, 6]), ids=np.array([7, 8, 9]), advantage=1.0),
    Row(stream=Stream.OWN, prompt_ids=np.array([5, 6]), ids=np.array([3]), advantage=-1.0),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("base")
    tiny = TinyPolicy(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    build_policy(tiny, seed=0, device="cpu", dtype="float32", threads=1).save(path)
    return str(path)


def build(base: str, lora: LoRA | None, *, dtype: str = "float32", checkpointing: bool = False) -> Policy:
    config = HFPolicy(path=base, lora=lora, gradient_checkpointing=checkpointing)
    return build_policy(config, seed=0, device="cpu", dtype=dtype, threads=1)


def learner(policy: Policy, objective: Objective | None = None) -> Learner:
    objective = objective or Objective()
    parts = components(objective, Isolated(), max_completion_length=8)
    return Learner(policy.model, parts, replace(SETTINGS, num_iterations=objective.num_iterations))


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    out: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return out


def test_a_new_adapter_changes_nothing_and_alone_is_trained(base: str) -> None:
    policy, plain = build(base, LoRA(r=4)), build(base, None)
    assert torch.equal(logits(policy.model), logits(plain.model))
    before = {name: each.clone() for name, each in policy.model.state_dict().items()}
    learner(policy).step(ROWS, prompts=1)
    changed = {name for name, each in policy.model.state_dict().items() if not torch.equal(each, before[name])}
    assert changed and all("lora_" in name for name in changed)
    assert not torch.equal(logits(policy.model), logits(plain.model))


def test_adapters_are_drawn_by_the_seed(base: str) -> None:
    first, second = (build(base, LoRA(r=4)).trainable_tensors() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trainable_tensors_are_what_the_files_hold_and_write_through(base: str, dtype: str, tmp_path: Path) -> None:
    policy = build(base, LoRA(r=4), dtype=dtype)
    learner(policy).step(ROWS, prompts=1)
    tensors = policy.trainable_tensors()
    policy.save(tmp_path)
    assert (tmp_path / "adapter_config.json").is_file() and not list(tmp_path.glob("model*"))
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved.keys() == tensors.keys() and all(torch.equal(saved[name], each) for name, each in tensors.items())
    assert {each.dtype for each in tensors.values()} == {getattr(torch, dtype)}
    fresh = build(base, LoRA(r=4), dtype=dtype)
    for name, each in fresh.trainable_tensors().items():
        each.copy_(saved[name])
    assert torch.equal(logits(fresh.model), logits(policy.model))


def test_without_lora_all_weights_are_trainable_under_their_saved_names(base: str, tmp_path: Path) -> None:
    policy = build(base, None)
    policy.save(tmp_path)
    assert policy.trainable_tensors().keys() == load_file(tmp_path / "model.safetensors").keys()


def test_peft_loads_what_was_saved(base: str, tmp_path: Path) -> None:
    policy = build(base, LoRA(r=4, lora_alpha=12, use_rslora=True, target_modules=("q_proj", "up_proj")))
    learner(policy).step(ROWS, prompts=1)
    policy.save(tmp_path)
    expected = logits(policy.model)
    plain = AutoModelForCausalLM.from_pretrained(base)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(plain, tmp_path)), expected)
    torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path)), expected)
    with pytest.raises(PolicyError, match="adapter without its base"):
        build(str(tmp_path), None)


def test_the_reference_is_the_base_without_a_copy(base: str) -> None:
    policy = build(base, LoRA(r=4))
    teaching = learner(policy, Objective(beta=0.1))
    count = sum(each.numel() for each in policy.model.parameters())
    assert teaching.step(ROWS, prompts=1)["kl"] == pytest.approx(0, abs=1e-6)
    second = teaching.step(ROWS, prompts=1)["kl"]
    assert second > 1e-4
    with adapter_off(policy.model):
        assert torch.equal(logits(policy.model), logits(build(base, None).model))
    full = build(base, None)
    with torch.no_grad():
        merged = policy.model  # the adapter's products written into the weights of a policy without one
        for name, module in full.model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                layer = merged.get_submodule(name)
                module.weight += layer.get_delta_weight("default")  # type: ignore[operator]
    torch.testing.assert_close(logits(full.model), logits(policy.model))
    assert count == sum(each.numel() for each in policy.model.parameters())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_never_reaches_a_ratio(base: str, checkpointing: bool) -> None:
    policy = build(base, LoRA(r=4, lora_dropout=0.1), checkpointing=checkpointing)
    for each in policy.trainable_tensors().values():
        each.normal_(std=0.3)
    prompt = make_prompt("reverse abc:")
    sampler = HFSampler(policy, Sampling(max_completion_length=6))
    (group,) = sampler.sample([prompt], num_generations=2, step=0, version=Version(0, 0), seed=0)
    rows = [
        Row(stream=Stream.OWN, prompt_ids=group.prompt_ids, ids=each.ids, advantage=sign, sampled_logprobs=each.logprobs)
        for each, sign in zip(group.completions, (1.0, -1.0), strict=True)
    ]
    for iterations in (1, 2):  # the pass with gradients, and the one that fixes the old log-probs
        objective = Objective(num_iterations=iterations, epsilon=1e-5)
        parts = components(objective, Isolated(), max_completion_length=8)
        settings = replace(SETTINGS, num_iterations=iterations, learning_rate=1e-12)
        metrics = Learner(policy.model, parts, settings).step(rows, prompts=1)
        assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
        assert metrics["clip_ratio/region_mean"] == 0


def test_a_warm_start_drops_out_and_leaves_it_off(base: str) -> None:
    tasks = [load_task(Reverse(name="reverse"), seed=0)]
    settings = WarmStart(steps=1, mix={"reverse": 1.0}, batch_size=4)
    losses = []
    for dropout in (0.0, 0.5, 0.5):
        policy = build(base, LoRA(r=4, lora_dropout=dropout))
        for each in policy.trainable_tensors().values():
            each.fill_(0.1)
        torch.manual_seed(0)
        losses.append(warm_start(policy, settings, tasks, seed=0))
        assert torch.equal(logits(policy.model), logits(policy.model.train()))
    assert losses[0] != losses[1] == losses[2]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gradient_checkpoints_change_no_update(base: str, dropout: float) -> None:
    plain, saving = (build(base, LoRA(r=4, lora_dropout=dropout), checkpointing=each) for each in (False, True))
    for policy in (plain, saving):
        learner(policy).step(ROWS, prompts=1)
    for name, each in plain.trainable_tensors().items():
        torch.testing.assert_close(saving.trainable_tensors()[name], each)


def test_a_device_map_places_the_layers(base: str) -> None:
    policy = build_policy(HFPolicy(path=base, device_map={"": "cpu"}), seed=0, device="auto", dtype="float32", threads=1)
    assert policy.device.type == "cpu"
    assert np.isfinite(learner(policy).step(ROWS, prompts=1)["loss"])
    with pytest.raises(PolicyError, match="nowhere"):
        build_policy(HFPolicy(path=base, device_map="nowhere"), seed=0, device="auto", dtype="float32", threads=1)
    with pytest.raises(ValueError, match=r"`device` must stay \"auto\""):
        AgentConfig(policy=HFPolicy(path=base, device_map="auto"), device="cpu")


@pytest.mark.parametrize("wrong", [{"r": 0}, {"lora_alpha": 0}, {"lora_dropout": 1.0}, {"target_modules": ""}])
def test_settings_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must"):
        LoRA(**wrong)  # type: ignore[arg-type]
