"""What crosses from one vocabulary to another: a text, where the source's tokens end in it, and traces over them.

Shape legend: A tokens of the source · K log-probs per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tokenalign.errors import AlignmentError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """One text of a source, or one segment of a conversation.

    text: the bytes that the source's tokens spell. ends: ints [A], byte offset behind each token, None where they are not
    known. finished: the text ended by itself and was not cut off. has_eos: the last token is the end-of-sequence token,
    of zero width. logprobs: floats [A] or [A, K] (several models), extensive. mask: bool [A], the tokens to train.
    """

    text: bytes
    ends: npt.ArrayLike | None
    finished: bool
    has_eos: bool
    logprobs: npt.ArrayLike | None = None
    mask: npt.ArrayLike | None = None


def split_segments(trace: Trace, labels: npt.ArrayLike) -> list[Trace]:
    """Cut a trace wherever the labels [A] (role or turn of each token) change, so that each seam is a common boundary.

    The segments are translated as separate texts of one batch, as their receiver would have met them. A segment that ends
    in a token of zero width ended by itself; the last one is finished as the trace is. Raises AlignmentError for labels
    that do not fit and for a trace without ends.
    """
    if trace.ends is None:
        raise AlignmentError("only a trace with token ends can be cut into segments, got ends=None")
    ends, given = np.asarray(trace.ends), np.asarray(labels)
    if given.shape != ends.shape:
        raise AlignmentError(f"there must be one label per token, got shape={given.shape} for {len(ends)} tokens")
    cuts = [0, *(np.flatnonzero(given[1:] != given[:-1]) + 1).tolist(), len(ends)]
    segments = []
    for first, last in pairwise(cuts):
        start = int(ends[first - 1]) if first else 0
        own = ends[first:last] - start
        closed = len(own) > 0 and int(own[-1]) == (int(own[-2]) if len(own) > 1 else 0)
        is_last = last == len(ends)
        segments.append(
            Trace(
                text=trace.text[start : start + int(own[-1])] if len(own) else b"",
                ends=own,
                finished=trace.finished if is_last else True,
                has_eos=trace.has_eos if is_last else closed,
                logprobs=None if trace.logprobs is None else np.asarray(trace.logprobs)[first:last],
                mask=None if trace.mask is None else np.asarray(trace.mask)[first:last],
            )
        )
    return segments


def fork_points(renders: Sequence[bytes]) -> list[int]:
    """Turns at which a conversation has to start a new training row.

    renders: the conversation as the policy's template renders it after each turn. Where one is no longer a prefix of the
    next (a template that drops earlier thoughts, say), the ids of earlier turns are not what the policy saw: the numbers
    of those next renders are returned, none for a template that only appends.
    """
    return [turn for turn in range(1, len(renders)) if not renders[turn].startswith(renders[turn - 1])]
