"""The truncated policy gradient of whole peer rows: weights by hand, its limits, masks, microbatches."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from agents.config import Objective
from agents.microbatch import collate, completion_logits, token_logprobs
from agents.objectives.component import Component, LogProbs
from agents.objectives.grpo import GRPOSurrogate
from agents.objectives.peer_sequence import PeerSequencePolicy
from agents.rows import Row, Spans, Stream
from agents.testing import BigramLM

CPU = torch.device("cpu")


def gradient_of(component: Component, rows: Sequence[Row], denominator: float | None = None) -> torch.Tensor:
    model = BigramLM(5, seed=0)
    batch = collate(rows, pad_id=0, device=CPU, dtype=torch.float64)
    current = token_logprobs(completion_logits(model, batch, temperature=1.0), batch)
    numerator = component.term(batch, LogProbs(current=current, old=current.detach())).numerator
    loss = numerator / (denominator or component.denominator(rows, 1))
    loss.backward()  # type: ignore[no-untyped-call]
    assert model.table.grad is not None
    return model.table.grad


def logprobs_of(ids: Sequence[int]) -> list[float]:
    table = torch.log_softmax(BigramLM(5, seed=0).table.detach(), dim=-1)
    return [float(table[before, token]) for before, token in zip([0, *ids[:-1]], ids, strict=True)]


def peer(ids: Sequence[int], advantage: float, log_ratio: float) -> Row:
    """A row of one span whose author found it likelier by exp(-log_ratio) per token than the receiver does."""
    transferred = sum(logprobs_of(ids)) - log_ratio * len(ids)
    return Row(
        stream=Stream.PEER,
        prompt_ids=np.array([0], dtype=np.int32),
        ids=np.array(ids, dtype=np.int32),
        advantage=advantage,
        spans=Spans(span=np.zeros(len(ids), dtype=np.int32), logprobs=np.array([transferred])),
    )


def as_own(row: Row, factor: float) -> Row:
    return Row(stream=Stream.OWN, prompt_ids=row.prompt_ids, ids=row.ids, advantage=row.advantage * factor)


GSPO = GRPOSurrogate(Objective(importance_sampling_level="sequence", loss_type="grpo"), 10)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_peer_that_is_the_receiver_gives_the_gradient_of_own_rows(alpha: float) -> None:
    rows = [peer([1, 2, 3], 0.7, 0.0), peer([4], -0.2, 0.0)]
    got = gradient_of(PeerSequencePolicy(alpha=alpha, min_ratio=0.8), rows)
    torch.testing.assert_close(got, gradient_of(GSPO, [as_own(row, 1.0) for row in rows]))


def test_the_weight_is_the_ratio_to_one_plus_alpha_at_most_one_and_nothing_far_below() -> None:
    # s = 0.9, 1.5 and 0.7, with alpha = 2: weights 0.9^3, 1 and 0.
    rows = [peer([1, 2, 3], 0.7, np.log(0.9)), peer([4], -0.2, np.log(1.5)), peer([2, 2], 1.0, np.log(0.7))]
    got = gradient_of(PeerSequencePolicy(alpha=2.0, min_ratio=0.8), rows)
    expected = [as_own(row, factor) for row, factor in zip(rows, [0.9**3, 1.0, 0.0], strict=True)]
    torch.testing.assert_close(got, gradient_of(GSPO, expected))


def test_what_is_counted() -> None:
    rows = [peer([1, 2, 3], 0.7, np.log(0.9)), peer([4], -0.2, np.log(1.5)), peer([2, 2], 1.0, np.log(0.7))]
    batch = collate(rows, pad_id=0, device=CPU, dtype=torch.float64)
    current = token_logprobs(completion_logits(BigramLM(5, seed=0), batch, temperature=1.0), batch)
    stats = PeerSequencePolicy(alpha=2.0, min_ratio=0.8).term(batch, LogProbs(current=current, old=current.detach())).stats
    means = {name: total / count for name, (total, count) in stats.items()}
    assert means["peer/ratio_mean"] == pytest.approx((0.9 + 1.5 + 0.7) / 3)
    assert means["peer/ratio_clip"] == means["peer/discarded"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("size", [1, 2])
def test_any_split_into_microbatches_is_the_whole(size: int) -> None:
    rows = [peer([1, 2, 3], 0.7, -0.1), peer([4], -0.2, 0.3), peer([2, 2, 1, 4], 1.0, -0.2)]
    component = PeerSequencePolicy(alpha=1.0, min_ratio=0.5)
    parts = [gradient_of(component, rows[start : start + size], denominator=3.0) for start in range(0, 3, size)]
    torch.testing.assert_close(torch.stack(parts).sum(0), gradient_of(component, rows))


def test_a_ratio_beyond_float_range_stays_finite() -> None:
    for log_ratio in (-800.0, 800.0):
        got = gradient_of(PeerSequencePolicy(alpha=1.0, min_ratio=0.0), [peer([1, 2], 1.0, log_ratio)])
        assert torch.isfinite(got).all()
