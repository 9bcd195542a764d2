"""How completions are drawn."""

from __future__ import annotations

import msgspec

from agents.bounds import MANY, check_range


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How completions are drawn in training. Evaluation is greedy with the same `max_completion_length`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_completion_length: int = 16
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_range(self, "temperature", gt=0, le=10)
        check_range(self, "top_p", gt=0, le=1)
        check_range(self, "top_k", ge=0, le=MANY)
        check_range(self, "max_completion_length", ge=1, le=2**20)
        if "" in self.stop:
            raise ValueError(f"`stop` must hold no empty string, which every text contains, got stop={self.stop!r}")
