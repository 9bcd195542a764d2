"""Generated tasks: each kind is a finite, indexed space of (problem, answer) pairs.

An index is all that has to be drawn, so a small space is enumerated and a huge one (26 letters, 32 places) costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from agents.errors import TaskError
from agents.tasks.config import Add, Greatest, Multiply, Reverse, Sort, Subtract, SwapWords


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """size: how many problems there are. at: index in [0, size) -> (problem, answer). template: the kind's own prompt."""

    size: int
    at: Callable[[int], tuple[str, str]]
    template: str


def _string_at(alphabet: str, length: int, index: int) -> str:
    """The index-th string of `length` letters, most significant letter first."""
    letters = []
    for _ in range(length):
        index, digit = divmod(index, len(alphabet))
        letters.append(alphabet[digit])
    return "".join(reversed(letters))


def _distinct_letters(config: Reverse) -> str:
    alphabet = "".join(dict.fromkeys(config.alphabet))
    if len(alphabet) < 2:
        raise TaskError(
            f"`alphabet` of task {config.name!r} must have at least 2 different letters, got alphabet={config.alphabet!r}"
        )
    return alphabet


def reverse(config: Reverse) -> Space:
    """Strings and their reversals."""
    alphabet = _distinct_letters(config)

    def at(index: int) -> tuple[str, str]:
        text = _string_at(alphabet, config.length, index)
        return text, text[::-1]

    return Space(size=len(alphabet) ** config.length, at=at, template="reverse {x}:")


def sort(config: Sort) -> Space:
    """Strings and their letters in the order of code points."""
    alphabet = _distinct_letters(config)

    def at(index: int) -> tuple[str, str]:
        text = _string_at(alphabet, config.length, index)
        return text, "".join(sorted(text))

    return Space(size=len(alphabet) ** config.length, at=at, template="sort {x}:")


def add(config: Add) -> Space:
    """Ordered pairs of whole numbers and their sums."""

    def at(index: int) -> tuple[str, str]:
        left, right = _numbers_at(config, 2, index)
        return f"{left}{config.sign}{right}", str(left + right)

    return Space(size=_count(config) ** 2, at=at, template="{x}=")


def multiply(config: Multiply) -> Space:
    """Ordered pairs of whole numbers and their products."""

    def at(index: int) -> tuple[str, str]:
        left, right = _numbers_at(config, 2, index)
        return f"{left}{config.sign}{right}", str(left * right)

    return Space(size=_count(config) ** 2, at=at, template="{x}=")


def subtract(config: Subtract) -> Space:
    """Pairs of whole numbers, the second not the greater, and their differences."""
    count = _count(config)

    def at(index: int) -> tuple[str, str]:
        # The pairs with left = 0, 1, 2 … are 1, 2, 3 … in number, so those before `left` are left·(left + 1)/2.
        left = (math.isqrt(8 * index + 1) - 1) // 2
        right = index - left * (left + 1) // 2
        return f"{config.smallest + left}{config.sign}{config.smallest + right}", str(left - right)

    return Space(size=count * (count + 1) // 2, at=at, template="{x}=")


def greatest(config: Greatest) -> Space:
    """Three whole numbers and the greatest of them."""

    def at(index: int) -> tuple[str, str]:
        numbers = _numbers_at(config, 3, index)
        return ", ".join(map(str, numbers)), str(max(numbers))

    return Space(size=_count(config) ** 3, at=at, template="greatest of {x}:")


def _count(config: Add | Subtract | Multiply | Greatest) -> int:
    return config.largest - config.smallest + 1


def _numbers_at(config: Add | Multiply | Greatest, places: int, index: int) -> tuple[int, ...]:
    """The index-th tuple of `places` numbers of the task's range, the last one changing fastest."""
    numbers = []
    for _ in range(places):
        index, number = divmod(index, _count(config))
        numbers.append(config.smallest + number)
    return tuple(reversed(numbers))


def swap_words(config: SwapWords) -> Space:
    """Ordered pairs of different words and the same two in the other order."""
    words = tuple(dict.fromkeys(config.words))
    if len(words) < 2:
        raise TaskError(f"`words` of task {config.name!r} must have at least 2 different words, got words={config.words!r}")

    def at(index: int) -> tuple[str, str]:
        left, right = divmod(index, len(words) - 1)
        right += right >= left
        return f"{words[left]} {words[right]}", f"{words[right]} {words[left]}"

    return Space(size=len(words) * (len(words) - 1), at=at, template="swap {x}:")
