"""GRPO's clipped surrogate on own rows.

    rho_t = exp(log pi(y_t) - log pi_old(y_t))                        level "token"
    rho   = exp(mean_t (log pi(y_t) - log pi_old(y_t)))               level "sequence" (GSPO)
    loss_t = -min(min(rho, delta) A, clip(rho, 1 - eps, 1 + eps_high) A)
    loss_t = -sg(min(rho, eps_high)) A log pi(y_t)                   loss_type "cispo"

Rows that other weights or another engine sampled, pi_sampler, have loss_t times min(pi_old(y_t) / pi_sampler(y_t), C), held
fixed, unless `importance_sampling_correction` is off.

Sources: GRPO, Shao et al., arXiv 2402.03300 eq. 3; dr_grpo, Liu et al., arXiv 2503.20783; dapo, Yu et al., arXiv
2503.14476; GSPO, Zheng et al., arXiv 2507.18071; two-sided clip delta, arXiv 2505.07291; cispo, MiniMax, arXiv 2506.13585;
truncated importance weights, Ionides (2008). Options as in TRL.

Denominators over the whole step (`loss_type`): grpo, the number of rows, each row being its token mean; dr_grpo, rows times
`max_completion_length`; dapo, bnpo and cispo, all completion tokens. Deviation: TRL's bnpo counts the tokens of one
microbatch; here no split may change the loss, which makes it dapo.

A group of equal rewards has advantage 0: its rows add nothing to the numerator, so they are not even forwarded, and are
counted by the denominator (as in TRL: more dead groups make the step of the live ones smaller), but for dynamic sampling, which
leaves them out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from agents.config import Objective
from agents.microbatch import MicroBatch
from agents.objectives.component import LogProbs, Term
from agents.rows import Row, Stream


def step_denominator(loss_type: str, rows: Sequence[Row], max_completion_length: int) -> float:
    """The number that a sum over rows is divided by."""
    match loss_type:
        case "grpo":
            return float(len(rows))
        case "dr_grpo":
            return float(len(rows) * max_completion_length)
        case _:
            return float(sum(len(row.ids) for row in rows))


def sum_tokens(values_BT: Tensor, batch: MicroBatch, loss_type: str) -> Tensor:
    """Masked sum over tokens; for "grpo" each row's sum is divided by its length first."""
    sums_B = (values_BT * batch.mask).sum(-1)
    if loss_type == "grpo":
        sums_B = sums_B / batch.mask.sum(-1).clamp(min=1)
    return sums_B.sum()


def clipped(ratio: Tensor, advantage: Tensor, objective: Objective) -> Tensor:
    """-min(min(rho, delta) A, clip(rho) A), elementwise."""
    bounded = torch.clamp(ratio, 1 - objective.epsilon, 1 + objective.upper_epsilon)
    if objective.delta is not None:
        ratio = torch.clamp(ratio, max=objective.delta)
    return -torch.minimum(ratio * advantage, bounded * advantage)


@torch.no_grad()
def sampler_correction(batch: MicroBatch, old_BT: Tensor, objective: Objective) -> Tensor | None:
    """min(pi_old / pi_sampler, C) [B, T] on off-policy rows, 1 elsewhere; None where there is nothing to correct."""
    if not objective.importance_sampling_correction or not bool(batch.off_policy_mask.any()):
        return None
    if batch.sampled_logprobs is None:
        raise ValueError("off-policy rows need the sampler's log-probs, got sampled_logprobs=None")
    log_ratio_BT = (old_BT - batch.sampled_logprobs).clamp(max=math.log(objective.importance_sampling_clip_max))
    return torch.where(batch.off_policy_mask & batch.mask, log_ratio_BT.exp(), torch.ones_like(log_ratio_BT))


class GRPOSurrogate:
    """The own stream's policy gradient."""

    name = "policy"
    stream = Stream.OWN
    needs_ref = False

    def __init__(self, objective: Objective, max_completion_length: int) -> None:
        self._objective = objective
        self._max_completion_length = max_completion_length

    def reads(self, row: Row) -> bool:
        return row.advantage != 0.0

    def denominator(self, rows: Sequence[Row], prompts: int) -> float:
        return step_denominator(self._objective.loss_type, rows, self._max_completion_length)

    def term(self, batch: MicroBatch, logprobs: LogProbs) -> Term:
        log_ratio_BT = logprobs.current - logprobs.old
        if self._objective.importance_sampling_level == "sequence":
            lengths_B1 = batch.mask.sum(-1, keepdim=True).clamp(min=1)
            log_ratio_BT = ((log_ratio_BT * batch.mask).sum(-1, keepdim=True) / lengths_B1).expand_as(log_ratio_BT)
        ratio_BT = log_ratio_BT.exp()
        advantages_B1 = batch.advantages.unsqueeze(-1)
        if self._objective.loss_type == "cispo":
            weights_BT = ratio_BT.detach().clamp(max=self._objective.upper_epsilon)
            loss_BT = -weights_BT * advantages_B1 * logprobs.current
        else:
            loss_BT = clipped(ratio_BT, advantages_B1, self._objective)
        stats = self._clip_stats(ratio_BT.detach(), advantages_B1, batch)
        extremes: dict[str, float] = {}
        correction_BT = sampler_correction(batch, logprobs.old, self._objective)
        if correction_BT is not None:
            loss_BT = loss_BT * correction_BT
            corrected = correction_BT[batch.off_policy_mask & batch.mask]
            stats["sampling/importance_sampling_ratio/mean"] = float(corrected.sum()), float(len(corrected))
            extremes["sampling/importance_sampling_ratio/min"] = float(corrected.min())
            extremes["sampling/importance_sampling_ratio/max"] = float(corrected.max())
        weighted_BT = loss_BT * batch.weights.unsqueeze(-1)
        return Term(sum_tokens(weighted_BT, batch, self._objective.loss_type), stats, extremes)

    def _clip_stats(self, ratio_BT: Tensor, advantages_B1: Tensor, batch: MicroBatch) -> dict[str, tuple[float, float]]:
        tokens = float(batch.mask.sum())
        if self._objective.loss_type == "cispo":
            bounded_BT = (ratio_BT > self._objective.upper_epsilon) & (advantages_B1 > 0) & batch.mask
            return {"cispo_clip_ratio": (float(bounded_BT.sum()), tokens)}
        low_BT = (ratio_BT < 1 - self._objective.epsilon) & (advantages_B1 < 0) & batch.mask
        high_BT = (ratio_BT > 1 + self._objective.upper_epsilon) & (advantages_B1 > 0) & batch.mask
        low, above = float(low_BT.sum()), float(high_BT.sum())
        return {
            "clip_ratio/low_mean": (low, tokens),
            "clip_ratio/high_mean": (above, tokens),
            "clip_ratio/region_mean": (low + above, tokens),
        }
