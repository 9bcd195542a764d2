"""Single completions out of the packed records in which they cross."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from exchange.types import RolloutGroup, VerifiedSuccesses
from tokenalign import Trace


def unpack(record: VerifiedSuccesses | RolloutGroup) -> Sequence[Trace]:
    """The record's completions, in order. Its lengths agree: the record's own constructor saw to it."""
    texts = record.texts.tobytes()
    text_ends = np.cumsum(record.text_lengths, dtype=np.int64)
    token_bounds = np.cumsum(record.token_counts, dtype=np.int64)
    finished = record.finished.tolist() if isinstance(record, RolloutGroup) else [True] * len(text_ends)
    unpacked = []
    for index in range(len(text_ends)):
        start = int(text_ends[index - 1]) if index else 0
        token_start = int(token_bounds[index - 1]) if index else 0
        own = slice(token_start, int(token_bounds[index]))
        ends = record.token_ends[own]
        unpacked.append(
            Trace(
                text=texts[start : int(text_ends[index])],
                ends=ends,
                finished=finished[index],
                has_eos=isinstance(record, RolloutGroup) and finished[index] and _ends_in_zero_width(ends),
                logprobs=record.logprobs[own] if isinstance(record, RolloutGroup) else None,
            )
        )
    return unpacked


def _ends_in_zero_width(token_ends: npt.NDArray[np.int32]) -> bool:
    """Whether the last token covers no bytes: an end-of-sequence token, as against a stop string."""
    return len(token_ends) > 0 and int(token_ends[-1]) == (int(token_ends[-2]) if len(token_ends) > 1 else 0)
