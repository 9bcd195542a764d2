"""Tiny randomly initialised causal LMs: two architectures, three kinds of tokenizer, made in a second on any machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from agents.config import TinyPolicy
from agents.policies.tiny_tokenizers import BOS, EOS, PAD, TOKENIZERS, UNK

CONTENT_ONLY = "{{ bos_token or '' }}{{ messages | map(attribute='content') | join('\\n') }}"
"""Chat template: a tiny policy knows no roles; an end-of-sequence token ends its answer."""


def build_tiny(config: TinyPolicy, *, seed: int, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Model with weights drawn by `seed` (torch's global generator is left as it was) and its tokenizer."""
    tokenizer = _wrap(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ARCHITECTURES[config.arch](config, tokenizer)
    return model.to(dtype=dtype), tokenizer  # type: ignore[call-arg]


def _wrap(config: TinyPolicy) -> PreTrainedTokenizerFast:
    tokenizer = TOKENIZERS[config.tokenizer](config.vocab_size)
    controls = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNK}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        model_max_length=config.max_context,
        clean_up_tokenization_spaces=False,
        chat_template=CONTENT_ONLY,
        **{role: token for role, token in controls.items() if tokenizer.token_to_id(token) is not None},
    )


def _shared(config: TinyPolicy, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": config.hidden_size,
        "intermediate_size": 2 * config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_context,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "attention_dropout": 0.0,
    }


def llama(config: TinyPolicy, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Llama: RMS norm, gated MLP, sequential blocks, one matrix for input and output embeddings."""
    return LlamaForCausalLM(LlamaConfig(**_shared(config, tokenizer), tie_word_embeddings=True))


def gpt_neox(config: TinyPolicy, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """GPT-NeoX: layer norm, plain MLP beside the attention, rotary on a quarter of each head, two embedding matrices."""
    return GPTNeoXForCausalLM(GPTNeoXConfig(**_shared(config, tokenizer), hidden_dropout=0.0, tie_word_embeddings=False))


ARCHITECTURES: Mapping[str, Callable[[TinyPolicy, PreTrainedTokenizerFast], PreTrainedModel]] = {
    "llama": llama,
    "gpt_neox": gpt_neox,
}
