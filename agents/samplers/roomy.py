"""A cache whose layers have room for the tokens to come: a decoding step writes its keys and values and copies no others.

Shape legend: B sequences · h key heads · L cached tokens · d features of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """keys, values [B, h, L, d] are the filled part of larger tensors."""

    keys: Tensor
    values: Tensor

    def __init__(self, layer: DynamicLayer, room: int) -> None:
        """Takes over what `layer` holds. room: most tokens that will be added."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.__dict__.update(vars(layer))
        self._buffers = [_with_room(filled, room) for filled in (self.keys, self.values)]
        self._fill(self.keys.shape[-2])

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Add tokens; returns all keys and values."""
        start = self.keys.shape[-2]
        stop = start + key_states.shape[-2]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:stop] = states
        self._fill(stop)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows alone."""
        length = self.keys.shape[-2]
        self._buffers = [buffer[indices] for buffer in self._buffers]
        self._fill(length)

    def _fill(self, length: int) -> None:
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)


def make_room(cache: DynamicCache, tokens: int) -> None:
    """Let the cache's layers take `tokens` more without copying. Layers of other kinds (sliding windows) stay as they are."""
    cache.layers = [RoomyLayer(layer, tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers]


def _with_room(filled: Tensor, room: int) -> Tensor:
    batch, heads, length, features = filled.shape
    buffer = torch.empty((batch, heads, length + room, features), dtype=filled.dtype, device=filled.device)
    buffer[:, :, :length] = filled
    return buffer
