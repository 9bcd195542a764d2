"""Rows as padded tensors, and the forward pass that gives their log-probs.

Shape legend: B rows · Tp padded prompt tokens · T padded completion tokens · V vocabulary.
Prompts are padded on the left and completions on the right, so that one slice of the logits serves all rows. Masks come
from lengths, never from token values: a pad id that equals the end-of-sequence id is harmless.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agents.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """input_ids, attention_mask, position_ids [B, Tp + T]; completion_ids, mask [B, T]; advantages, weights [B].

    span_ids [B, T]: index of each token's span in span_logprobs [S] over the whole microbatch, -1 outside; None when no
    row has spans. sampled_logprobs [B, T]: the sampler's, 0 where padded; None unless every row has them.
    off_policy_mask [B, 1]: rows that other weights or another engine sampled.
    """

    rows: Sequence[Row]
    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    completion_ids: Tensor
    mask: Tensor
    advantages: Tensor
    weights: Tensor
    span_ids: Tensor | None
    span_logprobs: Tensor | None
    sampled_logprobs: Tensor | None
    off_policy_mask: Tensor


def split(rows: Sequence[Row], size: int) -> Iterator[list[int]]:
    """Indices of at most `size` rows each: those of one prompt together, and like lengths, so that little is computed twice."""

    def key(index: int) -> tuple[int, bytes, int]:
        row = rows[index]
        return len(row.prompt_ids), row.prompt_ids.tobytes(), len(row.ids)

    order = sorted(range(len(rows)), key=key)
    for start in range(0, len(order), size):
        yield order[start : start + size]


def collate(rows: Sequence[Row], *, pad_id: int, device: torch.device, dtype: torch.dtype = torch.float32) -> MicroBatch:
    """Pad rows into one microbatch on `device`; losses over it are computed in `dtype`."""
    prompt_width = max(len(row.prompt_ids) for row in rows)
    width = max(len(row.ids) for row in rows)
    ids = np.full((len(rows), prompt_width + width), pad_id, dtype=np.int64)
    attention = np.zeros(ids.shape, dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=bool)
    sampled = np.zeros((len(rows), width), dtype=np.float32)
    for index, row in enumerate(rows):
        start, stop = prompt_width - len(row.prompt_ids), prompt_width + len(row.ids)
        ids[index, start:prompt_width] = row.prompt_ids
        ids[index, prompt_width:stop] = row.ids
        attention[index, start:stop] = 1
        mask[index, : len(row.ids)] = True
        if row.sampled_logprobs is not None:
            sampled[index, : len(row.ids)] = row.sampled_logprobs
    span_ids, span_logprobs = _collate_spans(rows, width)
    input_ids = torch.from_numpy(ids).to(device)
    return MicroBatch(
        rows=rows,
        input_ids=input_ids,
        attention_mask=torch.from_numpy(attention).to(device),
        position_ids=torch.from_numpy(np.maximum(attention.cumsum(axis=1) - 1, 0)).to(device),
        completion_ids=input_ids[:, prompt_width:],
        mask=torch.from_numpy(mask).to(device),
        advantages=torch.tensor([row.advantage for row in rows], dtype=dtype, device=device),
        weights=torch.tensor([row.weight for row in rows], dtype=dtype, device=device),
        span_ids=None if span_ids is None else torch.from_numpy(span_ids).to(device),
        span_logprobs=None if span_logprobs is None else torch.from_numpy(span_logprobs).to(device, dtype),
        sampled_logprobs=None
        if any(row.sampled_logprobs is None for row in rows)
        else torch.from_numpy(sampled).to(device, dtype),
        off_policy_mask=torch.tensor([[row.off_policy] for row in rows], dtype=torch.bool, device=device),
    )


def _collate_spans(
    rows: Sequence[Row], width: int
) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.int64]] | None, np.ndarray[tuple[int], np.dtype[np.float64]] | None]:
    if all(row.spans is None for row in rows):
        return None, None
    span_ids = np.full((len(rows), width), -1, dtype=np.int64)
    logprobs: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []
    offset = 0
    for index, row in enumerate(rows):
        if row.spans is not None:
            span_ids[index, : len(row.ids)] = np.where(row.spans.span < 0, -1, row.spans.span + offset)
            logprobs.append(row.spans.logprobs)
            offset += len(row.spans.logprobs)
    return span_ids, np.concatenate(logprobs)


def completion_logits(model: torch.nn.Module, batch: MicroBatch, *, temperature: float) -> Tensor:
    """Logits [B, T, V] that predict the completion tokens, divided by the sampling temperature, in the batch's dtype."""
    width = batch.completion_ids.shape[1]
    output = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        logits_to_keep=width + 1,
        use_cache=False,
    )
    logits: Tensor = output.logits[:, -(width + 1) : -1].to(batch.weights.dtype)
    return logits if temperature == 1.0 else logits / temperature


def token_logprobs(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Log-probs [B, T] of the completion tokens, 0 where padded."""
    chosen = logits.gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
    return (chosen - torch.logsumexp(logits, dim=-1)).masked_fill(~batch.mask, 0.0)
