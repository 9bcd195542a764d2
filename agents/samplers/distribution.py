"""The sampling distribution: temperature, top-k, top-p; one draw per row from given uniform numbers.

Shape legend: B sequences · V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn

from agents.config import Sampling

BLOCK = 256
"""Tokens that are summed before the cumulative sum."""


def sampling_log_probs(logits_BV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probs [B, V], float32, of the distribution that tokens are drawn from.

    softmax(logits / temperature), cut to the `top_k` likeliest tokens (0: all), then to the smallest set of likeliest
    tokens that holds at least `top_p`, then renormalised; tokens cut away have -inf. With top_k = 0 and top_p = 1 the
    support is full and the log-probs are those that a learner recomputes at the same temperature; a truncated support is
    renormalised, so there the two differ by the log of the mass that was kept.
    """
    log_probs_BV = torch.log_softmax(logits_BV.float() / sampling.temperature, dim=-1)
    kept = log_probs_BV
    if 0 < sampling.top_k < log_probs_BV.shape[-1]:
        least_B1 = log_probs_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        kept = kept.masked_fill(log_probs_BV < least_B1, -torch.inf)
    if sampling.top_p < 1:
        kept = _cut_to_mass(torch.log_softmax(kept, dim=-1), sampling.top_p)
    return log_probs_BV if kept is log_probs_BV else torch.log_softmax(kept, dim=-1)


def _cut_to_mass(log_probs_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    sorted_BV, order_BV = log_probs_BV.sort(dim=-1, descending=True)
    mass_before_BV = sorted_BV.exp().cumsum(dim=-1).roll(1, dims=-1)
    mass_before_BV[:, 0] = 0.0
    cut_mask_BV = torch.zeros_like(log_probs_BV, dtype=torch.bool).scatter(-1, order_BV, mass_before_BV >= top_p)
    return log_probs_BV.masked_fill(cut_mask_BV, -torch.inf)


def finest_dtype(device: torch.device) -> torch.dtype:
    """float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def draw_tokens(log_probs_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Token ids [B] by inverting each row's cumulative distribution at its uniform number in [0, 1).

    A row's token depends on that row alone, so dropping finished rows from a batch changes nothing in the others.
    Sums over blocks of tokens find the block, sums within it the token, which spares a cumulative sum over the whole
    vocabulary. Both are added up in float64 where the device has it, which keeps the tail of a large vocabulary within reach.
    """
    precise = finest_dtype(log_probs_BV.device)
    whole = log_probs_BV.shape[-1]
    blocks = -(-whole // BLOCK)
    probs_BV = log_probs_BV.exp()
    if whole % BLOCK:
        probs_BV = nn.functional.pad(probs_BV, (0, blocks * BLOCK - whole))
    probs_BNK = probs_BV.view(-1, blocks, BLOCK)
    through_BN = probs_BNK.sum(dim=-1).cumsum(dim=-1, dtype=precise)
    targets_B1 = uniforms_B.to(precise)[:, None] * through_BN[:, -1:]
    block_B1 = torch.minimum(torch.searchsorted(through_BN, targets_B1, right=True), _last_with_mass(through_BN))
    before_B1 = nn.functional.pad(through_BN, (1, 0)).gather(-1, block_B1)
    within_BK = probs_BNK.take_along_dim(block_B1[..., None], dim=1).squeeze(1).cumsum(dim=-1, dtype=precise)
    place_B1 = torch.searchsorted(within_BK, targets_B1 - before_B1, right=True)
    return (block_B1 * BLOCK + torch.minimum(place_B1, _last_with_mass(within_BK))).squeeze(-1)


def _last_with_mass(cumulative_BN: torch.Tensor) -> torch.Tensor:
    """Where each row [B, 1] reaches its whole: sums of two orders may differ by a hair's breadth, which must find a token."""
    return (cumulative_BN < cumulative_BN[:, -1:]).sum(dim=-1, keepdim=True)
