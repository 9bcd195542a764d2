"""Two tokenizations of one byte string, cut into the finest spans that both agree on.

Token ends are byte offsets. An offset that is a token end on both sides is a common cut; consecutive common cuts
bound a group (a span). No finer cut with equal bytes on both sides exists, since it would need another common end.

Shape legend: A tokens of the source · B tokens of the receiver · G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenalign.errors import AlignmentError

NO_GROUP = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alignment:
    """Which tokens of source and receiver cover the same bytes.

    group_a: int32 [A] and group_b: int32 [B], the group of each token, not decreasing; NO_GROUP (-1) for a token
    without a counterpart, which belongs to no group and has to be masked: an end-of-sequence token that the other
    side lacks, and tokens behind the last common cut of an open end. Every group has tokens of both sides.
    group_ends: int64 [G], byte offset behind each group. exact_b: bool [B], one source token with the very same
    bytes. ends_a: int64 [A], ends_b: int64 [B], eos_a, eos_b: as given to `align`.
    """

    group_a: npt.NDArray[np.int32]
    group_b: npt.NDArray[np.int32]
    group_ends: npt.NDArray[np.int64]
    exact_b: npt.NDArray[np.bool_]
    ends_a: npt.NDArray[np.int64]
    ends_b: npt.NDArray[np.int64]
    eos_a: bool
    eos_b: bool

    def __len__(self) -> int:
        """G, the number of groups."""
        return len(self.group_ends)


def align(
    ends_a: npt.ArrayLike, ends_b: npt.ArrayLike, *, eos_a: bool = False, eos_b: bool = False, open_end: bool = False
) -> Alignment:
    """Cut two tokenizations of the same bytes into groups, O(A + B).

    ends_a [A], ends_b [B]: byte offset behind each token. eos_a, eos_b: the last token is the end-of-sequence token, of
    zero width; where both have one, the two make a group of their own. Any other zero-width token joins the group that
    starts at its offset, at the end of the text the last group. open_end: a side breaks off within a token of the
    other, so totals may differ, and what follows the last common end is in no group. Raises AlignmentError for ends
    that fall or are negative, and for unequal totals, with both.
    """
    all_a, content_a = _checked("a", ends_a, eos_a)
    all_b, content_b = _checked("b", ends_b, eos_b)
    totals = [int(content[-1]) if len(content) else 0 for content in (content_a, content_b)]
    if totals[0] != totals[1] and not open_end:
        raise AlignmentError(
            f"both sides must cover the same bytes, got {totals[0]} bytes in {len(content_a)} source tokens and "
            f"{totals[1]} bytes in {len(content_b)} receiver tokens"
        )
    cut_mask_a, cut_mask_b = _common_cuts(content_a, content_b)
    cuts = content_a[cut_mask_a]
    group_a = _groups(cut_mask_a, open_end=open_end)
    group_b = _groups(cut_mask_b, open_end=open_end)
    count_a = np.bincount(group_a[group_a >= 0], minlength=len(cuts))
    count_b = np.bincount(group_b[group_b >= 0], minlength=len(cuts))
    one_to_one = np.append((count_a == 1) & (count_b == 1), False)  # the last entry is met by NO_GROUP
    both = eos_a and eos_b
    role = np.array([len(cuts) if both else NO_GROUP], np.int32)
    return Alignment(
        group_a=np.concatenate([group_a, role[: int(eos_a)]]),
        group_b=np.concatenate([group_b, role[: int(eos_b)]]),
        group_ends=np.concatenate([cuts, np.array(totals[: int(both)], np.int64)]),
        exact_b=np.concatenate([one_to_one[group_b], np.array([both][: int(eos_b)], np.bool_)]),
        ends_a=all_a,
        ends_b=all_b,
        eos_a=eos_a,
        eos_b=eos_b,
    )


def _checked(side: str, ends: npt.ArrayLike, eos: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The ends as int64, and those of the content tokens alone."""
    given = np.asarray(ends)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise AlignmentError(f"`ends_{side}` must be one row of integers, got shape={given.shape}, dtype={given.dtype}")
    every = given.astype(np.int64)
    widths = np.diff(every, prepend=0)
    if (widths < 0).any():
        at = int(np.argmax(widths < 0))
        raise AlignmentError(f"`ends_{side}` must start at or above 0 and never fall, got ends_{side}[{at}]={every[at]}")
    if eos and (not len(every) or widths[-1]):
        got = f"width {widths[-1]}" if len(every) else "no token"
        raise AlignmentError(f"`eos_{side}` says that the last token is an end-of-sequence token of width 0, got {got}")
    return every, every[:-1] if eos else every


def _common_cuts(
    content_a: npt.NDArray[np.int64], content_b: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """On each side, which tokens are the first to end at an offset above 0 where the other side ends one too."""
    cut_mask_a, cut_mask_b = np.zeros(len(content_a), np.bool_), np.zeros(len(content_b), np.bool_)
    if len(content_b):
        rising = np.flatnonzero(np.diff(content_a, prepend=0) > 0)
        nearest = np.minimum(np.searchsorted(content_b, content_a[rising]), len(content_b) - 1)
        common = content_b[nearest] == content_a[rising]
        cut_mask_a[rising[common]] = True
        cut_mask_b[nearest[common]] = True
    return cut_mask_a, cut_mask_b


def _groups(cut_mask: npt.NDArray[np.bool_], *, open_end: bool) -> npt.NDArray[np.int32]:
    """The group that each token starts in, which is the number of cuts before it; behind the last cut see `align`."""
    passed = np.cumsum(cut_mask, dtype=np.int32)
    group = passed - cut_mask
    n_groups = passed[-1] if len(passed) else 0
    group[group == n_groups] = NO_GROUP if open_end else n_groups - 1
    return group
