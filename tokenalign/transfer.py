"""Per-token traces of the source, carried over to groups and to receiver tokens.

Three kinds of trace, told apart by what they conserve. Extensive (log-probs, counts): sums over groups, which are the
primary object; inside a group of several receiver tokens no single value is known, and a split is labelled as one.
Intensive (advantages, values): byte-weighted means. Categorical (masks, roles): by the bytes of a token.

Every function takes an Alignment of one text or of a batch. Traces are [A], or [A, K] for K of a kind at once.

Shape legend: A tokens of the source · B tokens of the receiver · G groups · K traces of one kind · O overlaps of a source
and a receiver token · R receiver tokens that have an overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from tokenalign.align import NO_GROUP, Alignment, first_of_groups, sizes_of_groups, widths
from tokenalign.errors import AlignmentError

Floats = npt.NDArray[np.float64]
S = TypeVar("S", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """Group totals, spread over receiver tokens.

    values: float64 [B] or [B, K], NaN for tokens without a group; those of a group add up to its total. known_mask: bool
    [B], the token has its group for itself, so that its value is the source's own; elsewhere values are a convention.
    """

    values: Floats
    known_mask: npt.NDArray[np.bool_]


def sum_spans(values_a: npt.ArrayLike, alignment: Alignment) -> Floats:
    """Sum of an extensive trace over each group, float64 [G] or [G, K], for values [A] or [A, K].

    For log-probs this is the log-prob that the source, having emitted its tokens up to the group's start, emits exactly
    its tokens of the group (the chain rule). It is the log-prob of the source's own path, not of the bytes. Tokens
    without a group (NO_GROUP) are left out, so that group totals add up to the sum over the tokens that have one.
    """
    values, group = _checked(values_a, alignment), alignment.group_a
    if not len(alignment):
        return np.zeros((0, *values.shape[1:]))
    inside = group != NO_GROUP
    if not inside.all():
        values, group = values[inside], group[inside]
    sums_G: Floats = np.add.reduceat(values, first_of_groups(group), axis=0)
    return sums_G


def split_spans(
    sums_g: npt.ArrayLike,
    alignment: Alignment,
    *,
    by: Literal["bytes", "uniform", "prior"] = "bytes",
    prior_b: npt.ArrayLike | None = None,
) -> Split:
    """Spread group totals [G] or [G, K] over receiver tokens: a convention wherever a group has several.

    by: "bytes", in proportion to the tokens' bytes; "uniform", in equal parts; "prior", in proportion to prior_b [B], the
    receiver's own log-probs of the tokens (equal parts where those of a group add up to 0). Raises AlignmentError for
    totals or a prior that do not fit, and for a missing prior.
    """
    sums = np.asarray(sums_g, np.float64)
    if sums.shape[:1] != (len(alignment),) or sums.ndim > 2:
        raise AlignmentError(f"there must be one total per group, got shape={sums.shape} for {len(alignment)} groups")
    if by not in ("bytes", "uniform", "prior"):
        raise AlignmentError(f'`by` must be "bytes", "uniform" or "prior", got by={by!r}')
    if (by == "prior") != (prior_b is not None):
        raise AlignmentError(f'`prior_b` goes with by="prior" alone, got by={by!r}, prior_b={prior_b!r}')
    values = np.full((len(alignment.group_b), *sums.shape[1:]), np.nan)
    inside = alignment.group_b != NO_GROUP
    group = alignment.group_b[inside]
    sizes = sizes_of_groups(alignment.group_b, len(alignment))
    weights = _weights(by, alignment, prior_b)[inside]
    totals = np.bincount(group, weights=weights, minlength=len(alignment))
    shares = np.where(totals[group] == 0, 1 / sizes[group], weights / np.where(totals == 0, 1, totals)[group])
    values[inside] = sums[group] * (shares if sums.ndim == 1 else shares[:, None])
    known_mask = np.zeros(len(values), np.bool_)
    known_mask[inside] = sizes[group] == 1
    return Split(values=values, known_mask=known_mask)


def mean_over_bytes(values_a: npt.ArrayLike, alignment: Alignment) -> Floats:
    """Byte-weighted mean of an intensive trace over each receiver token, float64 [B] or [B, K], for values [A] or [A, K].

    A constant stays that constant to the bit, every result lies between the least and the largest value it is made of,
    and the integral over bytes is conserved. An end-of-sequence token takes the value of the source's. NaN for a
    receiver token that shares no byte with a source token.
    """
    values, rest = _checked(values_a, alignment), alignment.remainder
    means_B = np.full((len(alignment.group_b), *values.shape[1:]), np.nan)
    exact_b, exact_a = alignment.twins
    means_B[exact_b] = values[exact_a]
    first = rest.first
    if len(first):
        value_O = values[rest.token_a]
        width_O = rest.bytes if values.ndim == 1 else rest.bytes[:, None]
        totals_R = np.add.reduceat(width_O, first, axis=0)
        means_R = np.add.reduceat(value_O * width_O, first, axis=0) / totals_R
        lowest, highest = np.minimum.reduceat(value_O, first, axis=0), np.maximum.reduceat(value_O, first, axis=0)
        means_B[rest.owner] = np.clip(means_R, lowest, highest)
    return means_B


def project_mask(
    mask_a: npt.ArrayLike, alignment: Alignment, *, how: Literal["all", "any", "majority"] = "all"
) -> npt.NDArray[np.bool_]:
    """A mask over source tokens [A] as a mask over receiver tokens, bool [B].

    how: "all" is true where every byte of the token was (nothing unmasked by accident; right for loss masks), "any"
    where some byte was, "majority" where more than half were. False for a receiver token that shares no byte with a
    source token.
    """
    if how not in ("all", "any", "majority"):
        raise AlignmentError(f'`how` must be "all", "any" or "majority", got how={how!r}')
    if how == "majority":
        shares_B = mean_over_bytes(np.asarray(mask_a, np.bool_), alignment)
        return np.asarray(shares_B > 0.5, np.bool_)
    mask = np.asarray(mask_a, np.bool_)
    least, most = extremes(mask, alignment, missing=np.False_)
    return least if how == "all" else most


def straddling(labels_a: npt.ArrayLike, alignment: Alignment) -> npt.NDArray[np.bool_]:
    """Receiver tokens, bool [B], over whose bytes a categorical trace (a mask, roles, turns) of source tokens [A] changes."""
    labels = np.asarray(labels_a)
    least, most = extremes(labels, alignment, missing=labels.dtype.type(0))
    mixed_B: npt.NDArray[np.bool_] = least != most
    return mixed_B


def project_labels(labels_a: npt.ArrayLike, alignment: Alignment, *, missing: int = -1) -> npt.NDArray[np.int64]:
    """Labels (roles, turn numbers) of source tokens, ints [A], as labels of receiver tokens, int64 [B].

    A token takes the label of most of its bytes, the least in a tie; `missing` where it shares no byte with a
    source token. Where labels meet within a token says `straddling`.
    """
    labels, overlaps = np.asarray(labels_a), alignment.overlaps
    _check_shape(labels.shape, alignment)
    labels_B = np.full(len(alignment.group_b), missing, np.int64)
    distinct, code_a = np.unique(labels, return_inverse=True)
    counts_R = np.diff(overlaps.first, append=len(overlaps.token_a))
    pairs = np.repeat(np.arange(len(counts_R)), counts_R) * len(distinct) + code_a[overlaps.token_a]
    met, which = np.unique(pairs, return_inverse=True)
    held = np.bincount(which, weights=overlaps.bytes, minlength=len(met))
    token_R, code = np.divmod(met, max(len(distinct), 1))
    order = np.lexsort((code, -held, token_R))
    first = order[np.searchsorted(token_R[order], np.arange(len(counts_R)))]
    labels_B[overlaps.owner] = distinct[code[first]]
    return labels_B


def extremes(labels_a: npt.NDArray[S], alignment: Alignment, *, missing: S | bool) -> tuple[npt.NDArray[S], npt.NDArray[S]]:
    """Least and largest label of the source tokens that each receiver token shares bytes with, [B] each."""
    _check_shape(labels_a.shape, alignment)
    rest = alignment.remainder
    least_B = np.full(len(alignment.group_b), missing, labels_a.dtype)
    exact_b, exact_a = alignment.twins
    least_B[exact_b] = labels_a[exact_a]
    most_B = least_B.copy()
    if len(rest.first):
        label_O = labels_a[rest.token_a]
        least_B[rest.owner] = np.minimum.reduceat(label_O, rest.first)
        most_B[rest.owner] = np.maximum.reduceat(label_O, rest.first)
    return least_B, most_B


def _weights(by: str, alignment: Alignment, prior_b: npt.ArrayLike | None) -> Floats:
    if by == "prior":
        prior = np.asarray(prior_b, np.float64)
        if prior.shape != alignment.group_b.shape or not np.isfinite(prior).all():
            raise AlignmentError(f"`prior_b` must have one finite value per receiver token, got shape={prior.shape}")
        return prior
    if by == "uniform":
        return np.zeros(len(alignment.group_b))
    return widths(alignment.ends_b, alignment.cu_b).astype(np.float64)


def _checked(values_a: npt.ArrayLike, alignment: Alignment) -> Floats:
    values = np.asarray(values_a, dtype=np.float64)
    _check_shape(values.shape, alignment, most_dimensions=2)
    return values


def _check_shape(shape: tuple[int, ...], alignment: Alignment, *, most_dimensions: int = 1) -> None:
    if shape[:1] != alignment.group_a.shape or len(shape) > most_dimensions:
        raise AlignmentError(
            f"a trace must have one value per source token, got shape={shape} for {len(alignment.group_a)} tokens"
        )
