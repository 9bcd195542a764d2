"""What crosses from one vocabulary to another: a text, where the source's tokens end in it, and traces over them.

Shape legend: A tokens of the source · K log-probs per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tokenalign.errors import AlignmentError, RoleError

LEAST_LOGPROB = -1e4
"""No model that is not broken says less of a token that it sampled."""
ROUNDING = 1e-2
"""What rounding may leave above 0 in a log-prob."""

S = TypeVar("S", bound=np.generic)


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

    def checked(self) -> Trace:
        """The same with ends as int64, log-probs as numbers and the mask as bool, checked against the text.

        Raises AlignmentError for ends that are no row of integers, fall, or do not cover the text; for log-probs that are
        no numbers from -1e4 to 0; for traces of another length; and RoleError for an end of sequence that is none.
        """
        trace = self.shaped()
        if trace.ends is not None:
            ends = np.asarray(trace.ends)
            _check_ends(ends, len(self.text), has_eos=self.has_eos)
            if trace.logprobs is not None and not plausible(logprobs := np.asarray(trace.logprobs)):
                raise AlignmentError(
                    f"`logprobs` must be numbers from {LEAST_LOGPROB:g} to 0, got {logprobs.min()} to {logprobs.max()}"
                )
        return trace

    def shaped(self) -> Trace:
        """`checked` without a look at the numbers: forms, types and lengths."""
        if not isinstance(self.text, bytes):
            raise AlignmentError(
                f"`text` must be the bytes that the tokens spell, got {type(self.text).__name__}; use text.encode()"
            )
        if self.has_eos and not self.finished:
            raise RoleError("a text with an end-of-sequence token is finished, got finished=False, has_eos=True")
        if self.ends is None:
            return self
        ends = _row("ends", self.ends, "iu", np.int64)
        logprobs = mask = None
        if self.logprobs is not None:
            logprobs = _array("logprobs", self.logprobs, "fiu")
            if logprobs.ndim > 2 or len(logprobs) != len(ends):
                raise AlignmentError(f"`logprobs` must have one entry per token, got {len(logprobs)} for {len(ends)} ends")
        if self.mask is not None:
            mask = _row("mask", self.mask, "b", np.bool_)
            if len(mask) != len(ends):
                raise AlignmentError(f"`mask` must have one entry per token, got {len(mask)} for {len(ends)} ends")
        return Trace(text=self.text, ends=ends, finished=self.finished, has_eos=self.has_eos, logprobs=logprobs, mask=mask)


def plausible(logprobs: npt.NDArray[Any]) -> bool:
    """Whether log-probs are numbers that a model can have said of tokens that it sampled."""
    return bool(logprobs.min(initial=0) >= LEAST_LOGPROB and logprobs.max(initial=0) <= ROUNDING)


def _array(name: str, given: npt.ArrayLike, kinds: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(given)
    except (ValueError, TypeError, OverflowError) as error:
        raise AlignmentError(f"`{name}` cannot be read as an array: {error}") from error
    if array.ndim == 0 or (array.size and array.dtype.kind not in kinds):
        raise AlignmentError(f"`{name}` must hold one entry per token, got shape={array.shape}, dtype={array.dtype}")
    return array


def _row(name: str, given: npt.ArrayLike, kinds: str, dtype: type[S]) -> npt.NDArray[S]:
    array = _array(name, given, kinds)
    if array.ndim != 1:
        raise AlignmentError(f"`{name}` must be one row, got shape={array.shape}")
    return array.astype(dtype, copy=False)


def _check_ends(ends: npt.NDArray[np.int64], length: int, *, has_eos: bool) -> None:
    content = ends[:-1] if has_eos else ends
    if has_eos and not len(ends):
        raise RoleError("`has_eos` says that the last token is an end-of-sequence token, got no token")
    if len(ends) and (ends[0] < 0 or (ends[1:] < ends[:-1]).any()):
        at = int(np.argmax(np.diff(ends, prepend=0) < 0))
        raise AlignmentError(f"`ends` must start at or above 0 and never fall, got ends[{at}]={ends[at]}")
    last = int(content[-1]) if len(content) else 0
    if last != length:
        raise AlignmentError(f"`ends` must cover the text of {length} bytes, got {last} as the last end")
    if has_eos and int(ends[-1]) != length:
        raise RoleError(f"an end-of-sequence token has width 0, got width {int(ends[-1]) - length}")


def split_segments(trace: Trace, labels: npt.ArrayLike) -> list[Trace]:
    """Cut a trace wherever the labels [A] (role or turn of each token) change, so that each seam is a common boundary.

    The segments are translated as separate texts of one batch, as their receiver would have met them. A token of zero
    width belongs to the segment before it; one that ends in such a token ended by itself, others do not; the last one is
    finished as the trace is. Raises AlignmentError for labels that do not fit, for a trace without ends, and as
    `checked` does.
    """
    if trace.ends is None:
        raise AlignmentError("only a trace with token ends can be cut into segments, got ends=None")
    whole = trace.checked()
    ends, given = np.asarray(whole.ends), _row("labels", labels, "iub", np.int64)
    if given.shape != ends.shape:
        raise AlignmentError(f"there must be one label per token, got shape={given.shape} for {len(ends)} tokens")
    is_end = np.diff(ends, prepend=0) == 0
    steps = np.flatnonzero((given[1:] != given[:-1]) & ~is_end[1:]) + 1
    segments = []
    for first, last in pairwise([0, *steps.tolist(), len(ends)]):
        start = int(ends[first - 1]) if first else 0
        closed = last > first and bool(is_end[last - 1])
        is_last = last == len(ends)
        segments.append(
            Trace(
                text=trace.text[start : int(ends[last - 1])] if last else b"",
                ends=ends[first:last] - start,
                finished=trace.finished if is_last else closed,
                has_eos=trace.has_eos if is_last else closed,
                logprobs=None if whole.logprobs is None else np.asarray(whole.logprobs)[first:last],
                mask=None if whole.mask is None else np.asarray(whole.mask)[first:last],
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
