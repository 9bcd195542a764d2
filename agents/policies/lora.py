"""LoRA adapters inside a causal LM, through peft: the model stays a PreTrainedModel, its base weights are frozen.

Source: Hu et al., arXiv 2106.09685, W x + (lora_alpha / r) B A x with B = 0 at the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from agents.errors import PolicyError
from agents.policies.config import LoRA

ADAPTER_FILE = "adapter_model.safetensors"

SAVED_PREFIX = "base_model.model."
"""What peft's files put before the model's own names."""


def add_adapter(model: PreTrainedModel, config: LoRA, *, seed: int) -> None:
    """Freeze the model and put one adapter into it, in the model's dtype, drawn by `seed`. Its dropout is off."""
    modules = config.target_modules
    lora = LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=modules if isinstance(modules, str) else list(modules),
        use_rslora=config.use_rslora,
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(lora, model)
    for dropout in _dropouts(model):
        dropout.p = 0.0


def has_adapter(model: nn.Module) -> bool:
    """Whether the model holds an adapter, whose weights alone are then trained."""
    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def adapter_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The adapter's tensors, detached, by the names of peft's files."""
    return {SAVED_PREFIX + name: each.detach() for name, each in get_peft_model_state_dict(model).items()}


def save_adapter(model: PreTrainedModel, path: Path) -> None:
    """Write the adapter as PeftModel.save_pretrained does."""
    _config(model).save_pretrained(str(path))
    tensors = {name: each.contiguous() for name, each in adapter_tensors(model).items()}
    save_file(tensors, path / ADAPTER_FILE, metadata={"format": "pt"})


def load_adapter(model: PreTrainedModel, path: Path) -> None:
    """Take an adapter's tensors from what `save_adapter` of an equal model wrote."""
    saved = load_file(path / ADAPTER_FILE)
    for name, tensor in adapter_tensors(model).items():
        tensor.copy_(saved[name])


def load_merged(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that an adapter and its base make together, and its tokenizer: beside the adapter, else the base's.

    The base is loaded from where the adapter's config says. Raises PolicyError when either cannot be had.
    """
    try:
        model = AutoPeftModelForCausalLM.from_pretrained(str(path))
        base = model.peft_config["default"].base_model_name_or_path
        tokenizer = AutoTokenizer.from_pretrained(path if (path / "tokenizer_config.json").is_file() else base)
        return model.merge_and_unload(), tokenizer
    except Exception as error:  # a model's files and code are foreign: anything may come
        raise PolicyError(f"cannot load the LoRA adapter in {path} with its base: {type(error).__name__}: {error}") from error


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The base model, as it was before any training. Without an adapter, the model."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextmanager
def adapter_dropout(model: nn.Module) -> Iterator[None]:
    """The adapter's dropout as configured, for supervised steps. Without an adapter, nothing."""
    dropouts = _dropouts(model)
    modes = [dropout.training for dropout in dropouts]
    try:
        for dropout in dropouts:
            dropout.p = _config(model).lora_dropout
            dropout.train()
        yield
    finally:
        for dropout, mode in zip(dropouts, modes, strict=True):
            dropout.p = 0.0
            dropout.train(mode)


def _config(model: nn.Module) -> LoraConfig:
    configs: dict[str, LoraConfig] = model.peft_config  # type: ignore[assignment]
    (config,) = configs.values()
    return config


def _dropouts(model: nn.Module) -> list[nn.Dropout]:
    layers = (module.lora_dropout for module in model.modules() if isinstance(module, LoraLayer))
    return [dropout for each in layers for dropout in each.values() if isinstance(dropout, nn.Dropout)]
