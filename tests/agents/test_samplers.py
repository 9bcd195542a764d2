"""HFSampler beyond what every sampler holds to (tests/conformance): its batches, its distribution, its draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import numpy.testing as npt
import pytest
import torch

from agents.config import Sampling, TinyPolicy
from agents.errors import PolicyError
from agents.policies.policy import Policy, build_policy
from agents.samplers import decode as decode_module
from agents.samplers.distribution import draw_tokens, sampling_log_probs
from agents.samplers.hf import HFSampler
from agents.types import Completion, Group, Prompt
from exchange.types import Message, PromptId, Version

VERSION = Version(0, 0)
TEXTS = ("reverse abc:", "sort fed:", "x:", "swap green moon:")


def prompt(text: str) -> Prompt:
    return Prompt(id=PromptId(text), task="t", messages=(Message(role="user", content=text),), columns={})


PROMPTS = [prompt(text) for text in TEXTS]


def build(arch: Literal["llama", "gpt_neox"], tokenizer: Literal["byte_bpe", "char"], spread: float = 8.0) -> Policy:
    """A random model with logits far enough apart to make tokens differ, some of them end tokens."""
    config = TinyPolicy(arch=arch, tokenizer=tokenizer, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    policy = build_policy(config, seed=0, device="cpu", dtype="float32", threads=1)
    with torch.no_grad():
        head = policy.model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
        head.mul_(spread)
    return policy


@pytest.fixture(scope="module", params=["llama", "gpt_neox"])
def policy(request: pytest.FixtureRequest) -> Policy:
    return build(request.param, "byte_bpe" if request.param == "llama" else "char")


def frequent_ends(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make half of the vocabulary end tokens, so that rows end at different lengths."""
    monkeypatch.setattr(policy.tokenizer, "eos_ids", frozenset(range(0, len(policy.tokenizer.table), 2)))


def recomputed(policy: Policy, prompt_ids: np.ndarray[Any, Any], completion: Completion, temperature: float) -> Any:
    """Log-probs of one completion by one full forward pass without cache, padding or batch."""
    ids = torch.from_numpy(np.concatenate([prompt_ids, completion.ids]).astype(np.int64))
    logits = policy.model(input_ids=ids[None], use_cache=False).logits[0, len(prompt_ids) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)[range(len(completion.ids)), completion.ids].detach().numpy()


def flat(groups: Sequence[Group]) -> list[tuple[list[int], list[float]]]:
    return [(c.ids.tolist(), c.logprobs.tolist()) for group in groups for c in group.completions]


def test_a_batch_changes_nothing(policy: Policy) -> None:
    sampler = HFSampler(policy, Sampling(max_completion_length=6))
    together = sampler.greedy(PROMPTS, 4)
    for asked, completion in zip(PROMPTS, together, strict=True):
        (alone,) = sampler.greedy([asked], 1)
        assert alone.ids.tolist() == completion.ids.tolist()
        npt.assert_allclose(alone.logprobs, completion.logprobs, atol=1e-4)


def test_dropping_finished_rows_changes_nothing(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    frequent_ends(policy, monkeypatch)
    sampler = HFSampler(policy, Sampling(max_completion_length=10))
    drawn = []
    for compact_below in (0.0, 1.0):
        monkeypatch.setattr(decode_module, "COMPACT_BELOW", compact_below)
        drawn.append(flat(sampler.sample(PROMPTS, num_generations=6, step=0, version=VERSION, seed=0)))
    assert [ids for ids, _ in drawn[0]] == [ids for ids, _ in drawn[1]]
    for (_, kept), (_, dropped) in zip(*drawn, strict=True):
        npt.assert_allclose(kept, dropped, atol=1e-4)


def test_a_pad_id_equal_to_the_end_id_changes_nothing(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = HFSampler(policy, Sampling(max_completion_length=6))
    with_pad = flat(sampler.sample(PROMPTS, num_generations=3, step=0, version=VERSION, seed=0))
    monkeypatch.setattr(policy.tokenizer, "pad_id", policy.tokenizer.eos_id)
    assert flat(sampler.sample(PROMPTS, num_generations=3, step=0, version=VERSION, seed=0)) == with_pad


def test_own_ids_are_never_encoded(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = HFSampler(policy, Sampling(max_completion_length=6, stop=("zz",)))
    sampler.preflight(PROMPTS)

    class Poisoned:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"a tokenizer was asked for {name}")

    for name in ("encoder", "hf", "_backend"):
        monkeypatch.setattr(policy.tokenizer, name, Poisoned())
    assert len(sampler.sample(PROMPTS, num_generations=2, step=0, version=VERSION, seed=0)) == 4
    assert len(sampler.greedy(PROMPTS, 2)) == 4
    with pytest.raises(AssertionError, match="a tokenizer was asked for"):
        policy.tokenizer.encode(b"x")


def test_a_stop_string_ends_a_row_across_tokens() -> None:
    policy = build("gpt_neox", "char")
    free = HFSampler(policy, Sampling(max_completion_length=12))
    texts = [c.text for g in free.sample(PROMPTS, num_generations=4, step=0, version=VERSION, seed=0) for c in g.completions]
    long = max(texts, key=len)
    stop = long[2:5].decode()
    assert len(stop) == 3
    halted = HFSampler(policy, Sampling(max_completion_length=12, stop=("never met", stop)))
    groups = halted.sample(PROMPTS, num_generations=4, step=0, version=VERSION, seed=0)
    for text, completion in zip(texts, [c for g in groups for c in g.completions], strict=True):
        place = text.find(stop.encode())
        assert completion.text == (text if place < 0 else text[: place + 3])
        if place >= 0:
            assert completion.finished
            assert not completion.has_eos


def test_a_prompt_beyond_the_context_is_named_before_sampling(policy: Policy) -> None:
    sampler = HFSampler(policy, Sampling(max_completion_length=40))
    sampler.preflight(PROMPTS)
    long = prompt("reverse " + "q" * 40 + ":")
    with pytest.raises(
        PolicyError, match=r"prompt reverse q+: of task 't' has \d+ tokens, allowed are 1 to 24: max_context=64"
    ):
        sampler.preflight([*PROMPTS, long])


def test_a_prompt_that_cannot_be_spelled_is_named_before_sampling() -> None:
    sampler = HFSampler(build("llama", "char"), Sampling(max_completion_length=4))
    with pytest.raises(PolicyError, match="cannot spell 'ü' in the text of prompt aü of task 't'"):
        sampler.preflight([*PROMPTS, prompt("aü")])


def test_eval_mode_is_left_as_it_was(policy: Policy) -> None:
    policy.model.train()
    HFSampler(policy, Sampling(max_completion_length=2)).greedy(PROMPTS, 4)
    assert policy.model.training
    policy.model.train(False)
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_the_sampling_distribution_by_hand() -> None:
    # probabilities 0.5, 0.25, 0.125, 0.125
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()

    def probabilities(**options: Any) -> list[float]:
        return [round(p, 5) for p in sampling_log_probs(logits, Sampling(**options)).exp()[0].tolist()]

    assert probabilities() == [0.5, 0.25, 0.125, 0.125]
    # squares 16/64, 4/64, 1/64, 1/64 over their sum 22/64
    assert probabilities(temperature=0.5) == [round(16 / 22, 5), round(4 / 22, 5), round(1 / 22, 5), round(1 / 22, 5)]
    assert probabilities(top_k=1) == [1, 0, 0, 0]
    assert probabilities(top_k=2) == [round(2 / 3, 5), round(1 / 3, 5), 0, 0]
    # 0.5 does not hold 0.6 of the mass, 0.5 + 0.25 does
    assert probabilities(top_p=0.6) == [round(2 / 3, 5), round(1 / 3, 5), 0, 0]
    assert probabilities(top_p=0.5) == [1, 0, 0, 0]
    # of the two likeliest, renormalised to 2/3 and 1/3, the first holds 0.6
    assert probabilities(top_k=2, top_p=0.6) == [1, 0, 0, 0]
    assert probabilities(top_k=9) == [0.5, 0.25, 0.125, 0.125]


def test_draws_follow_the_distribution() -> None:
    # 1000 evenly spaced numbers give each token its share of them, and one of probability 0 none
    probs = torch.tensor([0.3, 0.0, 0.45, 0.25, 0.0])
    uniforms = torch.arange(1000, dtype=torch.float64) / 1000
    tokens = draw_tokens(probs.log().expand(1000, 5), uniforms)
    assert torch.bincount(tokens, minlength=5).tolist() == pytest.approx([300, 0, 450, 250, 0], abs=1)
    last = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert draw_tokens(probs.log()[None], last).tolist() == [3]
    assert draw_tokens(torch.tensor([[0.0, 0.4, 0.6]]).log(), torch.zeros(1)).tolist() == [1]


def few_shot(count: int) -> list[Prompt]:
    return [prompt("reverse abc: cba, reverse def: fed, reverse " + "abcdef"[: 2 + index % 4] + ":") for index in range(count)]


@contextmanager
def counted_passes(policy: Policy) -> Iterator[list[int]]:
    """Tokens of every forward pass."""
    computed: list[int] = []
    hook = policy.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: computed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    with hook:
        yield computed


def test_a_common_beginning_is_computed_once_and_changes_nothing(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    frequent_ends(policy, monkeypatch)
    sampler = HFSampler(policy, Sampling(max_completion_length=8, temperature=1.5))
    asked = few_shot(12)
    with counted_passes(policy) as computed:
        groups = sampler.sample(asked, num_generations=3, step=0, version=VERSION, seed=1)
    tokens = sum(len(group.prompt_ids) for group in groups)
    assert computed[0] + computed[1] < tokens / 2, "the beginning is alone in the first pass, the rest in the second"
    monkeypatch.setattr(decode_module, "WORTH_A_PASS_TOKENS", 10**9)
    apart = sampler.sample(asked, num_generations=3, step=0, version=VERSION, seed=1)
    for left, right in zip(flat(groups), flat(apart), strict=True):
        assert left[0] == right[0]
        npt.assert_allclose(left[1], right[1], atol=1e-5)
    for group in groups:
        for completion in group.completions:
            npt.assert_allclose(completion.logprobs, recomputed(policy, group.prompt_ids, completion, 1.5), atol=1e-4)


def test_a_window_shorter_than_the_prompts_keeps_them_apart(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [policy.tokenizer.render(each.messages) for each in few_shot(12)]
    monkeypatch.setattr(decode_module, "attention_limit", lambda _model: 8)
    with counted_passes(policy) as computed:
        decode_module._prefill(policy, asked, 1, 4)
    assert len(computed) == 1


def test_prompts_that_begin_alike_are_evaluated_together(policy: Policy) -> None:
    sampler = HFSampler(policy, Sampling(max_completion_length=4))
    mixed = [each for pair in zip(few_shot(8), PROMPTS * 2, strict=True) for each in pair]
    together = sampler.greedy(mixed, 8)
    alone = [sampler.greedy([each], 1)[0] for each in mixed]
    assert [each.ids.tolist() for each in together] == [each.ids.tolist() for each in alone]


@pytest.mark.parametrize("vocab_size", [5, 256, 1000, 5000])
def test_blocks_of_sums_find_the_token_that_one_long_sum_finds(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(300, vocab_size, generator=generator)
    logits[:, torch.randperm(vocab_size, generator=generator)[: vocab_size // 2]] = -torch.inf
    logits[:100, -vocab_size // 3 :] = -torch.inf
    log_probs = torch.log_softmax(logits, dim=-1)
    uniforms = torch.rand(300, generator=generator, dtype=torch.float64)
    cumulative = log_probs.exp().cumsum(dim=-1, dtype=torch.float64)
    wanted = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True).squeeze(-1)
    assert torch.equal(draw_tokens(log_probs, uniforms), wanted)
    for extreme in (0.0, 1 - 2.0**-53):
        drawn = draw_tokens(log_probs, torch.full((300,), extreme, dtype=torch.float64))
        assert log_probs.gather(-1, drawn[:, None]).isfinite().all()
