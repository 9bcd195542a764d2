"""The learner's log-probs: whatever way they are computed, values and gradients are those of one row in one sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

import agents.scoring
from agents.layout import cheapest_count, lay_out
from agents.microbatch import MicroBatch, collate, split
from agents.rows import Row, Stream
from agents.scoring import Scorer, plain_logprobs

VOCAB = 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama, eager": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE | {"attn_implementation": "eager"})),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE)),
    "gpt2, absolute positions": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    ),
    "gemma2, soft cap": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=16, final_logit_softcapping=2.0)),
    "gemma3, short window": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=8)),
    "granite, scaled logits": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=0.25)),
    "mamba, no attention": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0)
    ),
}
IN_FLOAT32 = {"mamba, no attention", "gemma2, soft cap", "gemma3, short window"}
"""Which compute something in float32 whatever the weights are."""


def build(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Weights large enough for every token to matter to those behind it."""
    torch.manual_seed(0)
    model: PreTrainedModel = MODELS[name]().to(dtype=dtype).eval()  # type: ignore[call-arg]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5.0)
    return model


def rows_of(shape: list[tuple[int, list[int]]], seed: int = 0) -> list[Row]:
    """shape: length of each prompt, and those of its completions."""
    rng = np.random.default_rng(seed)
    rows = []
    for prompt_length, lengths in shape:
        prompt = rng.integers(1, VOCAB, size=prompt_length, dtype=np.int32)
        rows += [
            Row(stream=Stream.OWN, prompt_ids=prompt, ids=rng.integers(0, VOCAB, size=each, dtype=np.int32)) for each in lengths
        ]
    return rows


def collated(rows: list[Row], dtype: torch.dtype = torch.float64) -> MicroBatch:
    return collate(rows, pad_id=0, device=torch.device("cpu"), dtype=dtype)


def gradients(model: nn.Module, logprobs_BT: Tensor) -> dict[str, Tensor]:
    weights_BT = torch.randn(logprobs_BT.shape, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    named = dict(model.named_parameters())
    found = torch.autograd.grad((logprobs_BT * weights_BT).sum(), list(named.values()), allow_unused=True)
    return {name: each for name, each in zip(named, found, strict=True) if each is not None}


def one_by_one(model: nn.Module, rows: list[Row], temperature: float) -> Tensor:
    """Log-probs [B, T] by a forward pass over nothing but each row's tokens."""
    width = max(len(row.ids) for row in rows)
    each_row = []
    for row in rows:
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.ids]))
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(row.prompt_ids) - 1 : -1] / temperature
        chosen = torch.log_softmax(logits, dim=-1).gather(-1, ids[len(row.prompt_ids) :, None]).squeeze(-1)
        each_row.append(nn.functional.pad(chosen, (0, width - len(chosen))))
    return torch.stack(each_row)


ROWS = rows_of([(3, [4, 1, 6]), (5, [2]), (1, [3, 3]), (4, [1])])


@pytest.mark.parametrize("part_bytes", [1 << 20, 3 * 4 * VOCAB], ids=["whole", "in parts"])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_each_row_alone(name: str, part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents.scoring, "PART_BYTES", part_bytes)
    monkeypatch.setattr(torch, "float32", torch.float64)  # models compute norms and softmax in what goes by that name
    model = build(name)
    wanted_BT = one_by_one(model, ROWS, 0.7)
    scorer = Scorer(model, temperature=0.7)
    assert scorer._backbone is not None and (scorer._hidden_size is not None) == ("no attention" not in name)
    got_BT = scorer(collated(ROWS))
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-5 if name in IN_FLOAT32 else 1e-10, check_dtype=False)
    close(got_BT, wanted_BT)
    wanted = gradients(model, wanted_BT)
    for parameter, got in gradients(model, got_BT).items():
        scale = max(1.0, float(wanted[parameter].abs().max()))
        close(got / scale, wanted[parameter] / scale)
    plain_BT = plain_logprobs(model, collated(ROWS), temperature=0.7)
    close(plain_BT, wanted_BT)


@pytest.mark.parametrize("name", MODELS)
def test_in_float32_all_ways_agree_to_1e_5(name: str) -> None:
    model = build(name, torch.float32)
    batch = collated(ROWS, torch.float32)
    got_BT, plain_BT = Scorer(model, temperature=1.0)(batch), plain_logprobs(model, batch, temperature=1.0)
    torch.testing.assert_close(got_BT, plain_BT, rtol=0, atol=1e-5)


def tokens_of_backbone(model: PreTrainedModel, rows: list[Row]) -> tuple[int, int]:
    """How many tokens the backbone, and how many states the head, is given."""
    scorer = Scorer(model, temperature=1.0)
    seen = {"backbone": 0, "head": 0}
    forward = model.base_model.forward
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]

    def count(*args: Any, **kwargs: Any) -> Any:
        seen["backbone"] += kwargs["input_ids"].numel()
        return forward(*args, **kwargs)

    head.register_forward_pre_hook(lambda _, inputs: seen.update(head=seen["head"] + inputs[0][..., 0].numel()))
    model.base_model.forward = count
    scorer(collated(rows))
    assert model.base_model.forward is count, "what accelerate puts there must survive"
    return seen["backbone"], seen["head"]


def test_a_prompt_is_computed_once_and_the_head_on_completions_only() -> None:
    rows = rows_of([(20, [3, 5, 2, 4]), (20, [4, 4, 4, 2])])
    assert tokens_of_backbone(build("llama, tied"), rows) == (2 * (20 + 14), 28)
    assert tokens_of_backbone(build("gemma3, short window"), rows) == (8 * 25, 28), "a window cuts where a shared mask does not"


def test_a_model_that_mixes_without_attention_shares_no_prompts() -> None:
    rows = rows_of([(6, [3, 5])])
    backbone, _ = tokens_of_backbone(build("mamba, no attention"), rows)
    assert backbone == 2 * 11


def test_a_leak_between_completions_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even at weights as small as a random model's, where hardly anything depends on what came before."""
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = MODELS["llama, tied"]().to(dtype=dtype).eval()  # type: ignore[call-arg]
        assert Scorer(model, temperature=1.0)._hidden_size == 32
        with monkeypatch.context() as broken:
            broken.setattr("agents.layout.Layout.attention_mask", lambda self, _: (self.segments >= 0).long())
            assert Scorer(model, temperature=1.0)._hidden_size is None


def test_a_model_that_does_not_come_apart_is_scored_by_its_own_forward() -> None:
    class Doubling(LlamaForCausalLM):  # type: ignore[no-untyped-call]
        """Gives its backbone what it cannot be given alone."""

        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            return super().forward(input_ids=(input_ids + 1) % VOCAB, **kwargs)

    torch.manual_seed(0)
    model = Doubling(LlamaConfig(**SHAPE)).double().eval()  # type: ignore[no-untyped-call]
    scorer = Scorer(model, temperature=1.0)
    assert scorer._backbone is None
    torch.testing.assert_close(scorer(collated(ROWS)), one_by_one(model, ROWS, 1.0))


def test_logits_are_never_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents.scoring, "PART_BYTES", 2 * 4 * VOCAB)
    model = build("llama, tied")
    largest = 0

    def note(saved: Tensor) -> Tensor:
        nonlocal largest
        if saved.shape[-1:] == (VOCAB,):
            largest = max(largest, saved.numel() // VOCAB)
        return saved

    scorer, batch = Scorer(model, temperature=1.0), collated(rows_of([(3, [9, 9])]))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        scorer(batch).sum().backward()  # type: ignore[no-untyped-call]
    assert largest <= 2


MODEL = build("gpt_neox")
SCORER = Scorer(MODEL, temperature=1.0)


@settings(max_examples=15, deadline=None)
@given(
    shape=st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 7), min_size=1, max_size=5)), min_size=1, max_size=4),
    size=st.integers(1, 8),
)
def test_any_batch_split_anyhow_gives_the_same(shape: list[tuple[int, list[int]]], size: int) -> None:
    rows = rows_of(shape)
    with torch.no_grad():
        for indices in split(rows, size):
            chosen = [rows[index] for index in indices]
            got_BT = SCORER(collated(chosen))
            torch.testing.assert_close(got_BT, one_by_one(MODEL, chosen, 1.0), rtol=0, atol=1e-10)


def test_a_layout_by_hand() -> None:
    rows = [
        Row(stream=Stream.OWN, prompt_ids=np.array([7, 8]), ids=np.array([1, 2, 3])),
        Row(stream=Stream.OWN, prompt_ids=np.array([9]), ids=np.array([4])),
        Row(stream=Stream.OWN, prompt_ids=np.array([7, 8]), ids=np.array([5])),
    ]
    layout = lay_out(rows, hidden_size=64, pad_id=0, device=torch.device("cpu"))
    assert layout.input_ids.tolist() == [[7, 8, 1, 2, 3, 5], [9, 4, 0, 0, 0, 0]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 4, 2], [0, 1, 0, 0, 0, 0]]
    assert layout.sources.tolist() == [1, 2, 3, 6, 1] and layout.targets.tolist() == [1, 2, 3, 4, 5]
    seen = layout.attention_mask(torch.float32)[0, 0] == 0
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]


def test_long_completions_are_not_laid_in_one_row() -> None:
    assert cheapest_count(2000, 10, 8, 576) == 8
    # (100 + 4k + ...): L²/6H outgrows what a prompt of 10 tokens saves.
    assert cheapest_count(10, 4000, 8, 576) == 1
