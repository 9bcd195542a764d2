"""What a loss component is.

An objective is a sum of components. Each reads the rows of one stream and turns their log-probs into a numerator; its
denominator is fixed by the whole step's rows before any forward pass. So any split into microbatches gives the same sum,
and the learner adds components without knowing any algorithm.

Shape legend: B rows of a microbatch · T completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from agents.microbatch import MicroBatch
from agents.rows import Row, Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbs:
    """current [B, T]: with gradient. old [B, T]: under the policy at the start of the step. ref: under the reference."""

    current: Tensor
    old: Tensor
    ref: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Term:
    """A component's share of one microbatch: loss numerator, and (sum, count) by metric name.

    extremes: metrics of which the step's least (the name ends in "/min") or greatest ("/max") is logged.
    """

    numerator: Tensor
    stats: dict[str, tuple[float, float]] = field(default_factory=dict)
    extremes: dict[str, float] = field(default_factory=dict)


class Component(Protocol):
    """stream: the rows that it reads. needs_ref: whether it reads the reference policy's log-probs."""

    name: str
    stream: Stream
    needs_ref: bool

    def reads(self, row: Row) -> bool:
        """Whether a row of the stream can change the numerator; a row that no component reads is never forwarded."""
        ...

    def denominator(self, rows: Sequence[Row], prompts: int) -> float:
        """What the numerators of all microbatches are divided by; `rows` are this stream's, `prompts` the step's count."""
        ...

    def term(self, batch: MicroBatch, logprobs: LogProbs) -> Term:
        """The numerator over one microbatch of this stream's rows."""
        ...
