"""A source's texts, turned into the receiver's ids, aligned, with the source's traces carried over and what was lost.

Shape legend: N texts · A tokens of the source · B tokens of the receiver · G groups · K log-probs per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from tokenalign.align import Alignment, align_batch, widths
from tokenalign.encoder import Encoder
from tokenalign.errors import AlignmentError, RoleError, TableError, TokenAlignError, TooLongError
from tokenalign.raw_bytes import spell_bytes, whole_characters
from tokenalign.residual import Residual, TranslationError, per_text, structure
from tokenalign.spelling import Spelled
from tokenalign.trace import Trace
from tokenalign.transfer import extremes, sum_spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a translation may lose before it is refused; None for no limit.

    max_lost_bytes, max_changed_bytes: of one text, see Residual. max_struct: share of receiver tokens outside exact
    groups, 0 to 1.
    """

    max_lost_bytes: int | None = 0
    max_changed_bytes: int | None = None
    max_struct: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Translation:
    """N texts in the receiver's tokens, one after the other.

    ids: int32 [B], the receiver's end-of-sequence token included where a text is finished. ends: int64 [B], byte offset
    behind each token in its own text. cu: int64 [N+1], where each text begins. alignment: source to receiver.
    span_logprobs: float64 [G] or [G, K], the source's log-probs summed over each span. mask: bool [B], tokens all of whose
    bytes the source's mask has. These three are None where the traces had no ends, no log-probs, no mask.
    residuals: what each text lost. errors: why a text was refused, by its number; it has no tokens then.
    """

    ids: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int64]
    cu: npt.NDArray[np.int64]
    alignment: Alignment | None
    span_logprobs: npt.NDArray[np.float64] | None
    mask: npt.NDArray[np.bool_] | None
    residuals: Sequence[Residual]
    errors: Mapping[int, TokenAlignError] = field(default_factory=dict)

    def __len__(self) -> int:
        """N."""
        return len(self.residuals)

    @property
    def residual(self) -> Residual:
        """What all texts lost."""
        return sum(self.residuals, start=Residual())

    def __getitem__(self, text: int) -> Translation:
        """The translation of one text, with groups counted from 0. Raises the error for which it was refused."""
        if text in self.errors:
            raise self.errors[text]
        own = slice(*self.cu[text : text + 2])
        alignment = self.alignment
        spans = slice(*alignment.cu_g[text : text + 2]) if alignment is not None else slice(0)
        return Translation(
            ids=self.ids[own],
            ends=self.ends[own],
            cu=self.cu[text : text + 2] - self.cu[text],
            alignment=None if alignment is None else alignment[text],
            span_logprobs=None if self.span_logprobs is None else self.span_logprobs[spans],
            mask=None if self.mask is None else self.mask[own],
            residuals=[self.residuals[text]],
        )


class Translator:
    """Turns other tokenizers' texts into the ids of one receiver. May be used from several threads at once."""

    def __init__(self, encoder: Encoder, *, eos_id: int | None, limits: Limits = Limits()) -> None:
        """eos_id: the end-of-sequence token that the receiver is trained to end with; None for a receiver without one.

        Raises TableError when the encoder's table has no such id.
        """
        if eos_id is not None and not 0 <= eos_id < len(encoder.table):
            raise TableError(f"`eos_id` must be an id of the table of {len(encoder.table)} ids, got eos_id={eos_id}")
        self._encoder = encoder
        self._eos_id = eos_id
        self._limits = limits

    def translate(self, trace: Trace, *, max_tokens: int) -> Translation:
        """Encode one text for the receiver, align the two tokenizations and carry the traces over.

        A finished text ends in the receiver's end-of-sequence token. One that is not finished may break off within a
        character: the longest valid prefix is translated, at most 3 bytes are held back and counted, and source tokens
        that reach into them belong to no span. Other bytes that are no UTF-8 become the receiver's tokens of single bytes.

        Raises TextError for such bytes where the receiver has no tokens for them, TranslationError beyond the limits
        (with the residual), TooLongError beyond max_tokens (nothing is ever cut off), RoleError for an end of sequence
        that cannot be mapped, and AlignmentError where the ends do not cover the text or traces do not fit them.
        """
        return self._translate([trace], max_tokens=max_tokens, threads=1)

    def translate_batch(self, traces: Sequence[Trace], *, max_tokens: int, threads: int = 1) -> Translation:
        """`translate` for N texts in one pass; those that it would refuse are left empty, with their errors.

        Either all traces have ends (log-probs, a mask) or none has.
        """
        try:
            return self._translate(traces, max_tokens=max_tokens, threads=threads)
        except TokenAlignError as first:
            errors: dict[int, TokenAlignError] = {}
            for text, trace in enumerate(traces):
                try:
                    self._translate([trace], max_tokens=max_tokens, threads=1)
                except TokenAlignError as error:
                    errors[text] = error
            if not errors:  # they do not go together
                raise first
            kept = [_emptied(trace) if text in errors else trace for text, trace in enumerate(traces)]
            return replace(self._translate(kept, max_tokens=max_tokens, threads=threads), errors=errors)

    def _translate(self, traces: Sequence[Trace], *, max_tokens: int, threads: int) -> Translation:
        finished = np.array([trace.finished for trace in traces], np.bool_)
        self._check_roles(traces)
        contents = [trace.text if trace.finished else whole_characters(trace.text) for trace in traces]
        spelled = self._with_eos(spell_bytes(self._encoder, contents, threads=threads), contents, finished)
        held_N = [len(trace.text) - len(content) for trace, content in zip(traces, contents, strict=True)]
        self._check_tokens(spelled, contents, finished, max_tokens)
        alignment = _align(traces, spelled, finished, np.array(held_N) > 0)
        counts: dict[str, Sequence[float]] = {
            "changed_bytes": spelled.changed_bytes.tolist(),
            "lost_bytes": spelled.lost_bytes.tolist(),
            "tail_bytes": held_N,
        }
        span_logprobs = mask = None
        if alignment is not None:
            logprobs, source_mask = _joined(traces, "logprobs"), _joined(traces, "mask")
            if logprobs is not None:
                span_logprobs = sum_spans(logprobs, alignment)
            counts |= structure(alignment, span_logprobs)
            if source_mask is not None:
                mask, some = extremes(source_mask.astype(np.bool_), alignment, missing=np.False_)
                counts["seam_bytes"] = per_text(widths(spelled.ends, spelled.cu) * (mask != some), spelled.cu).tolist()
        residuals = [Residual(**dict(zip(counts, each, strict=True))) for each in zip(*counts.values(), strict=True)]
        self._check_limits(residuals)
        return Translation(
            ids=spelled.ids,
            ends=spelled.ends,
            cu=spelled.cu,
            alignment=alignment,
            span_logprobs=span_logprobs,
            mask=mask,
            residuals=residuals,
        )

    def _check_roles(self, traces: Sequence[Trace]) -> None:
        for trace in traces:
            if trace.has_eos and not trace.finished:
                raise RoleError("a text with an end-of-sequence token is finished, got finished=False, has_eos=True")
            if trace.finished and self._eos_id is None:
                raise RoleError("the receiver has no end-of-sequence token to end a finished text, got eos_id=None")

    def _with_eos(self, spelled: Spelled, contents: Sequence[bytes], finished: npt.NDArray[np.bool_]) -> Spelled:
        """The receiver's end-of-sequence token behind each finished text."""
        if not finished.any():
            return spelled
        cu = spelled.cu + np.concatenate([[0], np.cumsum(finished)])
        content_mask = np.ones(cu[-1], np.bool_)
        content_mask[cu[1:][finished] - 1] = False
        ids = np.full(cu[-1], self._eos_id, np.int32)
        ends = np.empty(cu[-1], np.int64)
        changed_mask = np.zeros(cu[-1], np.bool_)
        ids[content_mask], ends[content_mask] = spelled.ids, spelled.ends
        changed_mask[content_mask] = spelled.changed_mask
        ends[~content_mask] = np.array([len(content) for content in contents])[finished]
        return replace(spelled, ids=ids, ends=ends, cu=cu, changed_mask=changed_mask)

    def _check_tokens(
        self, spelled: Spelled, contents: Sequence[bytes], finished: npt.NDArray[np.bool_], max_tokens: int
    ) -> None:
        counts = np.diff(spelled.cu)
        for text in np.flatnonzero(counts == finished).tolist():
            if contents[text]:
                raise TranslationError(
                    f"no token of the receiver stands for any of the text, got {contents[text][:40]!r} "
                    f"(tokenizer {self._encoder.fingerprint}); refuse it",
                    residual=Residual(lost_bytes=len(contents[text])),
                )
        if counts.max(initial=0) > max_tokens:
            text = int(counts.argmax())
            raise TooLongError(
                f"a text of {len(contents[text])} bytes takes more of the receiver's tokens than allowed, got "
                f"{counts[text]} tokens with max_tokens={max_tokens}; raise the limit or drop the text"
            )

    def _check_limits(self, residuals: Sequence[Residual]) -> None:
        limits = self._limits
        for residual in residuals:
            for name, value, most in (
                ("lost_bytes", residual.lost_bytes, limits.max_lost_bytes),
                ("changed_bytes", residual.changed_bytes, limits.max_changed_bytes),
                ("struct", residual.struct, limits.max_struct),
            ):
                if most is not None and value > most:
                    raise TranslationError(
                        f"the translation loses more than allowed, got {name}={value} with max_{name}={most} "
                        f"(tokenizer {self._encoder.fingerprint}: {', '.join(self._encoder.table.losses) or 'lossless'}); "
                        f"refuse the text or raise the limit",
                        residual=residual,
                    )


def _align(
    traces: Sequence[Trace], spelled: Spelled, finished: npt.NDArray[np.bool_], held: npt.NDArray[np.bool_]
) -> Alignment | None:
    """Source to receiver, None for traces without ends. Tokens that do not spell the text's very bytes are not exact."""
    ends_a = _joined(traces, "ends")
    if ends_a is None:
        return None
    counts = [_n_tokens(trace) for trace in traces]
    eos_a = np.array([trace.has_eos for trace in traces], np.bool_)
    cu_a = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    alignment = align_batch(ends_a, cu_a, spelled.ends, spelled.cu, eos_a=eos_a, eos_b=finished, open_end=held)
    for text in np.flatnonzero(held).tolist():
        last, length = alignment.ends_a[cu_a[text] : cu_a[text + 1]][-1:].sum(), len(traces[text].text)
        if last != length:
            raise AlignmentError(f"`ends` must cover the text of {length} bytes, got {last} as the last end")
    if spelled.changed_mask.any():
        return replace(alignment, exact_b=alignment.exact_b & ~spelled.changed_mask)
    return alignment


def _joined(traces: Sequence[Trace], name: str) -> npt.NDArray[np.generic] | None:
    """One trace of all texts, one after the other; None where no text has it."""
    given = [getattr(trace, name) for trace in traces]
    if all(each is None for each in given):
        return None
    if any(each is None for each in given):
        text = next(text for text, each in enumerate(given) if each is None)
        raise AlignmentError(f"either all traces of a batch have `{name}` or none, got {name}=None in text {text} alone")
    arrays = [np.asarray(each) for each in given]
    for trace, array in zip(traces, arrays, strict=True):
        if len(array) != _n_tokens(trace):
            raise AlignmentError(f"`{name}` must have one entry per token, got {len(array)} for {_n_tokens(trace)} ends")
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]


def _n_tokens(trace: Trace) -> int:
    return 0 if trace.ends is None else np.size(np.asarray(trace.ends))


def _emptied(trace: Trace) -> Trace:
    """Nothing, with the same traces."""
    none_of = {
        name: np.asarray(value)[:0] for name in ("ends", "logprobs", "mask") if (value := getattr(trace, name)) is not None
    }
    return Trace(**({"ends": None} | none_of), text=b"", finished=False, has_eos=False)
