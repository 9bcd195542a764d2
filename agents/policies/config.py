"""The policies' settings: one struct per kind, told apart by `kind`."""

from __future__ import annotations

from typing import Literal

import msgspec

from agents.bounds import MANY, check_range

MIN_BYTE_BPE_VOCAB = 256 + 3
"""Every byte and the three control tokens."""


class TinyPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="tiny"):
    """A small randomly initialised causal LM with a tokenizer of its own, trained on the corpus in this package."""

    arch: Literal["llama", "gpt_neox"] = "llama"
    tokenizer: Literal["byte_bpe", "char", "unigram"] = "byte_bpe"
    vocab_size: int = 320
    hidden_size: int = 128
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    max_context: int = 64

    def __post_init__(self) -> None:
        check_range(self, "vocab_size", ge=MIN_BYTE_BPE_VOCAB if self.tokenizer == "byte_bpe" else 32, le=65_536)
        check_range(self, "hidden_size", ge=2, le=65_536)
        check_range(self, "num_hidden_layers", "num_attention_heads", ge=1, le=1024)
        check_range(self, "max_context", ge=8, le=2**20)
        if self.hidden_size % (2 * self.num_attention_heads):  # rotary positions turn pairs of a head's features
            raise ValueError(
                f"`hidden_size` must be an even multiple of `num_attention_heads`, got hidden_size={self.hidden_size}, "
                f"num_attention_heads={self.num_attention_heads}"
            )


class HFPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="hf"):
    """Any Hugging Face causal LM, by local path or hub name.

    prompt_format: "auto" uses the tokenizer's chat template where it has one and plain text elsewhere; anything else is a
    format string with `{prompt}`, for base models.
    """

    path: str
    prompt_format: str = "auto"
    max_context: int | None = None
    attn_implementation: str | None = None
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("`path` must name a model directory or a hub id, got path=''")
        check_range(self, "max_context", ge=8, le=MANY)
        if self.prompt_format != "auto" and "{prompt}" not in self.prompt_format:
            raise ValueError(f'`prompt_format` must be "auto" or contain {{prompt}}, got prompt_format={self.prompt_format!r}')


PolicyConfig = TinyPolicy | HFPolicy
