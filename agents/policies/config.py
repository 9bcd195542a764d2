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


class LoRA(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters (Hu et al., arXiv 2106.09685) in place of all weights; names and meaning as in peft.LoraConfig.

    target_modules: "all-linear" for every linear layer but the head, a regular expression, or the ends of module names.
    lora_dropout: of the supervised steps of a warm start. Log-probs are always taken without: a ratio must begin at 1.
    use_rslora: scale by lora_alpha / sqrt(r), not lora_alpha / r (arXiv 2312.03732).
    """

    r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"
    use_rslora: bool = False

    def __post_init__(self) -> None:
        check_range(self, "r", ge=1, le=65_536)
        check_range(self, "lora_alpha", ge=1, le=MANY)
        check_range(self, "lora_dropout", ge=0, lt=1)
        if not self.target_modules or (isinstance(self.target_modules, tuple) and "" in self.target_modules):
            raise ValueError(f"`target_modules` must name modules, got target_modules={self.target_modules!r}")


class HFPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="hf"):
    """Any Hugging Face causal LM, by local path or hub name.

    prompt_format: "auto" uses the tokenizer's chat template where it has one and plain text elsewhere; anything else is a
    format string with `{prompt}`, for base models. lora: train adapters; None: all weights. device_map: spreads the layers
    over the machine's devices, as in `from_pretrained`; the agent's `device` must then stay "auto".
    gradient_checkpointing: keep one activation per layer and recompute the rest in the backward pass.
    """

    path: str
    prompt_format: str = "auto"
    max_context: int | None = None
    lora: LoRA | None = None
    device_map: str | dict[str, int | str] | None = None
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
