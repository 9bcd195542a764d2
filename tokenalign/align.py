"""Two tokenizations of the same bytes, cut into the finest spans that both agree on: one text, or a ragged batch at once.

Token ends are byte offsets. An offset that is a token end on both sides is a common cut; consecutive common cuts
bound a group (a span). No finer cut with equal bytes on both sides exists, since it would need another common end.

A batch lies in one row of bytes: the texts follow each other, and an end-of-sequence token counts as one byte behind its
text, where it can only meet the other side's. One side's ends are marked in that row and looked up by the other's, which
takes O(tokens + bytes) for any number of texts.

Shape legend: N texts · A tokens of the source · B tokens of the receiver · T tokens of one side · G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tokenalign.errors import AlignmentError
from tokenalign.overlaps import MOST_BYTES_PER_TOKEN, Bools, Ints, Overlaps

NO_GROUP = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Alignment:
    """Which tokens of source and receiver cover the same bytes, for N texts one after the other.

    group_a: int32 [A] and group_b: int32 [B], the group of each token, not decreasing; NO_GROUP (-1) for a token
    without a counterpart, which belongs to no group and has to be masked: an end-of-sequence token that the other
    side lacks, and tokens behind the last common cut of an open end. Every group has tokens of both sides.
    group_ends: int64 [G], byte offset behind each group in its own text. exact_b: bool [B], one source token with the
    very same bytes. ends_a: int64 [A], ends_b: int64 [B], as given to `align`. cu_a, cu_b, cu_g: int64 [N+1], where
    each text's tokens and groups begin. eos_a, eos_b: bool [N], the last token is an end-of-sequence token.
    """

    group_a: npt.NDArray[np.int32]
    group_b: npt.NDArray[np.int32]
    group_ends: Ints
    exact_b: Bools
    ends_a: Ints
    ends_b: Ints
    cu_a: Ints
    cu_b: Ints
    cu_g: Ints
    eos_a: Bools
    eos_b: Bools

    def __len__(self) -> int:
        """G, the number of groups."""
        return len(self.group_ends)

    @cached_property
    def overlaps(self) -> Overlaps:
        """Every pair of a source and a receiver token that share bytes; made when first asked for."""
        return self._overlaps_of(slice(None), slice(None))

    @cached_property
    def twins(self) -> tuple[Ints, Ints]:
        """The exact receiver tokens and the source tokens with their very bytes, one to one."""
        exact = np.flatnonzero(self.exact_b)
        return exact, first_of_groups(self.group_a)[self.group_b[exact]]

    @cached_property
    def remainder(self) -> Overlaps:
        """The overlaps of receiver tokens that are not exact; much less to go through, as a rule.

        Runs of exact tokens lie between the same bytes on both sides and are taken as one token each.
        """
        exact_b, exact_a = self.exact_b, np.zeros(len(self.ends_a), np.bool_)
        exact_a[self.twins[1]] = True
        kept_a, kept_b = _without_runs(exact_a), _without_runs(exact_b)
        return self._overlaps_of(kept_a, kept_b).of_receivers(~exact_b[kept_b], kept_a, kept_b)

    def _overlaps_of(self, kept_a: Ints | slice, kept_b: Ints | slice) -> Overlaps:
        """The overlaps of some tokens of each side, numbered among these."""
        a, b = _Side.checked("a", self.ends_a, self.cu_a, self.eos_a), _Side.checked("b", self.ends_b, self.cu_b, self.eos_b)
        starts, stops = _layout(a, b)
        covered = starts + np.minimum(a.spans, b.spans)
        return Overlaps.of(a.at(starts)[kept_a], b.at(starts)[kept_b], stops=stops, covered=covered)

    def __getitem__(self, text: int) -> Alignment:
        """The alignment of one text, its groups counted from 0."""
        one, g = slice(text, text + 1), slice(*self.cu_g[text : text + 2])
        a, b = slice(*self.cu_a[text : text + 2]), slice(*self.cu_b[text : text + 2])
        own_a, own_b = self.group_a[a], self.group_b[b]
        return Alignment(
            group_a=np.where(own_a == NO_GROUP, own_a, own_a - np.int32(g.start)),
            group_b=np.where(own_b == NO_GROUP, own_b, own_b - np.int32(g.start)),
            group_ends=self.group_ends[g],
            exact_b=self.exact_b[b],
            ends_a=self.ends_a[a],
            ends_b=self.ends_b[b],
            cu_a=np.array([0, a.stop - a.start]),
            cu_b=np.array([0, b.stop - b.start]),
            cu_g=np.array([0, g.stop - g.start]),
            eos_a=self.eos_a[one],
            eos_b=self.eos_b[one],
        )


def align(
    ends_a: npt.ArrayLike, ends_b: npt.ArrayLike, *, eos_a: bool = False, eos_b: bool = False, open_end: bool = False
) -> Alignment:
    """Cut two tokenizations of one text into groups, O(A + B).

    ends_a [A], ends_b [B]: byte offset behind each token. eos_a, eos_b: the last token is the end-of-sequence token, of
    zero width; where both have one, the two make a group of their own. Any other zero-width token joins the group that
    starts at its offset, at the end of the text the last group. open_end: a side breaks off within a token of the
    other, so totals may differ, and what follows the last common end is in no group. Raises AlignmentError for ends
    that fall or are negative, for unequal totals, with both, and for an open end with an end-of-sequence token.
    """
    one_a, one_b = np.asarray(ends_a), np.asarray(ends_b)
    cu_a, cu_b = [0, one_a.size], [0, one_b.size]
    return align_batch(one_a, cu_a, one_b, cu_b, eos_a=[eos_a], eos_b=[eos_b], open_end=[open_end])


def align_batch(
    ends_a: npt.ArrayLike,
    cu_a: npt.ArrayLike,
    ends_b: npt.ArrayLike,
    cu_b: npt.ArrayLike,
    *,
    eos_a: npt.ArrayLike,
    eos_b: npt.ArrayLike,
    open_end: npt.ArrayLike,
) -> Alignment:
    """`align` for N texts in one pass: all their tokens one after the other, cu_a, cu_b [N+1] where each text begins.

    Every text's ends count from its own start. eos_a, eos_b, open_end: bool [N]. Group numbers run through the batch.
    Raises AlignmentError as `align` does, with the text's number.
    """
    a, b = _Side.checked("a", ends_a, cu_a, eos_a), _Side.checked("b", ends_b, cu_b, eos_b)
    is_open = np.asarray(open_end, np.bool_)
    if not len(a.eos) == len(b.eos) == len(is_open):
        raise AlignmentError(
            f"both sides must have the same number of texts, got {len(a.eos)} and {len(b.eos)} with {len(is_open)} open_end"
        )
    rising_a, rising_b = a.rising("a"), b.rising("b")
    _check_pair(a, b, is_open)
    starts = _layout(a, b)[0]
    cut_mask_a, cut_mask_b = _common_cuts(a.at(starts), rising_a, b.at(starts), rising_b)
    both = a.eos & b.eos
    passed_a, passed_b = np.cumsum(cut_mask_a, dtype=np.int32), np.cumsum(cut_mask_b, dtype=np.int32)
    cu_g = np.append(0, passed_a)[a.cu]
    alone_G = a.alone(cut_mask_a) & b.alone(cut_mask_b)
    for side, passed, cut_mask, rising in ((a, passed_a, cut_mask_a, rising_a), (b, passed_b, cut_mask_b, rising_b)):
        passed -= cut_mask  # from here on the group that a token starts in
        alone_G[side.place_ends(passed, rising, cu_g, both, is_open)] = False
    alone_G[cu_g[1:][both] - 1] = True  # a token of zero width before the end is of another group
    exact_b = np.zeros(len(b.ends), np.bool_)
    exact_b[cut_mask_b] = alone_G
    return Alignment(
        group_a=passed_a,
        group_b=passed_b,
        group_ends=a.ends[cut_mask_a],
        exact_b=exact_b,
        ends_a=a.ends,
        ends_b=b.ends,
        cu_a=a.cu,
        cu_b=b.cu,
        cu_g=cu_g,
        eos_a=a.eos,
        eos_b=b.eos,
    )


def widths(ends: Ints, cu: Ints) -> Ints:
    """Bytes of each token or group, int64 [T], from its end in its own text [T] and where the texts begin [N+1]."""
    every = np.empty_like(ends)
    np.subtract(ends[1:], ends[:-1], out=every[1:])
    first = cu[:-1][cu[1:] > cu[:-1]]
    every[first] = ends[first]
    return every


def first_of_groups(group: npt.NDArray[np.int32]) -> Ints:
    """The first token, int64 [G], of each group that a side's tokens [T] belong to."""
    steps = group != NO_GROUP
    steps[1:] &= group[1:] != group[:-1]
    return np.flatnonzero(steps)


def sizes_of_groups(group: npt.NDArray[np.int32], n_groups: int) -> Ints:
    """The number of tokens, int64 [G], that one side has in each group."""
    return np.bincount(group + 1, minlength=n_groups + 1)[1:]


def _without_runs(exact: Bools) -> Ints:
    """The tokens that are not exact, and the last of each run of exact ones."""
    kept = ~exact
    kept[:-1] |= exact[:-1] & ~exact[1:]
    kept[-1:] = True
    return np.flatnonzero(kept)


@dataclass(frozen=True)
class _Side:
    """One tokenization of N texts: ends [T], where each text begins [N+1], whether its last token is the end [N].

    n_tokens: [N].
    """

    ends: Ints
    cu: Ints
    eos: Bools
    n_tokens: Ints

    @classmethod
    def checked(cls, side: str, ends: npt.ArrayLike, cu: npt.ArrayLike, eos: npt.ArrayLike) -> _Side:
        given = np.asarray(ends)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise AlignmentError(f"`ends_{side}` must be one row of integers, got shape={given.shape}, dtype={given.dtype}")
        begins, last = np.asarray(cu, np.int64), np.asarray(eos, np.bool_)
        counts = begins[1:] - begins[:-1]
        if len(begins) != len(last) + 1 or begins[0] or begins[-1] != len(given) or counts.min(initial=0) < 0:
            raise AlignmentError(
                f"`cu_{side}` must rise from 0 to the {len(given)} tokens in {len(last) + 1} numbers, got {begins.tolist()[:9]}"
            )
        every = given.astype(np.int64, copy=False)
        return cls(every, begins, last, counts)

    @cached_property
    def totals(self) -> Ints:
        """Bytes of each text [N]."""
        return np.where(self.n_tokens > 0, self.ends[self.cu[1:] - 1], 0) if len(self.ends) else np.zeros_like(self.n_tokens)

    @property
    def spans(self) -> Ints:
        """Bytes [N] with the one for the end-of-sequence token."""
        return self.totals + self.eos

    def at(self, starts: Ints) -> Ints:
        """Each token's end [T] in the batch's one row of bytes, in which the texts begin at starts [N]."""
        at = self.ends + np.repeat(starts, self.n_tokens) if len(starts) > 1 else self.ends.copy()
        at[self.cu[1:][self.eos] - 1] += 1
        return at

    def rising(self, side: str) -> Bools | None:
        """Which tokens have a width, an end-of-sequence token included; None where all have. Checks the ends."""
        width_T = widths(self.ends, self.cu)
        if self.eos.any():
            self._check_eos(side, width_T)
            width_T[self.cu[1:][self.eos] - 1] = 1
        least = width_T.min(initial=1)
        if least < 0:
            at = int(np.argmax(width_T < 0))
            raise AlignmentError(
                f"`ends_{side}` must start at or above 0 and never fall, got ends_{side}[{at}]={self.ends[at]}"
            )
        return None if least else width_T > 0

    def _check_eos(self, side: str, width_T: Ints) -> None:
        for text in np.flatnonzero(self.eos):
            width = width_T[self.cu[text + 1] - 1] if self.n_tokens[text] else None
            if width != 0:
                raise AlignmentError(
                    f"`eos_{side}` says that the last token of text {text} is an end-of-sequence token of width 0, "
                    f"got {'no token' if width is None else f'width {width}'}"
                )

    def alone(self, cut_mask: Bools) -> Bools:
        """Groups [G] that have one token on this side: the token before the one that ends them ends another, or none is."""
        after_cut = np.empty_like(cut_mask)
        after_cut[1:] = cut_mask[:-1]
        after_cut[self.cu[:-1][self.n_tokens > 0]] = True
        return after_cut[cut_mask]

    def place_ends(self, group: npt.NDArray[np.int32], rising: Bools | None, cu_g: Ints, both: Bools, is_open: Bools) -> Ints:
        """Give the tokens behind a text's last cut NO_GROUP, or its last group of content to those of zero width.

        Returns the groups that such tokens joined.
        """
        group[self.cu[1:][self.eos & ~both] - 1] = NO_GROUP
        for text in np.flatnonzero(is_open):
            own = group[self.cu[text] : self.cu[text + 1]]
            own[own >= cu_g[text + 1]] = NO_GROUP
        flat = np.flatnonzero(~rising) if rising is not None else np.empty(0, np.int64)
        text_of = np.searchsorted(self.cu, flat, side="right") - 1
        at_end = (self.ends[flat] == self.totals[text_of]) & ~is_open[text_of]
        flat, text_of = flat[at_end], text_of[at_end]
        last = cu_g[text_of + 1] - 1 - both[text_of]
        joins = last >= cu_g[text_of]
        group[flat] = np.where(joins, last, NO_GROUP)
        joined: Ints = last[joins]
        return joined


def _check_pair(a: _Side, b: _Side, is_open: Bools) -> None:
    unequal = (a.totals != b.totals) & ~is_open
    if unequal.any():
        text = int(np.argmax(unequal))
        n_a, n_b = (int(side.cu[text + 1] - side.cu[text] - side.eos[text]) for side in (a, b))
        raise AlignmentError(
            f"both sides must cover the same bytes, got {a.totals[text]} bytes in {n_a} source tokens and "
            f"{b.totals[text]} bytes in {n_b} receiver tokens of text {text}"
        )
    if (is_open & (a.eos | b.eos)).any():
        raise AlignmentError("a text with an open end has no end-of-sequence token, got open_end=True with one")


def _layout(a: _Side, b: _Side) -> tuple[Ints, Ints]:
    """Start and end [N] of each text in the batch's one row of bytes."""
    stops = np.cumsum(np.maximum(a.spans, b.spans))
    return np.concatenate([[0], stops[:-1]]), stops


def _common_cuts(at_a: Ints, rising_a: Bools | None, at_b: Ints, rising_b: Bools | None) -> tuple[Bools, Bools]:
    """On each side, which tokens end where one of the other side ends too; of several at one place the first."""
    wide_a, wide_b = (at if rising is None else at[rising] for at, rising in ((at_a, rising_a), (at_b, rising_b)))
    last = max(int(wide[-1]) if len(wide) else 0 for wide in (wide_a, wide_b))
    if last > MOST_BYTES_PER_TOKEN * (len(wide_a) + len(wide_b)):
        common_a, common_b = np.isin(wide_a, wide_b, assume_unique=True), np.isin(wide_b, wide_a, assume_unique=True)
    else:
        marks = np.zeros(last + 1, np.int8)
        marks[wide_b] = 1
        marks[wide_a] += 1
        common_a, common_b = marks[wide_a] == 2, marks[wide_b] == 2
    return _spread(common_a, rising_a), _spread(common_b, rising_b)


def _spread(common: Bools, rising: Bools | None) -> Bools:
    """A mask over the tokens that have a width, as one over all tokens."""
    if rising is None:
        return common
    mask = np.zeros(len(rising), np.bool_)
    mask[rising] = common
    return mask
