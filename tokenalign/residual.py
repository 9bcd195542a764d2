"""What a translation lost, in numbers that add up."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Counts of one translation or, added up, of many; all zero-loss for canonical text translated to its own
    tokenizer.

    n_tokens: receiver tokens compared with source tokens (an end-of-sequence token that only the receiver has is not).
    n_exact: those with the very bytes of one source token. n_groups: spans. text_bytes: bytes of text that the receiver
    cannot spell and that were refused for it. tail_bytes: bytes of an incomplete last character that were held back;
    tail_tokens: source tokens that therefore have no span.
    """

    n_tokens: int = 0
    n_exact: int = 0
    n_groups: int = 0
    text_bytes: int = 0
    tail_bytes: int = 0
    tail_tokens: int = 0

    @property
    def struct(self) -> float:
        """Share of the compared receiver tokens outside exact groups, 0 to 1; 0 where none was compared."""
        return 1 - self.n_exact / self.n_tokens if self.n_tokens else 0.0

    def __add__(self, other: Residual) -> Residual:
        return Residual(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})
