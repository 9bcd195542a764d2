"""Padded microbatches through real models: a row's log-probs are the same in any company, and those of the sampler."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from agents.config import Objective, Sampling, TinyPolicy
from agents.learner import Learner, LearnerSettings
from agents.microbatch import collate, completion_logits, token_logprobs
from agents.objectives.choose import components
from agents.policies.policy import Policy, build_policy
from agents.rows import Row, Stream, own_rows
from agents.samplers.hf import HFSampler
from agents.sharing.config import Isolated
from agents.testing import make_prompt
from exchange.types import Version

PAD = 7
LENGTHS = [(1, 5), (6, 1), (3, 3), (9, 2)]
"""Prompt and completion lengths; the rows also contain PAD as a token of their own."""


def sharpened(model: torch.nn.Module) -> torch.nn.Module:
    """Weights large enough for every token to matter to those behind it, by far more than the tolerance."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return model


def tiny(arch: Literal["llama", "gpt_neox"]) -> Policy:
    config = TinyPolicy(arch=arch, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    policy = build_policy(config, seed=0, device="cpu", dtype="float32", threads=1)
    sharpened(policy.model)
    return policy


def absolute() -> torch.nn.Module:
    """Learned absolute positions: both tiny archs rotate, and a rotation sees no shift of all positions of a row."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
    )
    return sharpened(GPT2LMHeadModel(config).eval())  # type: ignore[no-untyped-call]


def make_rows() -> list[Row]:
    rng = np.random.default_rng(0)
    rows = []
    for prompt, completion in LENGTHS:
        ids = rng.integers(3, 60, size=prompt + completion, dtype=np.int32)
        ids[0] = ids[-1] = PAD
        rows.append(Row(stream=Stream.OWN, prompt_ids=ids[:prompt], ids=ids[prompt:], advantage=1.0))
    return rows


def alone(model: torch.nn.Module, row: Row, temperature: float) -> torch.Tensor:
    """Log-probs [T] by a forward pass over nothing but the row's tokens."""
    ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.ids]).astype(np.int64))
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(row.prompt_ids) - 1 : -1] / temperature
    return torch.log_softmax(logits, dim=-1).gather(-1, ids[len(row.prompt_ids) :, None]).squeeze(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("arch", ["llama", "gpt_neox", "absolute"])
@torch.no_grad()
def test_a_rows_logprobs_are_the_same_alone_and_padded(
    arch: Literal["llama", "gpt_neox", "absolute"], temperature: float
) -> None:
    model = absolute() if arch == "absolute" else tiny(arch).model
    rows = make_rows()
    batch = collate(rows, pad_id=PAD, device=torch.device("cpu"))
    got_BT = token_logprobs(completion_logits(model, batch, temperature=temperature), batch)
    for row, got_T in zip(rows, got_BT, strict=True):
        torch.testing.assert_close(got_T[: len(row.ids)], alone(model, row, temperature), rtol=0, atol=1e-5)
        assert not got_T[len(row.ids) :].any()


@pytest.mark.parametrize("arch", ["llama", "gpt_neox"])
def test_the_learner_finds_the_samplers_logprobs(arch: Literal["llama", "gpt_neox"], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny(arch)
    monkeypatch.setattr(policy.tokenizer, "eos_ids", frozenset(range(0, len(policy.tokenizer.table), 3)))
    prompts = [make_prompt(text, text=text) for text in ("x:", "reverse abcd:", "sort fed:")]
    sampling = Sampling(max_completion_length=6, temperature=0.7)
    groups = HFSampler(policy, sampling).sample(prompts, num_generations=4, step=0, version=Version(0, 0), seed=0)
    rows = own_rows(groups, [np.array([1.0, -1.0, 0.5, -0.5])] * len(groups), Objective())
    assert len({len(row.prompt_ids) for row in rows}) == 3 and len({len(row.ids) for row in rows}) > 2
    settings = LearnerSettings(
        temperature=sampling.temperature,
        pad_id=policy.tokenizer.eos_id,
        micro_batch_size=5,
        num_iterations=1,
        learning_rate=1e-6,
        weight_decay=0.0,
        max_grad_norm=1.0,
    )
    learner = Learner(policy.model, components(Objective(), Isolated(), max_completion_length=6), settings)
    assert learner.step(rows, prompts=len(prompts))["sampling/sampling_logp_difference/max"] < 1e-3
