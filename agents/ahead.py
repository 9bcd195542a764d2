"""Batches that are begun before they are needed, and how old they may be when they are used.

    begun:  s … s + max_staleness        each a task: drawn at once, sampled by the weights of the moment it is begun at
    taken:  one per step                 its age: the learner's version at its use, less the version that sampled it

Every step first begins what is missing, then takes one. So a batch is trained at most `max_staleness` versions after the
weights that sampled it, unless its sampler is slow or lags behind. With 0 it is begun when it is needed: strictly on-policy.
Which is taken, and what becomes of one that is too old nevertheless, says `staleness`:

    wait       in the order in which they were begun, a slow one is waited for; the same numbers in every run
    drop       whichever is there first; groups that are too old are thrown away and counted
    withhold   whichever is there first; groups that are too old are judged, published and answered by peers, not trained on

Sources: the queue and its bound as in TRL's AsyncGRPOTrainer, in batches; `withhold` after prime-rl's discussion of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agents.drawing import Draw
from agents.errors import StalenessError
from agents.types import Group, Prompt
from exchange.types import Version

Staleness = Literal["wait", "drop", "withhold"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sampled groups that may be used now. number: in the order in which batches were begun."""

    number: int
    draw: Draw
    groups: Sequence[Group]
    ready_at_s: float


class Ahead:
    """Begins batches and hands them out. Not for concurrent use: one `take` at a time.

    draw: gives the next prompts. sample(prompts, number): their groups, each with the version that sampled it; up to
    max_staleness + 1 of these calls wait at once. first: the number of the first batch. What was ahead when a run was saved is
    drawn and sampled again when it goes on.
    """

    def __init__(
        self,
        draw: Callable[[], Awaitable[Draw]],
        sample: Callable[[Sequence[Prompt], int], Awaitable[Sequence[Group]]],
        *,
        max_staleness: int,
        staleness: Staleness,
        first: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._draw = draw
        self._sample = sample
        self._max_staleness = max_staleness
        self._staleness = staleness
        self._clock = clock
        self._begun: list[asyncio.Task[Batch]] = []
        self._next = first
        self._dropped = self._withheld = 0
        # At most max_staleness + 1 batches can have been begun before the learner's newest version: where twice as many are too
        # old, the sampler does not follow.
        self._max_stale_in_a_row = 2 * (max_staleness + 1)
        self._stale_in_a_row = 0

    async def take(self, version: Version) -> tuple[Batch, dict[str, float]]:
        """The next batch for a learner whose weights are `version`, with metrics of its age and of the wait for it.

        Waits for prompts to be drawn and for a batch to be sampled; raises what that raises. StalenessError when batch
        after batch is too old throughout, or when one claims to be of weights that do not exist yet.
        """
        started = self._clock()
        while True:
            await self._fill()
            batch = await self._first()
            ages = [_age(group, version) for group in batch.groups]
            fresh = min(ages) <= self._max_staleness
            self._stale_in_a_row = 0 if fresh else self._stale_in_a_row + 1
            if self._stale_in_a_row >= self._max_stale_in_a_row:
                raise self._too_old(version, batch)
            if fresh or self._staleness == "withhold":
                return self._judge(batch, ages), self._metrics(batch, ages, started)
            self._dropped += len(ages)

    def _too_old(self, version: Version, batch: Batch) -> StalenessError:
        newest = max(group.version.step for group in batch.groups)
        return StalenessError(
            f"{self._stale_in_a_row} batches in a row were too old to be trained on: the learner is at version {version.step}, "
            f"and the newest that its sampler used is {newest} (batch {batch.number}), where "
            f"max_staleness={self._max_staleness}; see why the sampler does not get the weights, or raise max_staleness"
        )

    async def close(self) -> None:
        """Give up what was begun; a computation on a thread runs to its end unheard."""
        for task in self._begun:
            task.cancel()
        await asyncio.gather(*self._begun, return_exceptions=True)
        self._begun.clear()

    async def _fill(self) -> None:
        while len(self._begun) <= self._max_staleness:
            draw = await self._draw()
            self._begun.append(asyncio.create_task(self._batch(draw, self._next)))
            self._next += 1

    async def _batch(self, draw: Draw, number: int) -> Batch:
        groups = await self._sample(draw.prompts, number)
        return Batch(number=number, draw=draw, groups=groups, ready_at_s=self._clock())

    async def _first(self) -> Batch:
        """The oldest batch, or the oldest of those that are there."""
        first = self._begun[0]
        if self._staleness == "wait":
            await asyncio.wait([first])
        else:
            await asyncio.wait(self._begun, return_when=asyncio.FIRST_COMPLETED)
            first = next(task for task in self._begun if task.done())
        self._begun.remove(first)
        return first.result()

    def _judge(self, batch: Batch, ages: Sequence[int]) -> Batch:
        """The batch with its groups marked by age, less those that are dropped."""
        groups = []
        for group, age in zip(batch.groups, ages, strict=True):
            too_old = age > self._max_staleness
            if too_old and self._staleness != "withhold":
                self._dropped += 1
                continue
            self._withheld += too_old
            groups.append(replace(group, off_policy=group.off_policy or age > 0, withheld=too_old))
        return replace(batch, groups=groups)

    def _metrics(self, batch: Batch, ages: Sequence[int], started: float) -> dict[str, float]:
        now = self._clock()
        used = [age for age in ages if age <= self._max_staleness or self._staleness == "withhold"]
        return {
            "sample/staleness_mean": sum(used) / len(used),
            "sample/staleness_max": float(max(used)),
            "sample/dropped_stale_total": float(self._dropped),
            "sample/withheld_stale_total": float(self._withheld),
            "sample/time_in_queue_s": now - batch.ready_at_s,
            "sample/rollout_queue_size": float(sum(task.done() for task in self._begun)),
            "perf/rollout_wait_s": now - started,
        }


def _age(group: Group, version: Version) -> int:
    """Versions between the sampling of a group and its use now."""
    age = version.step - group.version.step
    if age < 0 or group.version.epoch != version.epoch:
        raise StalenessError(
            f"a batch can only be of weights that the learner has had, got groups of version {group.version.step} (epoch "
            f"{group.version.epoch}) for a learner at version {version.step} (epoch {version.epoch})"
        )
    return age
