"""Which prompts a step takes: the same ids for all agents, whatever their numbers of prompts.

Agents may take unequal numbers of prompts per step, yet must meet on the same ones, so the order within a step cannot
depend on the count: an agent with 8 prompts takes the first 8 of another's 32. Shuffled epochs cut into steps do not
allow that. Here slot k of step t takes item (t + k·stride) mod n of a shuffled order, with a stride near n/φ and coprime
to n. Each slot walks through a whole epoch without replacement, the slots of one step lie evenly spread (three-distance
theorem), and so an agent with c prompts meets no prompt again for about n/c steps, and every prompt exactly c times in n.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache

from agents.errors import TaskError
from agents.types import Prompt

INVERSE_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def draw(train: Sequence[Prompt], *, seed: int, step: int, count: int) -> list[Prompt]:
    """The `count` prompts of `step`, all different, tasks in turn as long as they last.

    Each task's prompts must come in the same order for all agents, as `load_task` gives them; how the tasks are interleaved
    does not matter. `draw(count=a)` is the head of `draw(count=b)` for a <= b. Raises TaskError when there are fewer than
    `count` prompts.
    """
    if count > len(train):
        raise TaskError(
            f"`prompts_per_step` must be at most the number of training prompts ({len(train)}), got prompts_per_step={count}"
        )
    by_task: dict[str, list[Prompt]] = {}
    for prompt in train:
        by_task.setdefault(prompt.task, []).append(prompt)
    names = sorted(by_task)
    first = step % len(names)  # a count that the tasks do not divide favours each task in turn
    names = names[first:] + names[:first]
    drawn: list[Prompt] = []
    slot = 0
    while len(drawn) < count:
        for name in names:
            prompts = by_task[name]
            if slot < len(prompts) and len(drawn) < count:
                drawn.append(prompts[_item(len(prompts), name=name, seed=seed, step=step, slot=slot)])
        slot += 1
    return drawn


def _item(size: int, *, name: str, seed: int, step: int, slot: int) -> int:
    epoch, place = divmod(step, size)
    return _shuffled(size, f"{seed}/{name}/{epoch}")[(place + slot * _stride(size)) % size]


@lru_cache(maxsize=64)
def _shuffled(size: int, key: str) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(key).shuffle(order)
    return tuple(order)


@lru_cache(maxsize=64)
def _stride(size: int) -> int:
    """The whole number near size/φ, coprime to `size`, whose multiples spread best mod `size`.

    How evenly they spread is told by the partial quotients of stride/size: small ones mean that no multiple comes close
    to a whole turn (φ itself has all quotients 1).
    """
    wanted = round(size * INVERSE_GOLDEN_RATIO)
    window = range(max(1, wanted - 32), min(size, wanted + 33)) or range(1, 2)
    coprime = (stride for stride in window if math.gcd(stride, size) == 1)
    return min(coprime, key=lambda stride: (max(_partial_quotients(stride, size)), abs(stride - wanted)))


def _partial_quotients(numerator: int, denominator: int) -> list[int]:
    quotients = []
    while numerator:
        quotient, rest = divmod(denominator, numerator)
        quotients.append(quotient)
        numerator, denominator = rest, numerator
    return quotients
