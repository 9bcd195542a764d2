"""beta times the KL to a frozen reference policy, estimated by k3 on own rows.

    k3_t = exp(d_t) - d_t - 1,   d_t = log pi_ref(y_t) - log pi(y_t)

Source: Schulman, "Approximating KL divergence" (2020); GRPO, arXiv 2402.03300 eq. 4. Deviation: d is clamped to +-30, so
that the estimate stays finite in float32; beyond it there is no gradient. Denominator as the policy term's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agents.config import Objective
from agents.microbatch import MicroBatch
from agents.objectives.component import LogProbs, Term
from agents.objectives.grpo import step_denominator, sum_tokens
from agents.rows import Row, Stream

MAX_LOG_DIFFERENCE = 30.0


def k3(current: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """Elementwise k3 estimate of KL(pi || pi_ref), at samples of pi; never negative."""
    difference = (ref - current).clamp(-MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE)
    return torch.expm1(difference) - difference


class KLToReference:
    """Present only when `beta` > 0."""

    name = "kl"
    stream = Stream.OWN
    needs_ref = True

    def __init__(self, objective: Objective, max_completion_length: int) -> None:
        self._objective = objective
        self._max_completion_length = max_completion_length

    def reads(self, row: Row) -> bool:
        return True

    def denominator(self, rows: Sequence[Row], prompts: int) -> float:
        return step_denominator(self._objective.loss_type, rows, self._max_completion_length)

    def term(self, batch: MicroBatch, logprobs: LogProbs) -> Term:
        if logprobs.ref is None:
            raise ValueError("the KL term needs the reference policy's log-probs, got ref=None")
        kl_BT = k3(logprobs.current, logprobs.ref)
        stats = {"kl": (float((kl_BT.detach() * batch.mask).sum()), float(batch.mask.sum()))}
        weighted_BT = kl_BT * batch.weights.unsqueeze(-1)
        return Term(self._objective.beta * sum_tokens(weighted_BT, batch, self._objective.loss_type), stats)
