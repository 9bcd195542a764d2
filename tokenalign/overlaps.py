"""Which tokens of two tokenizations share bytes, and how many: a staircase of at most A + B - 1 steps per text.

Shape legend: N texts · A tokens of the source · B tokens of the receiver · E ends of either side · O overlaps · R receiver
tokens that have an overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MOST_BYTES_PER_TOKEN = 64
"""Above it, a mark for every byte costs more than sorting the ends."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Overlaps:
    """A sparse matrix, receiver tokens by source tokens, in order.

    token_a, token_b: int64 [O], the two tokens of an overlap. bytes: int64 [O], what they share, above 0; two
    end-of-sequence tokens share one byte. first: int64 [R], where the overlaps of each receiver token that has any
    begin; owner: int64 [R], that token.
    """

    token_a: Ints
    token_b: Ints
    bytes: Ints
    first: Ints
    owner: Ints

    @classmethod
    def of(cls, at_a: Ints, at_b: Ints, *, stops: Ints, covered: Ints) -> Overlaps:
        """at_a [A], at_b [B]: each token's end in one row of bytes that holds N texts. stops: [N], the end of each text
        there; covered: [N], how far both sides reach."""
        edges_E, by_a_E, by_b_E = _merge(at_a, at_b)
        token_a, token_b = _token_at(edges_E, by_a_E, at_a), _token_at(edges_E, by_b_E, at_b)
        width_E = np.diff(edges_E, prepend=0)
        if (stops != covered).any():
            passed = np.searchsorted(edges_E, stops, side="right")
            inside = edges_E <= np.repeat(covered, np.diff(passed, prepend=0))
            token_a, token_b, width_E = token_a[inside], token_b[inside], width_E[inside]
        first = _first(token_b)
        return cls(token_a=token_a, token_b=token_b, bytes=width_E, first=first, owner=token_b[first])

    def of_receivers(self, wanted: Bools, numbers_a: Ints, numbers_b: Ints) -> Overlaps:
        """The rows of the wanted receiver tokens, with tokens numbered as numbers_a and numbers_b say."""
        inside = wanted[self.token_b]
        token_b = numbers_b[self.token_b[inside]]
        first = _first(token_b)
        return Overlaps(
            token_a=numbers_a[self.token_a[inside]],
            token_b=token_b,
            bytes=self.bytes[inside],
            first=first,
            owner=token_b[first],
        )


def _first(token_b: Ints) -> Ints:
    """Where the overlaps of each receiver token begin."""
    steps = np.ones(len(token_b), np.bool_)
    np.not_equal(token_b[1:], token_b[:-1], out=steps[1:])
    return np.flatnonzero(steps)


def _merge(at_a: Ints, at_b: Ints) -> tuple[Ints, Bools, Bools]:
    """All ends above 0 without repetition, rising, and whose each is."""
    last = max(int(at[-1]) if len(at) else 0 for at in (at_a, at_b))
    if last > MOST_BYTES_PER_TOKEN * (len(at_a) + len(at_b)):
        edges = np.sort(np.concatenate([at_a, at_b]), kind="stable")  # two sorted runs: merged in linear time
        edges = edges[np.diff(edges, prepend=0) > 0]
        return edges, _holds(at_a, edges), _holds(at_b, edges)
    marks = np.zeros(last + 1, np.uint8)
    marks[at_a] = 1
    marks[at_b] |= 2
    marks[0] = 0
    edges = np.flatnonzero(marks != 0)
    owners = marks[edges]
    return edges, owners != 2, owners != 1


def _holds(at: Ints, edges: Ints) -> Bools:
    """Whether each edge is an end of a side."""
    if not len(at):
        return np.zeros(len(edges), np.bool_)
    held: Bools = at[np.minimum(np.searchsorted(at, edges), len(at) - 1)] == edges
    return held


def _token_at(edges_E: Ints, own_E: Bools, at: Ints) -> Ints:
    """The token of one side that holds the bytes before each edge: the first that ends there or later."""
    passed = np.cumsum(own_E)
    if len(passed) and passed[-1] == len(at):  # no two tokens end at one place
        return passed - own_E
    return np.searchsorted(at, edges_E)
