"""A policy's weights for another process, through a file in memory that both have open.

The file has no name, so that nothing is left behind however the two end. It is written in safetensors' format without a
second copy of the weights, which the library's own writer would need.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path

import blake3
import torch
from transformers.core_model_loading import revert_weight_conversion

from agents.policies.lora import has_adapter, save_adapter
from agents.policies.policy import Policy
from agents.samplers.vllm_server import add_tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls them."""

_COUNT = struct.Struct("<Q")


def anonymous_file() -> int:
    """A new file descriptor of a file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def checkpoint_tensors(policy: Policy) -> dict[str, torch.Tensor]:
    """The policy's weights under the names and in the shapes of a checkpoint on disk; tied ones once.

    Under LoRA those of the base.
    """
    model = policy.model
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {name for name, _ in model.named_parameters()}
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in tied}
    if has_adapter(model):
        tensors = {name.replace(".base_layer.", "."): each for name, each in tensors.items() if ".lora_" not in name}
    return dict(revert_weight_conversion(model, tensors))


def adapter_config(policy: Policy) -> tuple[str, int] | None:
    """What stands in the adapter_config.json of the policy's LoRA adapter, and its rank; None without an adapter."""
    if not has_adapter(policy.model):
        return None
    with tempfile.TemporaryDirectory() as folder:
        save_adapter(policy.model, Path(folder))
        text = (Path(folder) / "adapter_config.json").read_text()
    return text, int(json.loads(text)["r"])


def write_weights(fd: int, tensors: Mapping[str, torch.Tensor]) -> tuple[str, int]:
    """Replace the file's content by these tensors, in the order of their names; their digest and the bytes written.

    The digest is that of `add_tensor` over all of them.
    """
    names = sorted(tensors)
    header: dict[str, object] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    digest = blake3.blake3()
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "wb", closefd=False) as file:
        file.write(_COUNT.pack(len(head)) + head)
        for name in names:
            tensor = tensors[name].cpu()
            add_tensor(digest, name, tensor)
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest(), _COUNT.size + len(head) + end


def empty(fd: int) -> None:
    """Give the file's memory back."""
    os.ftruncate(fd, 0)
