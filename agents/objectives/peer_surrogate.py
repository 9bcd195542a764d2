"""Clipped surrogate on peer rows (Peer Rollout Pooling), over spans or over tokens.

Rows with spans (denominator = "behaviour"):

    rho_s = exp(sum over span s of log pi_n(y_t) - log pi_m(span s))      one term per span, never one per token
    loss_s = -min(rho_s A, clip(rho_s) A)

Rows without (denominator = "receiver"): the token surrogate against the receiver's log-probs at the start of the step.

With `importance_sampling_level = "sequence"` a row has one ratio, the exponential of its log-ratios' sum over its number of
tokens, as GSPO has it for own rows.

Deviation: a log-ratio is cut at MAX_LOG_RATIO, beyond which it has no gradient. The clip bounds a large ratio only where the
advantage is positive; `delta` bounds it on the other side.

Source: arXiv 2605.07244 in words; formula ours. Behaviour log-probs exist only as a span's sum, so the ratio does too.
The stream's own denominator: rows for "grpo" (each row the mean of its terms), rows x max_completion_length for "dr_grpo",
otherwise all terms (spans or tokens). KL and entropy terms skip peer rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agents.config import Objective
from agents.microbatch import MicroBatch
from agents.objectives.component import LogProbs, Term
from agents.objectives.grpo import clipped
from agents.rows import Row, Stream

MAX_LOG_RATIO = 20.0
"""Keeps a ratio finite in float32 where the receiver finds likely what the peer hardly ever says."""


class PeerSurrogate:
    """The peer stream's policy gradient."""

    name = "peer"
    stream = Stream.PEER
    needs_ref = False

    def __init__(self, objective: Objective, max_completion_length: int) -> None:
        self._objective = objective
        self._max_completion_length = max_completion_length

    def reads(self, row: Row) -> bool:
        return row.advantage != 0.0

    def denominator(self, rows: Sequence[Row], prompts: int) -> float:
        match self._objective.loss_type:
            case "grpo":
                return float(len(rows))
            case "dr_grpo":
                return float(len(rows) * self._max_completion_length)
            case _:
                return float(max(1, sum(self._terms(row) for row in rows)))

    def _terms(self, row: Row) -> int:
        if self._objective.importance_sampling_level == "sequence":
            return 1
        return len(row.ids) if row.spans is None else len(row.spans.logprobs)

    def term(self, batch: MicroBatch, logprobs: LogProbs) -> Term:
        if self._objective.importance_sampling_level == "sequence":
            log_ratio = row_log_ratios(batch, logprobs)
            row_of = torch.arange(len(batch.rows), device=log_ratio.device)
        else:
            log_ratio, row_of = peer_log_ratios(batch, logprobs)
        ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
        loss = clipped(ratio, batch.advantages[row_of], self._objective) * batch.weights[row_of]
        if self._objective.loss_type == "grpo":
            loss = loss / torch.bincount(row_of, minlength=len(batch.rows))[row_of]
        with torch.no_grad():
            outside = (ratio < 1 - self._objective.epsilon) | (ratio > 1 + self._objective.upper_epsilon)
            count = float(len(ratio))
            stats = {
                "peer/ratio_mean": (float(ratio.sum()), count),
                "peer/ratio_clip": (float(outside.sum()), count),
                "peer/log_ratio": (float(log_ratio.sum()), count),
            }
        return Term(loss.sum(), stats)


def peer_log_ratios(batch: MicroBatch, logprobs: LogProbs) -> tuple[Tensor, Tensor]:
    """Log ratios [N] of all terms, spans or tokens, and the row [N] that each belongs to."""
    if batch.span_ids is None or batch.span_logprobs is None:
        rows_BT = torch.arange(len(batch.rows), device=batch.mask.device).unsqueeze(-1).expand_as(batch.mask)
        return (logprobs.current - logprobs.old)[batch.mask], rows_BT[batch.mask]
    within = batch.span_ids >= 0
    span_of = batch.span_ids[within]
    # Spans lie one after the other, so that their sums can be taken in order: the same to the bit on any device's rerun.
    tokens_of = torch.bincount(span_of, minlength=len(batch.span_logprobs))
    sums = torch.segment_reduce(logprobs.current[within], "sum", lengths=tokens_of, initial=0.0)
    lengths = [0 if row.spans is None else len(row.spans.logprobs) for row in batch.rows]
    row_of = torch.repeat_interleave(torch.tensor(lengths, device=span_of.device))
    return sums - batch.span_logprobs, row_of


def row_log_ratios(batch: MicroBatch, logprobs: LogProbs) -> Tensor:
    """Log ratio [B] of each row: the sum of its terms' log ratios over its number of own tokens."""
    log_ratio, row_of = peer_log_ratios(batch, logprobs)
    return torch.zeros_like(batch.weights).index_add(0, row_of, log_ratio) / batch.mask.sum(-1).clamp(min=1)
