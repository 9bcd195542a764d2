"""Dynamic sampling: further prompts are sampled until as many groups as a step has prompts can teach something.

    live(x)    an own group whose rewards are not all equal, so that its advantages are not all 0
    round 0    the step's P prompts
    round r    P others, while fewer than P groups are live and r <= `dynamic_sampling_rounds`

Source: DAPO, Yu et al., arXiv 2503.14476, section 3.2. The rewards are the weighted sums of the reward functions' verdicts, as
they came, before anything is taken off or divided; completions from which all functions abstained do not count.

Deviations: live groups beyond P are trained on too, where DAPO throws them away. A dead group is left out of the loss alone: it
is published, counted in metrics, and may be rescued by a peer. Where peers' rewards give its rows an advantage, they stay.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from agents.advantages import spread
from agents.sharing.isolated import rewards_of
from agents.types import Group

More = Callable[[int, Sequence[Group]], Awaitable[Sequence[Group]]]
"""The scored groups of a round, given its number and the groups so far; none when there are no further prompts."""


async def fill(first: Sequence[Group], more: More, *, rounds: int) -> tuple[list[Group], dict[str, float]]:
    """A step's scored groups with those of at most `rounds` further rounds, the dead ones marked; and metrics.

    Nothing is marked or told with `rounds` 0. Waits for `more`; cancelled, it leaves nothing behind.
    """
    groups = list(first)
    if not rounds:
        return groups, {}
    used = 0
    while used < rounds and _count_live(groups) < len(first):
        further = await more(used + 1, groups)
        if not further:
            break
        groups += further
        used += 1
    marked = [replace(group, dead=not _is_live(group)) for group in groups]
    return marked, {"dynamic_sampling/rounds": float(used), "dynamic_sampling/kept": float(_count_live(groups))}


def _is_live(group: Group) -> bool:
    return spread(rewards_of(group)) > 0.0


def _count_live(groups: Sequence[Group]) -> int:
    return sum(map(_is_live, groups))
