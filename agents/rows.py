"""Training rows: what a sharing rule hands to the learner.

Shape legend: Tp tokens of a prompt · T tokens of a completion · S spans of a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from agents.advantages import Advantages
from agents.config import Objective
from agents.types import Group


class Stream(StrEnum):
    """Where a row comes from; every loss component reads exactly one stream."""

    OWN = "own"
    PEER = "peer"
    RESCUE = "rescue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """A peer's behaviour log-probs over the spans of a retokenised completion.

    span [T]: which span each receiver token belongs to, 0..S-1, non-decreasing; -1 for a token that the peer never sampled
    (an end of sequence behind a stop string), which has no ratio. logprobs [S]: the peer's log-prob of the whole span, known
    only as this sum.
    """

    span: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One completion to train on: prompt_ids [Tp], ids [T], and one advantage and weight for all of its tokens.

    sampled_logprobs [T]: what the sampler said of the policy's own tokens; None for peers' rows. off_policy: the sampler's
    weights were older than the learner's, or its engine is another, so that the two log-probs differ.
    """

    stream: Stream
    prompt_ids: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    advantage: float = 0.0
    weight: float = 1.0
    spans: Spans | None = None
    sampled_logprobs: npt.NDArray[np.float32] | None = None
    off_policy: bool = False


def own_rows(groups: Sequence[Group], advantages: Sequence[Advantages], objective: Objective) -> list[Row]:
    """The own stream: one row per completion that has a reward.

    With `mask_truncated_completions` a completion that hit the length limit is no row at all (its reward still shaped the
    baseline), so that no loss denominator counts it; neither is any completion of a withheld group, nor one without an
    advantage of a dead group.
    """
    return [
        Row(
            stream=Stream.OWN,
            prompt_ids=group.prompt_ids,
            ids=completion.ids,
            advantage=float(advantage),
            sampled_logprobs=completion.logprobs,
            off_policy=group.off_policy,
        )
        for group, group_advantages in zip(groups, advantages, strict=True)
        if not group.withheld
        for completion, advantage in zip(group.completions, group_advantages, strict=True)
        if not np.isnan(advantage) and (completion.finished or not objective.mask_truncated_completions)
        if not (group.dead and advantage == 0.0)
    ]
