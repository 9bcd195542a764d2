"""The cache with room: the keys and values of a growing one, without copying what is there."""

from __future__ import annotations

import torch
from transformers import DynamicCache, Gemma3TextConfig
from transformers.cache_utils import DynamicLayer

from agents.samplers.roomy import RoomyLayer, make_room


def states(rows: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = torch.randn(2, rows, 2, tokens, 4, generator=torch.Generator().manual_seed(seed))
    return keys, values


def test_it_holds_what_a_growing_cache_holds_and_copies_nothing() -> None:
    grown, roomy = DynamicCache(), DynamicCache()
    for cache in (grown, roomy):
        cache.update(*states(3, 5, 0), 0)
    make_room(roomy, 4)
    (layer,) = roomy.layers
    assert isinstance(layer, RoomyLayer)
    place = layer.keys.data_ptr()
    for step in range(1, 3):
        for got, wanted in zip(roomy.update(*states(3, 1, step), 0), grown.update(*states(3, 1, step), 0), strict=True):
            assert torch.equal(got, wanted)
    assert layer.keys.data_ptr() == place and roomy.get_seq_length() == 7
    for cache in (grown, roomy):
        cache.batch_select_indices(torch.tensor([2, 0]))
    for step in range(3, 5):
        for got, wanted in zip(roomy.update(*states(2, 1, step), 0), grown.update(*states(2, 1, step), 0), strict=True):
            assert torch.equal(got, wanted)


def test_sliding_layers_stay_as_they_are() -> None:
    config = Gemma3TextConfig(
        num_hidden_layers=2, sliding_window=4, layer_types=["sliding_attention", "full_attention"], num_key_value_heads=2
    )
    cache = DynamicCache(config=config)
    for layer in range(2):
        cache.update(*states(1, 6, 0), layer)
    make_room(cache, 2)
    sliding, full = cache.layers
    assert isinstance(full, RoomyLayer) and isinstance(sliding, DynamicLayer) and not isinstance(sliding, RoomyLayer)
    for step in range(2):
        cache.update(*states(1, 1, step), 0)
        keys, _ = cache.update(*states(1, 1, step), 1)
    assert keys.shape[-2] == 8
