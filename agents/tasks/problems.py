"""Generated string tasks: each kind is a finite, indexed space of (problem, answer) pairs.

An index is all that has to be drawn, so a small space is enumerated and a huge one (26 letters, 32 places) costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agents.errors import TaskError
from agents.tasks.config import Add, Reverse, Sort, SwapWords


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
    count = config.largest + 1

    def at(index: int) -> tuple[str, str]:
        left, right = divmod(index, count)
        return f"{left}+{right}", str(left + right)

    return Space(size=count**2, at=at, template="{x}=")


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
