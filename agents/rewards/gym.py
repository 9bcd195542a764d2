"""`reasoning_gym`: reasoning-gym's own scorers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agents.rewards.built_in import text_of
from agents.tasks.gym_rows import dataset_of, extract_answer


def reasoning_gym(
    completions: Sequence[object], reasoning_gym: Sequence[Mapping[str, Any] | None] | None = None
) -> list[float | None]:
    """What the data set's `score_answer` says, 0 to 1: of what stands in `<answer>` tags, else of the whole stripped text.

    reasoning_gym: the column of that name of tasks of this kind; None where a prompt is of another kind.
    """
    if reasoning_gym is None:
        raise ValueError('no prompt is of a task with kind = "reasoning_gym"')
    return [
        None if source is None else _score(text_of(completion), source)
        for completion, source in zip(completions, reasoning_gym, strict=True)
    ]


def _score(text: str, source: Mapping[str, Any]) -> float:
    tagged = extract_answer(text)
    dataset, problem = _problem(source["dataset"], json.dumps(source["settings"]), source["index"])
    return float(dataset.score_answer(text.strip() if tagged is None else tagged, problem))


@lru_cache(maxsize=4096)
def _problem(name: str, settings: str, index: int) -> tuple[Any, Any]:
    dataset = dataset_of(name, settings)
    return dataset, dataset[index]
