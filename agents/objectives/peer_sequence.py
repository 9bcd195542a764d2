"""Truncated policy gradient on peer rows with one ratio per row (HACPO's cross rows, grafted groups).

    s      = exp( mean over y's own tokens of (log pi_n(y) - log pi_m(y)) )     over spans, under the receiver's own prompt
    weight = min(s, 1)^(1 + alpha)   for s >= min_ratio, else 0                 held fixed
    gradient of the loss = -A * weight * d log s

which for s <= 1 is the gradient of s * sg(s)^alpha * A. Sources: HACPO, Zhang et al., arXiv 2603.02604 (exponential importance
sampling, clip to [1 - delta, 1]); alpha = 0 and min_ratio = 0.8 is the weight 1[s > 0.8] * min(s, 1) of grafted groups.

Deviations of ours: a row that the receiver finds likelier than its author did (s > 1) keeps the weight 1, where a clipped
ratio would take its gradient away: between equal policies s hovers about 1, and half of the rows would be lost to rounding.
HACPO raises its lower bound from one minibatch of a step to the next; a step here is one batch, so it has one bound.

The stream's own denominator: its rows, also those without a weight, which depends on the policy and is not known before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agents.microbatch import MicroBatch
from agents.objectives.component import LogProbs, Term
from agents.objectives.peer_surrogate import MAX_LOG_RATIO, row_log_ratios
from agents.rows import Row, Stream


class PeerSequencePolicy:
    """The peer stream's policy gradient with a weight per row. alpha: at least 0. min_ratio: in [0, 1]."""

    name = "peer"
    stream = Stream.PEER
    needs_ref = False

    def __init__(self, *, alpha: float, min_ratio: float) -> None:
        self._alpha = alpha
        self._min_ratio = min_ratio

    def reads(self, row: Row) -> bool:
        return row.advantage != 0.0

    def denominator(self, rows: Sequence[Row], prompts: int) -> float:
        return float(len(rows))

    def term(self, batch: MicroBatch, logprobs: LogProbs) -> Term:
        log_ratio_B = row_log_ratios(batch, logprobs)
        with torch.no_grad():
            ratio_B = log_ratio_B.clamp(max=MAX_LOG_RATIO).exp()
            kept_B = ratio_B >= self._min_ratio
            weight_B = torch.exp((1 + self._alpha) * log_ratio_B.clamp(max=0.0)) * kept_B
            count = float(len(ratio_B))
            stats = {
                "peer/ratio_mean": (float(ratio_B.sum()), count),
                "peer/ratio_clip": (float((ratio_B > 1).sum()), count),
                "peer/log_ratio": (float(log_ratio_B.sum()), count),
                "peer/discarded": (count - float(kept_B.sum()), count),
            }
        # exp(x - sg(x)) is 1 and has the gradient of x.
        score_B = (log_ratio_B - log_ratio_B.detach()).exp()
        return Term(-(batch.advantages * batch.weights * weight_B * score_B).sum(), stats)
