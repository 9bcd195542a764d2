"""What every sampler gives, whoever computes it: the model's own log-probs, whole completions, repeatable draws.

A vLLM engine takes half a minute to start, so the tests of a policy share one: samplers that are made later take over the
engine of the first, with settings of their own.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.testing as npt
import pytest
import torch

from agents.config import HFPolicy, LoRA, Sampling, TinyPolicy
from agents.errors import PolicyError
from agents.policies.policy import Policy, build_policy
from agents.samplers.config import VLLM
from agents.samplers.distribution import sampling_log_probs
from agents.samplers.hf import HFSampler
from agents.samplers.sampler import Sampler
from agents.samplers.vllm import VLLMSampler
from agents.testing import make_prompt
from agents.types import Completion, Group
from exchange.types import Version

PYTHON = os.environ.get("MUTUALRL_VLLM_PYTHON", str(Path(__file__).parents[2] / ".venv-vllm/bin/python"))
VERSION = Version(2, 0)
TEXTS = ("reverse abc:", "sort fed:", "x:", "swap green moon:")
PROMPTS = [make_prompt(text, task="t", text=text) for text in TEXTS]
LENGTH = 12

Make = Callable[..., Sampler]


def llama(folder: Path) -> Policy:
    """A random model with logits far enough apart to make tokens differ, some of them end tokens."""
    return _spread(TinyPolicy(tokenizer="char", hidden_size=64, num_hidden_layers=2, num_attention_heads=2), 3.0)


def gpt_neox(folder: Path) -> Policy:
    return _spread(TinyPolicy(arch="gpt_neox", hidden_size=64, num_hidden_layers=2, num_attention_heads=2), 8.0)


def with_adapter(folder: Path) -> Policy:
    llama(folder).save(folder / "base")
    config = HFPolicy(path=str(folder / "base"), lora=LoRA(r=4, lora_alpha=8))
    policy = build_policy(config, seed=0, device="cpu", dtype="float32", threads=1)
    move(policy, 1)
    return policy


def _spread(config: TinyPolicy, factor: float) -> Policy:
    policy = build_policy(config, seed=0, device="cpu", dtype="float32", threads=1)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(factor)  # type: ignore[no-untyped-call]
    return policy


def move(policy: Policy, seed: int) -> None:
    """Change everything that training changes."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in policy.trainable_tensors().values():
        tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.05)


BUILDERS = (llama, gpt_neox, with_adapter)
KINDS = [
    *(pytest.param(("hf", build), id=f"hf-{build.__name__}") for build in BUILDERS),
    *(pytest.param(("vllm", build), id=f"vllm-{build.__name__}", marks=pytest.mark.vllm) for build in BUILDERS),
]


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Policy, Make]]:
    kind, build = request.param
    folder = tmp_path_factory.mktemp(kind)
    policy = build(folder)
    if kind == "hf":
        yield policy, lambda **options: HFSampler(policy, _sampling(**options))
        return
    config = VLLM(python=PYTHON, enforce_eager=True, kv_cache_memory_bytes=2**26, start_timeout_s=500.0)
    first = VLLMSampler(policy, _sampling(stop=("never met",)), config, threads=1, log=folder / "vllm.log")
    first.preflight(PROMPTS)

    def make(**options: Any) -> Sampler:
        sampler = copy.copy(first)
        sampler._sampling = _sampling(**options)
        first._ready = True
        return sampler

    yield policy, make
    first.close()


def _sampling(**options: Any) -> Sampling:
    return Sampling(**({"max_completion_length": LENGTH} | options))


@pytest.fixture
def policy(made: tuple[Policy, Make]) -> Policy:
    return made[0]


@pytest.fixture
def make(made: tuple[Policy, Make]) -> Make:
    """Makes a sampler that has the policy's weights as VERSION."""

    def updated(**options: Any) -> Sampler:
        sampler = made[1](**options)
        sampler.update(VERSION)
        return sampler

    return updated


@torch.no_grad()
def recomputed(policy: Policy, prompt_ids: Any, completion: Completion, sampling: Sampling) -> Any:
    """Log-probs of one completion by one full forward pass without cache, padding or batch."""
    ids = torch.from_numpy(np.concatenate([prompt_ids, completion.ids]).astype(np.int64))
    logits = policy.model(input_ids=ids[None], use_cache=False).logits[0, len(prompt_ids) - 1 : -1]
    return sampling_log_probs(logits, sampling)[range(len(completion.ids)), completion.ids].numpy()


def frequent_ends(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a seventh of the vocabulary end tokens, so that rows end at different lengths."""
    monkeypatch.setattr(policy.tokenizer, "eos_ids", frozenset(range(0, len(policy.tokenizer.table), 7)))


def flat(groups: Sequence[Group]) -> list[tuple[list[int], list[float]]]:
    return [(each.ids.tolist(), each.logprobs.tolist()) for group in groups for each in group.completions]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.5},
    {"temperature": 0.5},
    {"top_k": 3},
    {"top_p": 0.6},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.7},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_logprobs_are_those_of_the_sampling_distribution(
    policy: Policy, make: Make, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    frequent_ends(policy, monkeypatch)
    groups = make(**options).sample(PROMPTS, num_generations=5, step=3, version=VERSION, seed=1)
    assert max(len(each.ids) for group in groups for each in group.completions) > 1
    for group, prompt in zip(groups, PROMPTS, strict=True):
        assert (group.prompt, group.step, group.version, len(group.completions)) == (prompt, 3, VERSION, 5)
        assert group.prompt_ids.tolist() == policy.tokenizer.render(prompt.messages).tolist()
        for completion in group.completions:
            expected = recomputed(policy, group.prompt_ids, completion, Sampling(**options))
            npt.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_greedy_takes_the_likeliest_token_with_logprobs_at_temperature_1(policy: Policy, make: Make) -> None:
    completions = make(temperature=0.5, top_k=2).greedy(PROMPTS, 3)
    assert max(len(each.ids) for each in completions) > 3
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        rendered = policy.tokenizer.render(prompt.messages)
        npt.assert_allclose(completion.logprobs, recomputed(policy, rendered, completion, Sampling()), atol=1e-4)
        npt.assert_allclose(recomputed(policy, rendered, completion, Sampling(top_k=1)), 0.0, atol=1e-6)


def test_a_completion_is_consistent(policy: Policy, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    frequent_ends(policy, monkeypatch)
    ends = policy.tokenizer.eos_ids
    groups = make(max_completion_length=4).sample(PROMPTS, num_generations=6, step=0, version=VERSION, seed=0)
    completions = [each for group in groups for each in group.completions]
    assert {each.finished for each in completions} == {True, False}
    for each in completions:
        assert len(each.ids) == len(each.logprobs) == len(each.ends)
        assert each.ends[-1] == len(each.text)
        assert each.text == policy.tokenizer.decode_bytes(each.ids)
        assert not set(each.ids[:-1].tolist()) & ends
        assert each.finished == each.has_eos == (int(each.ids[-1]) in ends)
        assert each.finished or len(each.ids) == 4


def test_draws_are_fixed_by_seed_and_step(make: Make) -> None:
    sampler = make()

    def draw(seed: int, step: int) -> list[tuple[list[int], list[float]]]:
        return flat(sampler.sample(PROMPTS, num_generations=3, step=step, version=VERSION, seed=seed))

    first = draw(0, 0)
    assert first == draw(0, 0)
    others = [draw(0, 1), draw(1, 0)]
    assert all(each != first for each in others)
    assert len({tuple(ids) for ids, _ in first[:3]}) > 1, "completions of a prompt have noise of their own"


def test_a_stop_string_ends_a_row_across_tokens_and_stays_in_its_text(make: Make) -> None:
    free = [
        each.text for g in make().sample(PROMPTS, num_generations=4, step=0, version=VERSION, seed=0) for each in g.completions
    ]
    stop = max(free, key=len)[2:5].decode(errors="ignore")
    assert stop
    halted = make(stop=("never met", stop)).sample(PROMPTS, num_generations=4, step=0, version=VERSION, seed=0)
    cut = 0
    for text, completion in zip(free, [each for group in halted for each in group.completions], strict=True):
        place = text.find(stop.encode())
        if place < 0:
            assert completion.text == text
            continue
        cut += 1
        assert completion.text.startswith(text[: place + len(stop.encode())])
        assert stop.encode() not in completion.text[:-1]
        assert completion.finished
        assert not completion.has_eos
    assert cut


def test_after_an_update_the_draws_are_those_of_the_new_weights(policy: Policy, make: Make) -> None:
    sampler = make()
    before = [each.logprobs.tolist() for each in sampler.greedy(PROMPTS, 4)]
    kept = {name: tensor.clone() for name, tensor in policy.trainable_tensors().items()}
    move(policy, 7)
    sampler.update(Version(2, 1))
    after = sampler.greedy(PROMPTS, 4)
    for prompt, completion, old in zip(PROMPTS, after, before, strict=True):
        assert completion.logprobs.tolist() != old
        rendered = policy.tokenizer.render(prompt.messages)
        npt.assert_allclose(completion.logprobs, recomputed(policy, rendered, completion, Sampling()), atol=1e-4)
    for name, tensor in policy.trainable_tensors().items():
        tensor.copy_(kept[name])
    sampler.update(VERSION)
    assert [each.logprobs.tolist() for each in sampler.greedy(PROMPTS, 4)] == before


def test_after_many_updates_the_draws_still_follow(policy: Policy, make: Make) -> None:
    sampler = make()
    before = [each.ids.tolist() for each in sampler.greedy(PROMPTS, 4)]
    for step in range(1, 31):
        sampler.update(Version(2, step))
    assert [each.ids.tolist() for each in sampler.greedy(PROMPTS, 4)] == before


def test_a_batch_changes_nothing(make: Make) -> None:
    sampler = make()
    for prompt, completion in zip(PROMPTS, sampler.greedy(PROMPTS, 4), strict=True):
        (alone,) = sampler.greedy([prompt], 1)
        assert alone.ids.tolist() == completion.ids.tolist()
        npt.assert_allclose(alone.logprobs, completion.logprobs, atol=1e-4)


def test_a_prompt_beyond_the_context_is_named_before_sampling(make: Make) -> None:
    long = make_prompt("long", task="t", text="q" * 100)
    with pytest.raises(PolicyError, match=r"prompt long of task 't' has 10\d tokens, allowed are 1 to 52: max_context=64"):
        make().preflight([*PROMPTS, long])


def test_no_prompts(make: Make) -> None:
    sampler = make()
    assert sampler.sample([], num_generations=2, step=0, version=VERSION, seed=0) == []
    assert sampler.greedy([], 4) == []
