"""The tasks' settings: generated tasks with verifiable answers, and data files."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from agents.bounds import MANY, check_range


class _Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """name: unique in the run. heldout: how many prompts are kept for evaluation, never trained on; 0: no evaluation.

    template: the prompt, with `{x}` in the place of the problem; None takes the kind's own.
    """

    name: str
    heldout: int = 64
    template: str | None = None

    def __post_init__(self) -> None:
        check_range(self, "heldout", ge=0)
        if not self.name or not self.name.replace("_", "").replace("-", "").isalnum():
            raise ValueError(f"`name` must be letters, digits, '-' and '_', got name={self.name!r}")
        if self.template is not None and "{x}" not in self.template:
            raise ValueError(f"`template` must contain {{x}}, got template={self.template!r}")


class Reverse(_Task, frozen=True, kw_only=True, tag="reverse"):
    """Reverse a string of `length` letters of `alphabet`."""

    alphabet: str = "abcdef"
    length: int = 3
    limit: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "length", ge=2, le=32)
        check_range(self, "limit", ge=2)


class Sort(Reverse, frozen=True, kw_only=True, tag="sort"):
    """Sort the letters of a string of `length` letters of `alphabet`."""


class _Numbers(_Task, frozen=True, kw_only=True):
    """Whole numbers from `smallest` to `largest`, both included."""

    smallest: int = 0
    largest: int = 20
    limit: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "smallest", ge=0, le=MANY)
        check_range(self, "largest", gt=self.smallest, le=MANY)
        check_range(self, "limit", ge=2)


class Add(_Numbers, frozen=True, kw_only=True, tag="add"):
    """Add two whole numbers from `smallest` to `largest`. sign: what stands between them, space included."""

    sign: str = "+"


class Subtract(_Numbers, frozen=True, kw_only=True, tag="subtract"):
    """Take a whole number from one that is no smaller, both from `smallest` to `largest`."""

    largest: int = 19
    sign: str = "-"


class Multiply(_Numbers, frozen=True, kw_only=True, tag="multiply"):
    """Multiply two whole numbers from `smallest` to `largest`."""

    largest: int = 12
    sign: str = "*"


class Greatest(_Numbers, frozen=True, kw_only=True, tag="greatest"):
    """Name the greatest of three whole numbers from `smallest` to `largest`."""

    largest: int = 99


class SwapWords(_Task, frozen=True, kw_only=True, tag="swap_words"):
    """Swap two words."""

    words: tuple[str, ...] = ("red", "blue", "green", "cat", "dog", "sun", "moon", "tree", "fish", "bird", "one", "two")
    limit: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "limit", ge=2)


class ReasoningGym(_Task, frozen=True, kw_only=True, tag="reasoning_gym"):
    """Problems of a data set of reasoning-gym, judged by its own scorer, the reward `reasoning_gym`.

    dataset: its name there, such as "chain_sum". size: how many problems are made; equal ones count once. seed: None for
    one that follows from the run's. config: the data set's own settings.
    """

    dataset: str
    size: int = 500
    seed: int | None = None
    config: dict[str, Any] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "size", ge=2, le=250_000)
        check_range(self, "seed", ge=0, lt=2**31)
        taken = sorted(self.config.keys() & {"size", "seed"})
        if taken:
            raise ValueError(f"`config` holds the data set's other settings; set {taken[0]} beside it, got config.{taken[0]}")


class Data(_Task, frozen=True, kw_only=True, tag="data"):
    """Rows from a file or a Hugging Face dataset, with a column of prompts (text or messages).

    path: a .jsonl, .json or .parquet file, a directory of `datasets`, or a hub name. prompt_column: another name for
    `prompt`. All other columns reach the reward functions by name; of verl's layout, `reward_model.ground_truth` as
    `ground_truth` too. limit: most rows taken. `template`, where given, wraps a text prompt.
    """

    path: str
    split: str = "train"
    source: Literal["auto", "jsonl", "json", "parquet", "datasets"] = "auto"
    prompt_column: str = "prompt"
    limit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "limit", ge=2)


TaskConfig = Reverse | Sort | Add | Subtract | Multiply | Greatest | SwapWords | ReasoningGym | Data
