"""Which prompts an agent's batches take, and which steps of the common schedule it has trained on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from agents.peers import PeerFeed, next_step
from agents.tasks.schedule import draw
from agents.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The prompts of a batch, and the steps of the common schedule that they are of."""

    prompts: Sequence[Prompt]
    schedule_steps: frozenset[int]


class Drawing:
    """Draws one batch after the other. met: schedule steps of the batches that were used, which those ahead are not yet."""

    def __init__(
        self, train: Sequence[Prompt], feed: PeerFeed, *, seed: int, schedule: Literal["seed", "follow"], count: int
    ) -> None:
        self._train = train
        self._feed = feed
        self._seed = seed
        self._schedule = schedule
        self._count = count
        self._drawn: set[int] = set()
        self.met: set[int] = set()

    def restore(self, met: Collection[int]) -> None:
        """Go on after these schedule steps."""
        self.met, self._drawn = set(met), set(met)

    def use(self, drawn: Draw) -> None:
        """A batch is used now."""
        self.met |= drawn.schedule_steps

    def more(self, drawn: Draw, have: Sequence[Prompt]) -> list[Prompt]:
        """Up to `count` prompts behind those of a batch's newest schedule step that are not among `have`.

        Fewer or none when the training prompts are used up. The same ones for all agents with equal counts.
        """
        count = min(len(have) + self._count, len(self._train))
        behind = draw(self._train, seed=self._seed, step=max(drawn.schedule_steps), count=count)
        known = {prompt.id for prompt in have}
        return [prompt for prompt in behind if prompt.id not in known][: self._count]

    async def next(self) -> Draw:
        """The next batch's prompts; waits for the hub only where peers are followed."""
        met = set(self._drawn)
        chosen: list[Prompt] = []
        if self._schedule == "follow":
            await self._feed.refresh()
            chosen = self._feed.follow(met, self._count)
        if len(chosen) < self._count:
            have = {prompt.id for prompt in chosen}
            own = next_step(met)
            met.add(own)
            drawn = draw(self._train, seed=self._seed, step=own, count=self._count)
            chosen = (chosen + [prompt for prompt in drawn if prompt.id not in have])[: self._count]
        new = frozenset(met - self._drawn)
        self._drawn = met
        return Draw(prompts=chosen, schedule_steps=new)
