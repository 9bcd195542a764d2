"""A source's top-k distributions as distributions over a receiver's vocabulary, with an account of all the mass.

Every row's mass has four parts that add up to 1: on tokens with equal bytes, on tokens that only begin alike, on tokens
without a counterpart (residual), and what the top k did not show (tail). Nothing is renormalised.

Shape legend: P positions · K entries of a row · C comparable positions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from tokenalign.align import NO_GROUP, Alignment
from tokenalign.errors import AlignmentError, TableError
from tokenalign.vocabulary_map import UNMAPPED, Match, VocabularyMap

# What half-precision log-probs may be above 0, and their probabilities' sum above 1.
_ROUNDING = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKMass:
    """Where the mass of mapped rows went, in sums over rows that can be added up.

    rows = equal + prefix + residual + tail up to rounding. not_comparable: source tokens at which no row was mapped
    since the two sides do not start a span together.
    """

    rows: int = 0
    equal: float = 0.0
    prefix: float = 0.0
    residual: float = 0.0
    tail: float = 0.0
    not_comparable: int = 0

    def __add__(self, other: TopKMass) -> TopKMass:
        return TopKMass(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MappedRows:
    """Distributions over the receiver's vocabulary, one per position.

    ids: int32 [P, K], unique within a row, by falling probability and then by rising id, -1 (UNMAPPED) behind the last.
    probs: float32 [P, K], 0 behind the last. equal, prefix, residual, tail: float64 [P], each 0 to 1, together 1; a
    row's `probs` add up to equal + prefix.
    """

    ids: npt.NDArray[np.int32]
    probs: npt.NDArray[np.float32]
    equal: npt.NDArray[np.float64]
    prefix: npt.NDArray[np.float64]
    residual: npt.NDArray[np.float64]
    tail: npt.NDArray[np.float64]

    @property
    def mass(self) -> TopKMass:
        """The four parts summed over the rows."""
        return TopKMass(
            rows=len(self.ids),
            equal=float(self.equal.sum()),
            prefix=float(self.prefix.sum()),
            residual=float(self.residual.sum()),
            tail=float(self.tail.sum()),
        )


def map_topk(vocabulary_map: VocabularyMap, ids: npt.ArrayLike, logprobs: npt.ArrayLike) -> MappedRows:
    """Carry top-k rows over to the receiver's vocabulary; what lands on one receiver token is summed in float64.

    ids: integers [P, K], the source's, unique within a row; below 0 for padding. logprobs: floats [P, K], natural
    logarithms, at most 0; whatever stands beside padding is not looked at. The order of a row's entries changes no bit
    of the result. Log-probs up to 1e-3 above 0 count as 0, rows up to 1e-3 above 1 are scaled to 1.
    Raises TableError for an id that the source's table lacks; AlignmentError for shapes that differ, log-probs that are
    not numbers or above 0, rows with more mass than 1, and ids that a row has twice; each with the row.
    """
    sources_PK, probs_PK = _checked(vocabulary_map, ids, logprobs)
    receivers_PK, sources_PK, probs_PK = _by_receiver(vocabulary_map, sources_PK, probs_PK)
    matches_PK = vocabulary_map.match.take(sources_PK, mode="clip")
    equal, prefix, residual = (
        (probs_PK * (matches_PK == kind)).sum(axis=1) for kind in (Match.EQUAL, Match.PREFIX, Match.NONE)
    )
    total = equal + prefix + residual
    _refuse_overfull(total)
    scale = np.maximum(total, 1)
    probs_PK /= scale[:, None]
    ids_PK, mapped_PK = _merged(receivers_PK, probs_PK)
    return MappedRows(
        ids=ids_PK,
        probs=mapped_PK,
        equal=equal / scale,
        prefix=prefix / scale,
        residual=residual / scale,
        tail=np.maximum(1 - total, 0),
    )


def comparable(alignment: Alignment) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions at which both sides' distributions are about what comes next at the same byte, int64 [C] for the source
    and int64 [C] for the receiver.

    They are the first tokens of each group, the group of the end-of-sequence tokens among them; a batch is one long
    sequence. At all other positions one side stands within a token of the other, and rows are not comparable: those are
    the tokens less C.
    """
    first_a, first_b = (_first_of_groups(groups) for groups in (alignment.group_a, alignment.group_b))
    return first_a, first_b


def _first_of_groups(groups: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    inside = np.flatnonzero(groups != NO_GROUP)
    first: npt.NDArray[np.int64] = inside[np.diff(groups[inside], prepend=NO_GROUP) != 0]
    return first


def _checked(
    vocabulary_map: VocabularyMap, ids: npt.ArrayLike, logprobs: npt.ArrayLike
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Source ids with padding as one id behind the table, and probabilities, 0 for padding."""
    ids_PK, logprobs_PK = np.asarray(ids), np.asarray(logprobs, dtype=np.float64)
    if ids_PK.ndim != 2 or ids_PK.shape != logprobs_PK.shape or (ids_PK.size and ids_PK.dtype.kind not in "iu"):
        raise AlignmentError(
            f"top-k rows must be integer `ids` and `logprobs` of one shape (positions, k), got ids.shape={ids_PK.shape}, "
            f"ids.dtype={ids_PK.dtype}, logprobs.shape={logprobs_PK.shape}"
        )
    foreign = ids_PK >= len(vocabulary_map)
    if foreign.any():
        row, column = np.argwhere(foreign)[0]
        raise TableError(
            f"token id is outside the source's table, got ids[{row}, {column}]={ids_PK[row, column]} for a table of "
            f"{len(vocabulary_map)} ids; was the row made by another model?"
        )
    padding_mask = ids_PK < 0
    bad = ~((logprobs_PK <= _ROUNDING) | padding_mask)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise AlignmentError(
            f"log-probs must be numbers of at most 0, got logprobs[{row}, {column}]={logprobs_PK[row, column]} for id "
            f"{ids_PK[row, column]}; pass natural logarithms of normalised probabilities, not logits"
        )
    probs_PK = np.minimum(logprobs_PK, 0)
    np.exp(probs_PK, out=probs_PK)
    sources_PK = ids_PK.astype(np.int64)
    sources_PK[padding_mask], probs_PK[padding_mask] = len(vocabulary_map), 0
    return sources_PK, probs_PK


def _by_receiver(
    vocabulary_map: VocabularyMap, sources_PK: npt.NDArray[np.int64], probs_PK: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Receiver ids (UNMAPPED for none), source ids and probabilities, each row in order of the one and then the other.

    One number per entry that brings along its column: sorting numbers is three times as fast as argsort.
    """
    n_columns, padding = sources_PK.shape[1], len(vocabulary_map)
    column_bits, source_bits = n_columns.bit_length(), padding.bit_length()
    keys_PK = vocabulary_map.to_b.take(sources_PK, mode="clip").astype(np.int64)
    keys_PK[sources_PK == padding] = UNMAPPED
    keys_PK <<= source_bits
    keys_PK |= sources_PK
    keys_PK <<= column_bits
    keys_PK |= np.arange(n_columns)
    keys_PK.sort(axis=1)
    places_PK = keys_PK & ((1 << column_bits) - 1)
    places_PK += np.arange(len(places_PK))[:, None] * n_columns
    probs_PK = probs_PK.take(places_PK)
    keys_PK >>= column_bits
    sources_PK = keys_PK & ((1 << source_bits) - 1)
    _refuse_repeated(sources_PK, padding)
    keys_PK >>= source_bits
    return keys_PK, sources_PK, probs_PK


def _refuse_repeated(sources_PK: npt.NDArray[np.int64], padding: int) -> None:
    """Entries that follow each other must differ; equal ids do, once sorted."""
    repeated = (sources_PK[:, 1:] == sources_PK[:, :-1]) & (sources_PK[:, 1:] != padding)
    if repeated.any():
        row, column = np.argwhere(repeated)[0]
        raise AlignmentError(
            f"a row must have an id once, got id {sources_PK[row, column]} twice in row {row}; "
            f"key rows by id and not by text, and pad with -1"
        )


def _refuse_overfull(total: npt.NDArray[np.float64]) -> None:
    overfull = total > 1 + _ROUNDING
    if overfull.any():
        row = int(np.argmax(overfull))
        raise AlignmentError(
            f"a row's probabilities must add up to at most 1, got {total[row]:.6f} in row {row}; "
            f"pass natural logarithms of normalised probabilities"
        )


def _merged(
    receivers_PK: npt.NDArray[np.int64], probs_PK: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Runs of one receiver id summed, then rows ordered by falling probability; UNMAPPED is dropped.

    Positive float32 numbers rise as their bits do: turned over and put above the id, one sort of unsigned numbers orders
    by both. A place of all ones stands behind every entry and reads as id -1 with probability 0; an id of -1 makes one.
    """
    run_starts_mask = np.ones(receivers_PK.shape, np.bool_)
    np.not_equal(receivers_PK[:, 1:], receivers_PK[:, :-1], out=run_starts_mask[:, 1:])
    starts = np.flatnonzero(run_starts_mask)
    sums_PK = np.zeros(receivers_PK.shape, np.float32)
    sums_PK.ravel()[starts] = np.add.reduceat(probs_PK.ravel(), starts)
    keys_PK = (~sums_PK.view(np.uint32)).astype(np.uint64)
    keys_PK <<= np.uint64(32)
    keys_PK |= np.where(run_starts_mask, receivers_PK, UNMAPPED).view(np.uint64)
    keys_PK.sort(axis=1)
    ids_PK = keys_PK.astype(np.uint32).view(np.int32)
    keys_PK >>= np.uint64(32)
    return ids_PK, (~keys_PK.astype(np.uint32)).view(np.float32)
