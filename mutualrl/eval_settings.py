"""How `mutualrl eval` does it: its options, and `key=value` beside the checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from agents.bounds import MANY, check_range
from mutualrl.config import MAX_SEED
from mutualrl.errors import ConfigError
from mutualrl.load import Table, merge, parse_override
from mutualrl.schema import check

_OVERRIDE = re.compile(r"[A-Za-z_.]+=")


class EvalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None, and no rewards: as the checkpoint was trained, else as the run that `data` is says, else the default.

    data: a file or data set, or a run's TOML or directory, whose held-out prompts are taken. prompt_column: of a file's.
    limit: most prompts per task. threshold: the reward from which a completion is correct (default 1.0).
    max_completion_length: default 256. temperature: of the completions that are sampled for pass@k. batch_size: completions
    decoded at a time. threads: of torch.
    """

    data: str
    task: str | None = None
    prompt_column: str = "prompt"
    limit: int | None = None
    rewards: tuple[str, ...] = ()
    threshold: float | None = None
    prompt_format: str | None = None
    max_completion_length: int | None = None
    temperature: float | None = None
    num_samples: int = 0
    pass_k: tuple[int, ...] = (1,)
    batch_size: int = 64
    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: int = os.cpu_count() or 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_range(self, "limit", "batch_size", ge=1, le=MANY)
        check_range(self, "max_completion_length", ge=1, le=2**20)
        check_range(self, "temperature", gt=0, le=10)
        check_range(self, "num_samples", ge=0, le=2**20)
        check_range(self, "threads", ge=1, le=4096)
        check_range(self, "seed", ge=0, le=MAX_SEED)
        most = self.num_samples or MANY
        if not self.pass_k or not all(1 <= k <= most for k in self.pass_k):
            raise ValueError(f"`pass_k` must hold numbers from 1 to num_samples, got pass_k={list(self.pass_k)!r}")


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Checkpoints, and settings (`key=value`, where there is no such directory)."""
    overrides = [each for each in arguments if _OVERRIDE.match(each) and not Path(each).exists()]
    return [each for each in arguments if each not in overrides], overrides


def read_settings(options: Mapping[str, object], overrides: Sequence[str]) -> EvalSettings:
    """The checked settings; ConfigError lists everything that is wrong with them."""
    table: Table = {name: value for name, value in options.items() if value is not None}
    for override in overrides:
        keys, value = parse_override(override)
        for key in reversed(keys):
            value = {key: value}
        table = merge(table, value)
    try:
        table["pass_k"] = [int(k) for k in table["pass_k"]]
    except (TypeError, ValueError):
        raise ConfigError(f"--pass-k: whole numbers separated by commas, got {table['pass_k']!r}") from None
    problems = check(table, EvalSettings)
    if problems:
        lines = (f"{'.'.join(problem.path)}: {problem.text}" for problem in problems)
        raise ConfigError("\n".join(["mutualrl eval cannot start:", *(f"  {line}" for line in lines)]))
    return msgspec.convert(table, EvalSettings)
