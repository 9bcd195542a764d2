"""`build_policy`: from a policy's settings to a causal LM that is ready to sample and to learn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from agents.config import HFPolicy, PolicyConfig, TinyPolicy
from agents.errors import PolicyError
from agents.policies.lora import adapter_tensors, add_adapter, has_adapter, load_adapter, save_adapter
from agents.policies.tiny import build_tiny
from agents.policies.tokenizer import PolicyTokenizer
from tokenalign.table import TokenKind

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]

HOLE_LOGIT = -1e4
"""Logit of ids that the vocabulary lacks: probability 0 in every dtype, yet finite, so that entropies stay numbers."""


LIMITED_ATTENTION = ("sliding_window", "attention_chunk_size")
"""Settings of models whose layers look back over so many tokens only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One agent's policy.

    model: a Hugging Face causal LM without dropout, in eval mode, or in train mode where gradients are checkpointed
    (transformers checkpoints in no other). max_context: most tokens of prompt and completion together.
    """

    model: PreTrainedModel
    tokenizer: PolicyTokenizer
    device: torch.device
    max_context: int

    def trainable_tensors(self) -> dict[str, torch.Tensor]:
        """What training changes, by the names of the saved files: all weights, or the adapter's alone under LoRA.

        The tensors are the model's own, detached: they change with it, and writing into them changes it.
        """
        if has_adapter(self.model):
            return adapter_tensors(self.model)
        return {name: each.detach() for name, each in self.model.named_parameters() if each.requires_grad}

    def save(self, path: Path) -> None:
        """Write model and tokenizer so that AutoModelForCausalLM and AutoTokenizer load them from `path`.

        Under LoRA only the adapter is written, for PeftModel and AutoPeftModelForCausalLM; it names its base by `policy.path`.
        """
        if has_adapter(self.model):
            save_adapter(self.model, path)
        else:
            self.model.save_pretrained(path)
        self.tokenizer.hf.save_pretrained(path)

    def load(self, path: Path) -> None:
        """Take the weights that `save` of an equal policy wrote. Raises PolicyError when they cannot be had or do not fit."""
        try:
            if has_adapter(self.model):
                load_adapter(self.model, path)
            else:
                saved = type(self.model).from_pretrained(path, dtype=self.model.dtype)
                self.model.load_state_dict(saved.state_dict())
        except Exception as error:  # files are foreign: anything may come
            raise PolicyError(f"cannot load weights from {path}: {type(error).__name__}: {error}") from error


def attention_limit(model: PreTrainedModel) -> float:
    """Tokens that a sequence may have before some layer no longer sees all of them (sliding windows, chunks); inf for none.

    Up to here it does not matter where in a sequence padding lies, or another row's tokens that a mask hides.
    """
    config = model.config.get_text_config()
    limits = [getattr(config, name, None) for name in LIMITED_ATTENTION]
    return min((limit for limit in limits if limit is not None), default=float("inf"))


def build_policy(
    config: PolicyConfig, *, seed: int, device: str, dtype: str, threads: int, loaded: Loaded | None = None
) -> Policy:
    """Build or load the policy that the settings describe.

    seed: draws a tiny policy's weights, or an adapter's. device: "auto" takes CUDA where there is one, else the CPU.
    dtype: as torch names it. threads: of torch, for the whole process. loaded: in the place of what an HFPolicy's `path` names;
    it is made the policy as it is, in place. Raises PolicyError when it cannot be had.
    """
    torch.set_num_threads(threads)
    where = _usable_device(device)
    try:
        return _build(config, seed, where, getattr(torch, dtype), loaded)
    except PolicyError:
        raise
    except Exception as error:  # a model's files, template and code are foreign: anything may come
        what = "load a causal LM from policy.path=" + repr(config.path) if isinstance(config, HFPolicy) else f"build {config}"
        raise PolicyError(f"cannot {what}: {type(error).__name__}: {error}") from error


def _usable_device(name: str) -> torch.device:
    """The device, seen to hold a number: torch knows the names of many that a machine, or its own build, has not."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        torch.ones(1, device=device).item()
    except Exception as error:  # of half a dozen kinds, by device and build
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise PolicyError(
            f'device={name!r} cannot be used here: {reason}; take "cpu", or "auto" for CUDA where there is one'
        ) from error
    return device


def _build(config: PolicyConfig, seed: int, where: torch.device, torch_dtype: torch.dtype, loaded: Loaded | None) -> Policy:
    hf_tokenizer: PreTrainedTokenizerBase
    if isinstance(config, TinyPolicy):
        model, hf_tokenizer = build_tiny(config, seed=seed, dtype=torch_dtype)
        prompt_format, max_context = "auto", config.max_context
    else:
        model, hf_tokenizer = _load(config, torch_dtype) if loaded is None else _adopt(loaded, torch_dtype)
        if config.lora is not None:
            add_adapter(model, config.lora, seed=seed)
        prompt_format, max_context = config.prompt_format, _max_context(config, model)
    vocab_size = model.get_output_embeddings().weight.shape[0]  # type: ignore[no-untyped-call]
    tokenizer = PolicyTokenizer(
        hf_tokenizer, vocab_size=vocab_size, prompt_format=prompt_format, more_eos_ids=_configured_eos_ids(model)
    )
    if isinstance(config, HFPolicy) and config.device_map is not None:
        where = model.get_input_embeddings().weight.device  # type: ignore[assignment]
    else:
        model.to(device=where)  # type: ignore[call-arg]
    model.train(isinstance(config, HFPolicy) and config.gradient_checkpointing)
    _close_holes(model, tokenizer, where)
    return Policy(model=model, tokenizer=tokenizer, device=where, max_context=max_context)


def _load(config: HFPolicy, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    code = config.trust_remote_code
    if (Path(config.path) / "adapter_config.json").is_file() and not (Path(config.path) / "config.json").is_file():
        raise PolicyError(
            f"policy.path={config.path!r} holds a LoRA adapter without its base; merge the two with peft "
            "(PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(...)) and name the result"
        )
    model_config = AutoConfig.from_pretrained(config.path, trust_remote_code=code)
    _disable_dropout(model_config)
    model = AutoModelForCausalLM.from_pretrained(
        config.path,
        config=model_config,
        dtype=dtype,
        device_map=config.device_map,
        attn_implementation=config.attn_implementation,
        trust_remote_code=code,
    )
    tokenizer = AutoTokenizer.from_pretrained(config.path, trust_remote_code=code)
    if config.gradient_checkpointing:
        reentrant = {"use_reentrant": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=reentrant)  # type: ignore[no-untyped-call]
    return model, tokenizer


def _adopt(loaded: Loaded, dtype: torch.dtype) -> Loaded:
    model, tokenizer = loaded
    _disable_dropout(model.config)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.requires_grad_(True)
    return model.to(dtype=dtype), tokenizer  # type: ignore[call-arg]


def _disable_dropout(config: PretrainedConfig) -> None:
    """Set every dropout probability to 0, those of nested configs too: a ratio at step 0 must be 1."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            _disable_dropout(value)
        elif isinstance(value, float) and ("dropout" in name or "pdrop" in name):
            setattr(config, name, 0.0)


def _max_context(config: HFPolicy, model: PreTrainedModel) -> int:
    own: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = [limit for limit in (own, config.max_context) if limit is not None]
    if not limits:
        raise PolicyError(f"the model at policy.path={config.path!r} names no longest context; set policy.max_context")
    return min(limits)


def _configured_eos_ids(model: PreTrainedModel) -> set[int]:
    """End tokens named by the generation config and by the model's own: a number or a list in each."""
    named: set[int] = set()
    for config in (model.generation_config, model.config.get_text_config()):
        value = getattr(config, "eos_token_id", None)
        named |= set(value) if isinstance(value, list) else set() if value is None else {value}
    return named


def _close_holes(model: PreTrainedModel, tokenizer: PolicyTokenizer, device: torch.device) -> None:
    """Give ids that the vocabulary lacks (padded embedding rows) no probability, in sampling and in training alike."""
    holes = torch.from_numpy(tokenizer.table.kinds == TokenKind.HOLE).to(device)
    if not holes.any():
        return

    def close(_module: torch.nn.Module, _inputs: object, output: CausalLMOutputWithPast) -> CausalLMOutputWithPast:
        if output.logits is not None:
            output.logits = output.logits.masked_fill(holes, HOLE_LOGIT)
        return output

    model.register_forward_hook(close)
