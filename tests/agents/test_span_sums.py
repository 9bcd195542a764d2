"""Sums over spans as the peer surrogate takes them in torch, against numpy's over the same alignment."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from agents.microbatch import MicroBatch, collate
from agents.objectives.component import LogProbs
from agents.objectives.peer_surrogate import peer_log_ratios
from agents.rows import Row, Spans, Stream
from tokenalign import Alignment, align, sum_spans

DTYPES = [torch.float32, torch.float64]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def alignment_of(rng: np.random.Generator, n_bytes: int, *, stopped: bool) -> Alignment:
    """Source to receiver over random ends; stopped: only the receiver has an end of sequence."""
    inner = [np.sort(rng.choice(np.arange(1, n_bytes), n_bytes // 3, replace=False)) for _ in range(2)]
    ends_a, ends_b = (np.append(each, [n_bytes, n_bytes]) for each in inner)
    return align(ends_a[: len(ends_a) - stopped], ends_b, eos_a=not stopped, eos_b=True)


def transposed(alignment: Alignment) -> Alignment:
    return align(alignment.ends_b, alignment.ends_a, eos_a=bool(alignment.eos_b[0]), eos_b=bool(alignment.eos_a[0]))


def peer_row(alignment: Alignment) -> Row:
    """A row whose peer found every span certain, so that its log-ratios are the receiver's sums."""
    n_tokens = len(alignment.group_b)
    spans = Spans(span=alignment.group_b, logprobs=np.zeros(len(alignment)))
    ids = np.arange(n_tokens, dtype=np.int32)
    return Row(stream=Stream.PEER, prompt_ids=np.zeros(2, np.int32), ids=ids, advantage=1.0, spans=spans)


def span_sums(batch: MicroBatch, current: torch.Tensor) -> torch.Tensor:
    sums, _ = peer_log_ratios(batch, LogProbs(current=current, old=current))
    return sums


def case(lengths: list[int], dtype: torch.dtype, device: str) -> tuple[MicroBatch, torch.Tensor, npt.NDArray[np.float64]]:
    """Rows of several widths in one batch, the receiver's log-probs of them, and numpy's sums over their spans."""
    rng = np.random.default_rng(len(lengths))
    alignments = [alignment_of(rng, n_bytes, stopped=row % 2 == 1) for row, n_bytes in enumerate(lengths)]
    batch = collate([peer_row(each) for each in alignments], pad_id=0, device=torch.device(device), dtype=dtype)
    current_BT = torch.from_numpy(-rng.exponential(3, batch.mask.shape)).to(device, dtype)
    expected = [
        sum_spans(current_BT[row, : len(each.group_b)].double().cpu().numpy(), transposed(each))
        for row, each in enumerate(alignments)
    ]
    return batch, current_BT, np.concatenate(expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[7], [40, 3, 200, 90], [1500, 1501]], ids=len)
def test_torch_sums_spans_as_numpy_does(lengths: list[int], dtype: torch.dtype, device: str) -> None:
    """T28."""
    batch, current_BT, expected = case(lengths, dtype, device)
    sums = span_sums(batch, current_BT)
    assert sums.dtype == dtype
    assert sums.double().cpu().numpy() == pytest.approx(expected, rel=1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_sums_are_repeatable_and_do_not_depend_on_the_batch(dtype: torch.dtype, device: str) -> None:
    """T28, T24: the same bits again, and those of each row alone."""
    lengths = [40, 900, 200, 90]
    batch, current_BT, _ = case(lengths, dtype, device)
    sums = span_sums(batch, current_BT)
    assert all(torch.equal(span_sums(batch, current_BT), sums) for _ in range(5))
    alone = [collate([row], pad_id=0, device=torch.device(device), dtype=dtype) for row in batch.rows]
    apart = [span_sums(one, current_BT[row : row + 1, : one.mask.shape[1]]) for row, one in enumerate(alone)]
    assert torch.equal(torch.cat(apart), sums)


@pytest.mark.parametrize("device", DEVICES)
def test_a_long_span_in_single_precision(device: str) -> None:
    """T27: a span of 10^5 receiver tokens, to 1e-5 of its sum in double precision."""
    n_tokens = 100_000
    row = peer_row(align([n_tokens], np.arange(1, n_tokens + 1)))
    values = -np.random.default_rng(0).exponential(1, n_tokens)
    sums = {}
    for dtype in DTYPES:
        batch = collate([row], pad_id=0, device=torch.device(device), dtype=dtype)
        sums[dtype] = float(span_sums(batch, torch.from_numpy(values[None]).to(device, dtype))[0])
    whole = align(np.arange(1, n_tokens + 1), [n_tokens])
    assert sums[torch.float64] == pytest.approx(sum_spans(values, whole)[0], rel=1e-12)
    assert sum_spans(values.astype(np.float32), whole)[0] == pytest.approx(sum_spans(values, whole)[0], rel=1e-5)
    assert sums[torch.float32] == pytest.approx(sums[torch.float64], rel=1e-5)
