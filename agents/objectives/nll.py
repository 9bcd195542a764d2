"""Imitation of peer successes (Success-Gated Transfer).

    sum over rescued prompts of  lambda * mean_t( -log pi_n(y*_t | x) )

Source: arXiv 2605.07244, after a re-implementer's account. lambda travels as the row's weight. Denominator: the step's
prompts (`normalise = "step"`) or the rescued ones ("rescued").
"""

from __future__ import annotations

from collections.abc import Sequence

from agents.microbatch import MicroBatch
from agents.objectives.component import LogProbs, Term
from agents.rows import Row, Stream
from agents.sharing.config import SGT


class SuccessNLL:
    """The rescue stream's loss."""

    name = "rescue"
    stream = Stream.RESCUE
    needs_ref = False

    def __init__(self, config: SGT) -> None:
        self._config = config

    def reads(self, row: Row) -> bool:
        return row.weight != 0.0

    def denominator(self, rows: Sequence[Row], prompts: int) -> float:
        return float(prompts if self._config.normalise == "step" else len(rows))

    def term(self, batch: MicroBatch, logprobs: LogProbs) -> Term:
        nll_B = -(logprobs.current * batch.mask).sum(-1) / batch.mask.sum(-1).clamp(min=1)
        stats = {"rescues/nll": (float(nll_B.detach().sum()), float(len(batch.rows)))}
        return Term((nll_B * batch.weights).sum(), stats)
