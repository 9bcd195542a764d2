"""Per-token traces of the source, carried over to groups and to receiver tokens.

Three kinds of trace, told apart by what they conserve. Extensive (log-probs, counts): sums over groups, which are the
primary object; inside a group of several receiver tokens no single value is known and none is made up. Intensive
(advantages, values): byte-weighted means. Categorical (masks): `all` or `any` over the bytes of a token.

Shape legend: A tokens of the source · B tokens of the receiver · G groups · O overlaps of a source and a receiver
token.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from tokenalign.align import NO_GROUP, Alignment
from tokenalign.errors import AlignmentError


def sum_spans(values_a: npt.ArrayLike, alignment: Alignment) -> npt.NDArray[np.float64]:
    """Sum of an extensive trace over each group, float64 [G], for values [A].

    For log-probs this is the log-prob that the source, having emitted its tokens up to the group's start, emits exactly
    its tokens of the group (the chain rule). It is the log-prob of the source's own path, not of the bytes. Tokens
    without a group (NO_GROUP) are left out, so that group totals add up to the sum over the tokens that have one.
    """
    values = _checked(values_a, alignment)
    inside = alignment.group_a != NO_GROUP
    sums_G: npt.NDArray[np.float64] = np.bincount(
        alignment.group_a[inside], weights=values[inside], minlength=len(alignment)
    ).astype(np.float64, copy=False)
    return sums_G


def mean_over_bytes(values_a: npt.ArrayLike, alignment: Alignment) -> npt.NDArray[np.float64]:
    """Byte-weighted mean of an intensive trace over each receiver token, float64 [B], for values [A].

    A constant stays that constant to the bit, every result lies between the least and the largest value it is made of,
    and the integral over bytes is conserved. An end-of-sequence token takes the value of the source's. NaN for a
    receiver token that shares no byte with a source token.
    """
    values = _checked(values_a, alignment)
    means_B = np.full(len(alignment.group_b), np.nan)
    token_a_O, first_O, token_b, bytes_O = _overlaps(alignment)
    if len(first_O):
        value_O = values[token_a_O]
        means = np.add.reduceat(value_O * bytes_O, first_O) / np.add.reduceat(bytes_O, first_O)
        lowest, highest = np.minimum.reduceat(value_O, first_O), np.maximum.reduceat(value_O, first_O)
        means_B[token_b] = np.clip(means, lowest, highest)
    return means_B


def project_mask(mask_a: npt.ArrayLike, alignment: Alignment, *, how: Literal["all", "any"] = "all") -> npt.NDArray[np.bool_]:
    """A mask over source tokens [A] as a mask over receiver tokens, bool [B].

    how: "all" is true where every byte of the token was (nothing unmasked by accident; right for loss masks), "any"
    where some byte was. False for a receiver token that shares no byte with a source token.
    """
    mask = _checked(mask_a, alignment).astype(np.bool_)
    mask_B = np.zeros(len(alignment.group_b), np.bool_)
    token_a_O, first_O, token_b, _ = _overlaps(alignment)
    if len(first_O):
        combine = np.logical_and if how == "all" else np.logical_or
        mask_B[token_b] = combine.reduceat(mask[token_a_O], first_O)
    return mask_B


def _checked(values_a: npt.ArrayLike, alignment: Alignment) -> npt.NDArray[np.float64]:
    values = np.asarray(values_a, dtype=np.float64)
    if values.shape != alignment.group_a.shape:
        raise AlignmentError(
            f"a trace must have one value per source token, got shape={values.shape} for {len(alignment.group_a)} tokens"
        )
    return values


def _overlaps(
    alignment: Alignment,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Overlaps in order: source token [O], where each receiver token's overlaps begin, that receiver token, bytes [O].

    The end-of-sequence tokens count as one byte behind the text, where they can only meet each other.
    """
    ends_a, ends_b = alignment.ends_a.copy(), alignment.ends_b.copy()
    ends_a[len(ends_a) - alignment.eos_a :] += 1
    ends_b[len(ends_b) - alignment.eos_b :] += 1
    covered = min(int(ends[-1]) if len(ends) else 0 for ends in (ends_a, ends_b))
    # Two sorted runs merge in linear time; an edge of both sides comes twice, the second time with 0 bytes.
    edges = np.sort(np.concatenate([ends_a, ends_b]), kind="stable")
    edges = edges[(edges > 0) & (edges <= covered)]
    token_a_O = np.searchsorted(ends_a, edges)
    token_b_O = np.searchsorted(ends_b, edges)
    first_O = np.flatnonzero(np.diff(token_b_O, prepend=-1))
    return token_a_O, first_O, token_b_O[first_O], np.diff(edges, prepend=0)
