"""What a translation lost, in numbers that add up.

Shape legend: N texts · A tokens of the source · B tokens of the receiver · G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenalign.align import NO_GROUP, Alignment, align, first_of_groups, sizes_of_groups, widths
from tokenalign.encoder import Encoder
from tokenalign.errors import TokenAlignError
from tokenalign.raw_bytes import spell_bytes, whole_characters
from tokenalign.topk import TopKMass


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Counts of one translation or, added up, of many.

    All losses are 0 for canonical text translated to its own tokenizer, whatever the policies are: a log-ratio of two
    policies is no residual.

    Structure. n_tokens: receiver tokens compared with source tokens (an end-of-sequence token that only the receiver has
    is not). n_exact: those with the very bytes of one source token. n_groups: spans, of which one_to_one, merged (several
    source tokens to one), split (one to several) and tangled (several to several). n_bytes: bytes in spans; exact_bytes:
    those of exact tokens. logprob: sum of |log-prob| over spans, where log-probs crossed; exact_logprob: of exact tokens.
    Text. changed_bytes: rewritten by the receiver's normaliser. lost_bytes: no token of the receiver stands for them.
    Tail. tail_bytes: of an incomplete last character, held back; tail_tokens: source tokens that therefore have no span.
    Roles. role_tokens: control tokens of the source without a counterpart; the end of sequence that a receiver adds to a
    finished text is none.
    Seam. seam_bytes: bytes of receiver tokens over which the mask changes.
    Sampling. checked_tokens: source tokens compared with the source's own encoding; noncanonical_tokens: those that differ.
    topk: where the mass of mapped distributions went.
    """

    n_tokens: int = 0
    n_exact: int = 0
    n_groups: int = 0
    one_to_one: int = 0
    merged: int = 0
    split: int = 0
    tangled: int = 0
    n_bytes: int = 0
    exact_bytes: int = 0
    logprob: float = 0.0
    exact_logprob: float = 0.0
    changed_bytes: int = 0
    lost_bytes: int = 0
    tail_bytes: int = 0
    tail_tokens: int = 0
    role_tokens: int = 0
    seam_bytes: int = 0
    checked_tokens: int = 0
    noncanonical_tokens: int = 0
    topk: TopKMass = field(default_factory=TopKMass)

    @property
    def struct(self) -> float:
        """Share of the compared receiver tokens outside exact groups, 0 to 1; 0 where none was compared."""
        return 1 - self.n_exact / self.n_tokens if self.n_tokens else 0.0

    @property
    def struct_bytes(self) -> float:
        """Share of the bytes in spans outside exact groups, 0 to 1."""
        return 1 - self.exact_bytes / self.n_bytes if self.n_bytes else 0.0

    @property
    def struct_logprob(self) -> float:
        """Share of the |log-prob| in spans outside exact groups, 0 to 1; 0 where no log-probs crossed."""
        return 1 - self.exact_logprob / self.logprob if self.logprob else 0.0

    @property
    def noncanonical(self) -> float:
        """Share of the checked source tokens that are not of the source's own encoding, 0 to 1."""
        return self.noncanonical_tokens / self.checked_tokens if self.checked_tokens else 0.0

    def __add__(self, other: Residual) -> Residual:
        return Residual(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


class TranslationError(TokenAlignError, ValueError):
    """A translation loses more than its limits allow.

    residual: what it would have lost.
    """

    def __init__(self, message: str, *, residual: Residual | None = None) -> None:
        super().__init__(message)
        self.residual = residual


def noncanonical(encoder: Encoder, ids: npt.NDArray[np.int32], *, has_eos: bool) -> Residual:
    """How many of the ids [A] that a model sampled are not those that its tokenizer gives to their text.

    encoder: of the model's own tokenizer. has_eos: the last id is the end-of-sequence token, which is left out, as bytes
    are behind the last whole character.
    """
    content = ids[: len(ids) - has_eos]
    text = whole_characters(encoder.table.bytes_of(content))
    canonical = spell_bytes(encoder, [text])
    ends = encoder.table.ends(content)
    checked = content[ends <= len(text)]
    alignment = align(ends[: len(checked)], canonical.ends, open_end=True)
    same = alignment.exact_b & ~canonical.changed_mask
    twin = checked[first_of_groups(alignment.group_a)[alignment.group_b[same]]]
    return Residual(checked_tokens=len(checked), noncanonical_tokens=len(checked) - int((twin == canonical.ids[same]).sum()))


def structure(alignment: Alignment, span_logprobs: npt.NDArray[np.float64] | None) -> dict[str, list[Any]]:
    """The counts that an alignment of N texts determines: Residual's field -> one number per text.

    span_logprobs: [G] or [G, K]; of several the first is counted.
    """
    cu_a, cu_b, cu_g = alignment.cu_a, alignment.cu_b, alignment.cu_g
    lone_a, lone_b = alignment.eos_a & ~alignment.eos_b, alignment.eos_b & ~alignment.eos_a
    many_a, many_b = (sizes_of_groups(group, len(alignment)) > 1 for group in (alignment.group_a, alignment.group_b))
    exact_G = ~(many_a | many_b)  # the very tokens of exact_b, unless a normaliser changed them
    exact_G[alignment.group_b[(alignment.group_b != NO_GROUP) & ~alignment.exact_b]] = False
    counts: dict[str, npt.NDArray[Any]] = {
        "n_tokens": np.diff(cu_b) - lone_b,
        "n_exact": per_text(alignment.exact_b, cu_b),
        "n_groups": np.diff(cu_g),
        "merged": per_text(many_a & ~many_b, cu_g),
        "split": per_text(~many_a & many_b, cu_g),
        "tangled": per_text(many_a & many_b, cu_g),
        "n_bytes": np.where(np.diff(cu_g) > 0, np.append(alignment.group_ends, 0)[cu_g[1:] - 1], 0),
        "exact_bytes": per_text(widths(alignment.group_ends, cu_g) * exact_G, cu_g),
        "tail_tokens": per_text(alignment.group_a == NO_GROUP, cu_a) - lone_a,
        "role_tokens": per_text(widths(alignment.ends_a, cu_a) == 0, cu_a) - (alignment.eos_a & alignment.eos_b),
    }
    counts["one_to_one"] = counts["n_groups"] - counts["merged"] - counts["split"] - counts["tangled"]
    if span_logprobs is not None:
        size_G = np.abs(span_logprobs if span_logprobs.ndim == 1 else span_logprobs[:, 0])
        counts |= {"logprob": per_text(size_G, cu_g), "exact_logprob": per_text(size_G * exact_G, cu_g)}
    return {name: numbers.tolist() for name, numbers in counts.items()}


def per_text(values: npt.NDArray[Any], cu: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Sum over each text's tokens or groups [N], for values [T] and where the texts begin [N+1]."""
    if values.dtype == np.bool_:
        values = values.view(np.int8)
    sums_N = np.zeros(len(cu) - 1, np.float64 if values.dtype.kind == "f" else np.int64)
    filled = cu[1:] > cu[:-1]
    if filled.any():
        sums_N[filled] = np.add.reduceat(values, cu[:-1][filled], dtype=sums_N.dtype)
    return sums_N
