"""Rows as sequences for a causal LM: completions of one prompt lie behind a single copy of it.

    prompt  a a a  b b  c c c c        positions  0 1 2  3 4 5  3 4  3 4 5 6

The attention mask keeps the completions apart, and positions count on from the prompt in each. Log-probs and gradients are
those of one sequence per row, while the prompt is computed once. Source: Prefix Grouper (arXiv 2506.05433) in its exact form.

Shape legend: S sequences · L padded tokens of a sequence · N completion tokens of all rows, row after row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agents.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """input_ids, position_ids [S, L]. segments int [S, L]: 0 in the prompt, j in the j-th completion, -1 in padding.

    sources [N]: which of the S·L positions predicts each completion token. targets [N]: those tokens. shared: whether a
    sequence holds several completions.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: Tensor
    sources: Tensor
    targets: Tensor
    shared: bool

    def attention_mask(self, dtype: torch.dtype) -> Tensor:
        """[S, L] of 0 and 1 where every sequence is one row; else what is added to the scores, [S, 1, L, L]."""
        if not self.shared:
            return (self.segments >= 0).long()
        width = self.segments.shape[1]
        earlier = torch.ones((width, width), dtype=torch.bool, device=self.segments.device).tril()
        keys, queries = self.segments[:, None, :], self.segments[:, :, None]
        seen = earlier & ((keys == 0) | (keys == queries))
        zeros = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return zeros.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def lay_out(rows: Sequence[Row], *, hidden_size: int | None, pad_id: int, device: torch.device) -> Layout:
    """hidden_size: of the model, by which the cost of long attention is weighed; None: one sequence per row."""
    sequences = [[index] for index in range(len(rows))] if hidden_size is None else list(_shared(rows, hidden_size))
    width = max(len(rows[members[0]].prompt_ids) + sum(len(rows[index].ids) for index in members) for members in sequences)
    ids = np.full((len(sequences), width), pad_id, dtype=np.int64)
    positions = np.zeros(ids.shape, dtype=np.int64)
    segments = np.full(ids.shape, -1, dtype=np.int64)
    sources: list[npt.NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * len(rows)
    for sequence, members in enumerate(sequences):
        prompt = rows[members[0]].prompt_ids
        start = len(prompt)
        ids[sequence, :start], positions[sequence, :start], segments[sequence, :start] = prompt, np.arange(start), 0
        for number, index in enumerate(members, start=1):
            length = len(rows[index].ids)
            place = slice(start, start + length)
            ids[sequence, place], segments[sequence, place] = rows[index].ids, number
            positions[sequence, place] = len(prompt) + np.arange(length)
            sources[index] = sequence * width + np.arange(start - 1, start + length - 1)
            sources[index][0] = sequence * width + len(prompt) - 1
            start += length
    return Layout(
        input_ids=torch.from_numpy(ids).to(device),
        position_ids=torch.from_numpy(positions).to(device),
        segments=torch.from_numpy(segments).to(device),
        sources=torch.from_numpy(np.concatenate(sources)).to(device),
        targets=torch.from_numpy(np.concatenate([row.ids for row in rows]).astype(np.int64)).to(device),
        shared=len(sequences) < len(rows),
    )


def _shared(rows: Sequence[Row], hidden_size: int) -> Iterator[list[int]]:
    """Indices of the rows of each sequence: rows of one prompt, as many together as cost least."""
    by_prompt: dict[bytes, list[int]] = {}
    for index, row in enumerate(rows):
        by_prompt.setdefault(row.prompt_ids.tobytes(), []).append(index)
    for members in by_prompt.values():
        mean = sum(len(rows[index].ids) for index in members) / len(members)
        most = cheapest_count(len(rows[members[0]].prompt_ids), mean, len(members), hidden_size)
        parts = -(-len(members) // most)
        yield from (each.tolist() for each in np.array_split(np.array(members), parts))


def cheapest_count(prompt_tokens: int, completion_tokens: float, rows: int, hidden_size: int) -> int:
    """How many of `rows` completions to lay behind one prompt.

    A token costs about 24 H² operations per layer in the matrices and 4 L H in attention, so a row's cost, up to a factor,
    is (L + L² / 6H) / k for k rows in a sequence of L = prompt + k · completion tokens.
    """
    counts = np.arange(1, rows + 1)
    lengths = prompt_tokens + counts * completion_tokens
    return int(counts[np.argmin((lengths + lengths**2 / (6 * hidden_size)) / counts)])
