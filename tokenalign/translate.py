"""A source's texts, turned into the receiver's ids, aligned, with the source's traces carried over and what was lost.

Shape legend: N texts · A tokens of the source · B tokens of the receiver · G groups · K log-probs per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenalign.align import Alignment, align_batch, widths
from tokenalign.encoder import Encoder
from tokenalign.errors import AlignmentError, RoleError, TableError, TextError, TokenAlignError, TooLongError
from tokenalign.raw_bytes import Piece, encode_bytes, locate_pieces, whole_characters
from tokenalign.residual import Residual, TranslationError, per_text, structure
from tokenalign.spelling import Spelled
from tokenalign.table import TokenKind
from tokenalign.trace import Trace, plausible
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

    def __post_init__(self) -> None:
        for name in ("max_lost_bytes", "max_changed_bytes", "max_struct"):
            most = getattr(self, name)
            if most is not None and not (isinstance(most, int | float) and 0 <= most <= (1 if name == "max_struct" else most)):
                raise TranslationError(
                    f"`{name}` must be a number from 0{' to 1' if name == 'max_struct' else ''}, got {most!r}"
                )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One text that can be translated. held_bytes: of an incomplete last character."""

    trace: Trace
    pieces: Sequence[Piece]
    held_bytes: int

    @property
    def n_source_tokens(self) -> int:
        return 0 if self.trace.ends is None else np.size(self.trace.ends)


# The traces that a text may bring along, and the type of nothing.
_TRACES: dict[str, type[np.generic]] = {"ends": np.int64, "logprobs": np.float64, "mask": np.bool_}

_NOTHING = _Row(
    trace=Trace(text=b"", ends=None, finished=False, has_eos=False),
    pieces=[Piece(b"", np.empty(0, np.int32), is_text=True)],
    held_bytes=0,
)


class Translator:
    """Turns other tokenizers' texts into the ids of one receiver. May be used from several threads at once."""

    def __init__(self, encoder: Encoder, *, eos_id: int | None, limits: Limits = Limits()) -> None:
        """eos_id: the end-of-sequence token that the receiver is trained to end with; None for a receiver without one.

        Raises TableError when the encoder's table has no such id.
        """
        table = encoder.table
        if eos_id is not None and (not 0 <= eos_id < len(table) or table.kind(eos_id) is TokenKind.HOLE):
            raise TableError(f"`eos_id` must be a token of the receiver's table of {len(table)} ids, got eos_id={eos_id}")
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
        return self.translate_batch([trace], max_tokens=max_tokens)[0]

    def translate_batch(self, traces: Sequence[Trace], *, max_tokens: int, threads: int = 1) -> Translation:
        """`translate` for N texts in one pass; those that it would refuse are left empty, with their errors.

        Either all traces have ends (log-probs, a mask) or none has; AlignmentError otherwise. threads: that encode.
        """
        read = partial(self._read, max_tokens=max_tokens)
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                rows = list(pool.map(read, traces))
        else:
            rows = [read(trace) for trace in traces]
        errors = {text: row for text, row in enumerate(rows) if isinstance(row, TokenAlignError)}
        kept = [_NOTHING if isinstance(row, TokenAlignError) else row for row in rows]
        spelled = self._locate(kept, errors)
        for text, row in enumerate(kept):
            if row.trace.text and (error := self._lost_too_much(spelled, text, row)) is not None:
                errors[text] = error
        carried = frozenset(name for name in _TRACES if any(getattr(trace, name) is not None for trace in traces))
        translation = self._carry(kept, spelled, errors, carried)
        too_tangled = self._too_tangled(translation)
        if too_tangled:
            translation = self._carry(kept, spelled, {**translation.errors, **too_tangled}, carried)
        return translation

    def _locate(self, rows: list[_Row], errors: dict[int, TokenAlignError]) -> Spelled:
        """Where all tokens end; a text on which the library gives up is taken out, with its error."""
        try:
            return locate_pieces(self._encoder, [row.pieces for row in rows])
        except TextError:
            for text, row in enumerate(rows):
                try:
                    locate_pieces(self._encoder, [row.pieces])
                except TextError as gave_up:
                    errors[text], rows[text] = gave_up, _NOTHING
            return locate_pieces(self._encoder, [row.pieces for row in rows])

    def _read(self, trace: Trace, *, max_tokens: int) -> _Row | TokenAlignError:
        """A checked trace with its ids, or why it is refused."""
        try:
            trace = trace.shaped()
            if trace.finished and self._eos_id is None:
                raise RoleError("the receiver has no end-of-sequence token to end a finished text, got eos_id=None")
            content = trace.text if trace.finished else whole_characters(trace.text)
            pieces = encode_bytes(self._encoder, content)
            n_tokens = sum(len(piece.ids) for piece in pieces)
            if n_tokens + trace.finished > max_tokens:
                raise TooLongError(
                    f"a text of {len(content)} bytes takes more of the receiver's tokens than allowed, got "
                    f"{n_tokens + trace.finished} tokens with max_tokens={max_tokens}; raise the limit or drop the text"
                )
            if content and not n_tokens:
                raise TranslationError(
                    f"no token of the receiver stands for any of the text, got {content[:40]!r} "
                    f"(tokenizer {self._encoder.fingerprint}); refuse it",
                    residual=Residual(lost_bytes=len(content)),
                )
        except TokenAlignError as error:
            return error
        return _Row(trace=trace, pieces=pieces, held_bytes=len(trace.text) - len(content))

    def _lost_too_much(self, spelled: Spelled, text: int, row: _Row) -> TranslationError | None:
        lost, changed = int(spelled.lost_bytes[text]), int(spelled.changed_bytes[text])
        if not lost and not changed:
            return None
        residual = Residual(lost_bytes=lost, changed_bytes=changed, tail_bytes=row.held_bytes)
        for name, value, most in (
            ("lost_bytes", lost, self._limits.max_lost_bytes),
            ("changed_bytes", changed, self._limits.max_changed_bytes),
        ):
            if most is not None and value > most:
                return self._beyond(name, value, most, residual)
        return None

    def _too_tangled(self, translation: Translation) -> dict[int, TokenAlignError]:
        most = self._limits.max_struct
        if most is None:
            return {}
        beyond = [(text, each) for text, each in enumerate(translation.residuals) if each.struct > most]
        return {text: self._beyond("struct", each.struct, most, each) for text, each in beyond}

    def _beyond(self, name: str, value: float, most: float, residual: Residual) -> TranslationError:
        losses = ", ".join(self._encoder.table.losses) or "lossless"
        return TranslationError(
            f"the translation loses more than allowed, got {name}={value} with max_{name}={most} "
            f"(tokenizer {self._encoder.fingerprint}: {losses}); refuse the text or raise the limit",
            residual=residual,
        )

    def _carry(
        self, kept: Sequence[_Row], given: Spelled, errors: dict[int, TokenAlignError], carried: frozenset[str]
    ) -> Translation:
        """Align all texts but the refused ones, and carry their traces over."""
        rows = [_NOTHING if text in errors else row for text, row in enumerate(kept)]
        spelled = given.without(np.isin(np.arange(len(rows)), list(errors))) if errors else given
        finished = np.array([row.trace.finished for row in rows], np.bool_)
        spelled = self._with_eos(spelled, [len(row.trace.text) for row in rows], finished)
        traces = [row.trace for text, row in enumerate(rows) if text not in errors]
        cu_a = np.cumsum([0, *(row.n_source_tokens for row in rows)])
        ends_a, logprobs, source_mask = (_joined(traces, name) if name in carried else None for name in _TRACES)
        if not _hold(rows, ends_a, cu_a, logprobs):
            return self._carry(kept, given, errors | _lies(kept, errors), carried)
        alignment = _align(rows, ends_a, cu_a, spelled, finished)
        counts: dict[str, Sequence[float]] = {
            "changed_bytes": spelled.changed_bytes.tolist(),
            "lost_bytes": spelled.lost_bytes.tolist(),
            "tail_bytes": [row.held_bytes for row in rows],
        }
        span_logprobs = mask = None
        if alignment is not None:
            span_logprobs = None if logprobs is None else sum_spans(logprobs, alignment)
            counts |= structure(alignment, span_logprobs)
            if source_mask is not None:
                mask, some = extremes(source_mask.astype(np.bool_), alignment, missing=np.False_)
                counts["seam_bytes"] = per_text(widths(spelled.ends, spelled.cu) * (mask != some), spelled.cu).tolist()
        return Translation(
            ids=spelled.ids,
            ends=spelled.ends,
            cu=spelled.cu,
            alignment=alignment,
            span_logprobs=span_logprobs,
            mask=mask,
            residuals=[Residual(**dict(zip(counts, each, strict=True))) for each in zip(*counts.values(), strict=True)],
            errors=errors,
        )

    def _with_eos(self, spelled: Spelled, lengths: Sequence[int], finished: npt.NDArray[np.bool_]) -> Spelled:
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
        ends[~content_mask] = np.array(lengths)[finished]
        return replace(spelled, ids=ids, ends=ends, cu=cu, changed_mask=changed_mask)


def _hold(
    rows: Sequence[_Row],
    ends_a: npt.NDArray[Any] | None,
    cu_a: npt.NDArray[np.int64],
    logprobs: npt.NDArray[Any] | None,
) -> bool:
    """Whether the numbers of all traces are what Trace.checked asks for, in one look."""
    if ends_a is None:
        return True
    with_eos = cu_a[1:][[row.trace.has_eos for row in rows]]
    if not (cu_a[1:] > cu_a[:-1])[[bool(row.trace.text) or row.trace.has_eos for row in rows]].all():
        return False
    width_A = widths(ends_a, cu_a)
    last_N = np.append(ends_a, 0)[np.where(cu_a[1:] > cu_a[:-1], cu_a[1:] - 1, len(ends_a))]
    return (
        width_A.min(initial=0) >= 0
        and ends_a.min(initial=0) >= 0
        and not width_A[with_eos - 1].any()
        and last_N.tolist() == [len(row.trace.text) for row in rows]
        and (logprobs is None or plausible(logprobs))
    )


def _lies(rows: Sequence[_Row], errors: Mapping[int, TokenAlignError]) -> dict[int, TokenAlignError]:
    """Why traces do not hold, by text."""
    found: dict[int, TokenAlignError] = {}
    for text, row in enumerate(rows):
        try:
            if text not in errors:
                row.trace.checked()
        except TokenAlignError as error:
            found[text] = error
    return found


def _align(
    rows: Sequence[_Row],
    ends_a: npt.NDArray[Any] | None,
    cu_a: npt.NDArray[np.int64],
    spelled: Spelled,
    finished: npt.NDArray[np.bool_],
) -> Alignment | None:
    """Source to receiver, None for traces without ends. Tokens that do not spell the text's very bytes are not exact."""
    if ends_a is None:
        return None
    eos_a = np.array([row.trace.has_eos for row in rows], np.bool_)
    held = np.array([row.held_bytes > 0 for row in rows], np.bool_)
    alignment = align_batch(ends_a, cu_a, spelled.ends, spelled.cu, eos_a=eos_a, eos_b=finished, open_end=held)
    if spelled.changed_mask.any():
        return replace(alignment, exact_b=alignment.exact_b & ~spelled.changed_mask)
    return alignment


def _joined(traces: Sequence[Trace], name: str) -> npt.NDArray[Any]:
    """One trace of all texts, one after the other; nothing where all texts that had it were refused."""
    given = [getattr(trace, name) for trace in traces]
    with_it = [each for each in given if each is not None]
    if not given:
        return np.empty(0, _TRACES[name])
    shapes = {each.shape[1:] for each in with_it}
    if len(with_it) < len(given) or len(shapes) > 1:
        raise AlignmentError(
            f"either all traces of a batch have `{name}` of one form or none, got {len(with_it)} of {len(given)} with it"
        )
    return np.concatenate(with_it) if len(with_it) > 1 else np.asarray(with_it[0])
