"""Reward functions that compare a completion's text with the answer; TRL's signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def exact_match(completions: Sequence[object], answer: Sequence[object]) -> list[float | None]:
    """1.0 where completion and answer are equal but for space around them, else 0.0; None where there is no answer."""
    return _compared(completions, answer, lambda text, right: text == right)


def first_line_match(completions: Sequence[object], answer: Sequence[object]) -> list[float | None]:
    """1.0 where the completion's first line that is not blank equals the answer but for space around them, else 0.0.

    For base models, which go on with a next question behind their answer. None where there is no answer.
    """
    return _compared(completions, answer, lambda text, right: text.partition("\n")[0].rstrip() == right)


def contains_answer(completions: Sequence[object], answer: Sequence[object]) -> list[float | None]:
    """1.0 where the answer, less the space around it, stands anywhere in the completion, else 0.0; None without answer."""
    return _compared(completions, answer, lambda text, right: right in text)


def text_of(completion: Any) -> str:
    """A completion is text, or for conversational data a list with one message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _compared(
    completions: Sequence[object], answers: Sequence[object], equal: Callable[[str, str], bool]
) -> list[float | None]:
    return [
        None if answer is None else float(equal(text_of(completion).strip(), str(answer).strip()))
        for completion, answer in zip(completions, answers, strict=True)
    ]
