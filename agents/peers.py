"""What an agent knows of its teachers: the steps they closed, their experience on its prompts, what to follow.

Nothing here waits for a peer in async mode. In lockstep `gather` waits until every teacher has closed the same step, then
looks only at what was published up to that step, in an order that does not depend on arrival.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from agents.errors import PeerTimeoutError
from agents.hits import Drawn, HitCounter
from agents.seam import Seam, is_abandoned
from agents.sharing.rule import PeerExperience, SharingRule
from agents.types import Prompt
from exchange.client import Client, Row
from exchange.types import START, AgentName, Cursor, PromptId, StepPrompts, Version

MAX_ANNOUNCEMENTS = 256
"""Closed steps remembered per teacher, to be followed; an agent further behind takes newer ones anyway."""

NOTHING_CLOSED = (0, -1)
"""(epoch, step) of a teacher that has closed no step; a teacher that came back counts from its new epoch."""

LONG_POLL_S = 5.0
"""How long one question to the hub may wait, so that a lost hub is noticed."""


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """A teacher's newest judged attempt at a prompt. at_s: on the feed's clock."""

    version: Version
    at_s: float


class Closed(msgspec.Struct, frozen=True, array_like=True):
    """A step that a teacher closed, and when, on the feed's clock."""

    agent: AgentName
    step: int
    version: Version
    prompt_ids: tuple[PromptId, ...]
    at_s: float


class FeedState(msgspec.Struct, frozen=True, kw_only=True):
    """What a feed knows between two steps. clock_s: the clock's reading then; pending: closed, but not taken note of yet."""

    clock_s: float
    steps_cursor: Cursor
    rows_cursor: Cursor
    attempts: dict[AgentName, dict[PromptId, Attempt]]
    newest: dict[AgentName, Version]
    pending: tuple[Closed, ...]
    unfollowed: tuple[Closed, ...]
    hits: tuple[Drawn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """A step's peer experience by prompt, and what it says about lag and traffic."""

    experience: Mapping[PromptId, Sequence[PeerExperience]]
    metrics: Mapping[str, float]


class PeerFeed:
    """One agent's view of its teachers. Not for concurrent use: one `gather` at a time."""

    def __init__(
        self,
        client: Client,
        rule: SharingRule,
        *,
        teachers: Collection[AgentName],
        prompts: Mapping[PromptId, Prompt],
        lockstep: bool,
        step_timeout_s: float,
        seams: Sequence[Seam] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """seams: where the run was taken up again, oldest first."""
        self._client = client
        self._rule = rule
        self._teachers = tuple(sorted(teachers))
        self._prompts = prompts
        self._lockstep = lockstep
        self._step_timeout_s = step_timeout_s
        self._seams = tuple(seams)
        # Ages are the clock's, and in lockstep nothing may depend on a clock.
        self._max_age_s = None if lockstep else rule.max_age_s
        self._clock = clock
        self._steps_cursor = START
        self._rows_cursor = START
        self._pending: dict[AgentName, deque[Closed]] = {peer: deque() for peer in self._teachers}
        self._attempts: dict[AgentName, dict[PromptId, Attempt]] = {peer: {} for peer in self._teachers}
        self._closed: dict[AgentName, tuple[int, int]] = dict.fromkeys(self._teachers, NOTHING_CLOSED)
        self._seen: set[AgentName] = set()
        self._newest: dict[AgentName, Version] = {}
        self._unfollowed: deque[Closed] = deque(maxlen=MAX_ANNOUNCEMENTS)
        self.hits = HitCounter(self._teachers, window=rule.window)

    def state(self) -> FeedState:
        """All that must be kept to go on behind this step; to be called between two steps."""
        return FeedState(
            clock_s=self._clock(),
            steps_cursor=self._steps_cursor,
            rows_cursor=self._rows_cursor,
            attempts={peer: dict(attempts) for peer, attempts in self._attempts.items()},
            newest=dict(self._newest),
            pending=tuple(closed for pending in self._pending.values() for closed in pending),
            unfollowed=tuple(self._unfollowed),
            hits=self.hits.state(),
        )

    def restore(self, state: FeedState) -> None:
        """Go on from what `state` gave, behind the newest seam. Ages count on as if no time had passed."""
        earlier_s = self._clock() - state.clock_s
        self._steps_cursor, self._rows_cursor = state.steps_cursor, state.rows_cursor
        for peer, attempts in state.attempts.items():
            self._attempts[peer] = {key: Attempt(each.version, each.at_s + earlier_s) for key, each in attempts.items()}
        self._newest = dict(state.newest)
        self._unfollowed.extend(state.unfollowed)
        for closed in state.pending:
            if not any(seam.abandons(seam.cursor, closed.agent, closed.step) for seam in self._seams[-1:]):
                self._remember(msgspec.structs.replace(closed, at_s=closed.at_s + earlier_s))
        self.hits.restore(state.hits)

    async def gather(self, step: int, prompts: Collection[PromptId], wanted: Collection[PromptId]) -> Gathered:
        """Each teacher's newest experience on the wanted ones of this step's prompts, and on those that the rule holds open.

        Waits for nobody in async mode. In lockstep, waits until every teacher closed `step`; PeerTimeoutError names those
        that did not within `step_timeout_s`. Call it once per step; cancelled, the step cannot be gathered again.
        """
        self.hits.draw(step, prompts)
        await self._tail()
        if self._lockstep:
            await self._wait_for_step(step)
        self._absorb(step)
        rows = await self._rows(step, wanted)
        for peer in self._teachers:
            self.hits.meet(peer, [key for key, attempt in self._attempts[peer].items() if self._usable(peer, attempt)])
        self.hits.close(step)
        experience: defaultdict[PromptId, list[PeerExperience]] = defaultdict(list)
        lags = []
        for row in rows:
            lag = self._lag(row.experience.agent, row.experience.version)
            if isinstance(row.experience, PeerExperience) and self._within_lag(lag):
                experience[row.experience.prompt_id].append(row.experience)
                lags.append(lag)
        metrics = {"peer/rows": float(len(lags))}
        known = [lag for lag in lags if lag is not None]
        if known:
            metrics |= {"peer/staleness_mean": sum(known) / len(known), "peer/staleness_max": float(max(known))}
        return Gathered(experience=experience, metrics=metrics)

    def follow(self, met: set[int], count: int) -> list[Prompt]:
        """Up to `count` known prompts of the newest steps that teachers closed and this agent has not met.

        met: steps of the common schedule that this agent trained on, by itself or by following; those followed now are
        added. Only an agent that is behind follows: a teacher must have closed a step beyond the agent's own next one.
        """
        own_next = next_step(met)
        ahead = [closed for closed in self._unfollowed if closed.step > own_next and closed.step not in met]
        chosen: dict[PromptId, Prompt] = {}
        for closed in sorted(ahead, key=lambda closed: (closed.version.epoch, closed.step, closed.agent), reverse=True):
            if len(chosen) >= count:
                break
            self._unfollowed.remove(closed)
            met.add(closed.step)
            for key in closed.prompt_ids:
                if key in self._prompts and len(chosen) < count:
                    chosen[key] = self._prompts[key]
        return list(chosen.values())

    async def wait_for_teachers(self) -> list[AgentName]:
        """Wait until every teacher has published something, at most `step_timeout_s`; returns those that have not."""
        deadline = self._clock() + self._step_timeout_s
        while absent := [peer for peer in self._teachers if peer not in self._seen]:
            left = deadline - self._clock()
            if left <= 0:
                return absent
            await self._poll(absent, left)
        return []

    async def refresh(self) -> None:
        """Learn of newly closed steps, for `follow`; waits for nobody."""
        await self._tail()
        if not self._lockstep:
            self._absorb(None)

    async def _tail(self) -> None:
        """Read newly closed steps from the exchange; waits for nobody."""
        more = bool(self._teachers)
        while more:
            got = await self._client.gather(kinds={"prompts"}, agents=set(self._teachers), after=self._steps_cursor)
            for row in got.rows:
                if not isinstance(row.experience, StepPrompts) or self._is_abandoned(row):
                    continue
                closed = row.experience
                # One that was there before the run was taken up again says nothing of who is there now.
                if all(row.cursor > seam.cursor for seam in self._seams):
                    self._seen.add(closed.agent)
                if closed.prompt_ids:
                    at_s = self._clock() - row.age_s
                    self._remember(Closed(closed.agent, closed.step, closed.version, closed.prompt_ids, at_s))
            self._steps_cursor, more = got.cursor, got.more
            if not self._lockstep:
                self._newest |= got.newest

    def _remember(self, closed: Closed) -> None:
        self._pending[closed.agent].append(closed)
        self._closed[closed.agent] = max(self._closed[closed.agent], (closed.version.epoch, closed.step))

    def _is_abandoned(self, row: Row) -> bool:
        return is_abandoned(self._seams, row.cursor, row.experience.agent, row.experience.step)

    async def _wait_for_step(self, step: int) -> None:
        deadline = self._clock() + self._step_timeout_s
        while missing := [peer for peer in self._teachers if self._closed[peer][1] < step]:
            left = deadline - self._clock()
            if left <= 0:
                raise PeerTimeoutError(
                    f"waited {self._step_timeout_s:g} s in step {step} for {', '.join(missing)} to close it "
                    f"(last closed: {', '.join(f'{peer} {self._closed[peer][1]}' for peer in missing)}); "
                    "look at their logs, or raise step_timeout_s"
                )
            await self._poll(missing, left)

    async def _poll(self, peers: Collection[AgentName], seconds: float) -> None:
        """Wait for one of these peers to close a step, for some seconds at most, and take note."""
        await self._client.gather(
            kinds={"prompts"},
            agents=set(peers),
            after=self._steps_cursor,
            min_count=1,
            deadline_s=min(seconds, LONG_POLL_S),
        )
        await self._tail()

    def _absorb(self, step: int | None) -> None:
        """Take note of closed steps: all of them, in lockstep only those up to `step`."""
        for peer, pending in self._pending.items():
            while pending and (not self._lockstep or (step is not None and pending[0].step <= step)):
                closed = pending.popleft()
                self._unfollowed.append(closed)
                if self._lockstep:
                    self._newest[peer] = closed.version
                for key in closed.prompt_ids:
                    if key in self._prompts:
                        self._attempts[peer][key] = Attempt(closed.version, closed.at_s)

    async def _rows(self, step: int, wanted: Collection[PromptId]) -> list[Row]:
        if not self._rule.kinds or not self._teachers:
            return []
        rows: list[Row] = []
        reached: list[Cursor] = []
        waiting = sorted(set(self._rule.waiting) - set(wanted))
        # In lockstep a row may be passed over as too new now and wanted in a later step, so it is read from the start.
        since = START if self._lockstep else self._rows_cursor
        # The open ones first: what arrives between the two questions is then asked for again rather than passed over.
        for prompts, after in ((waiting, since), (sorted(set(wanted)), START)):
            if prompts:
                found, cursor = await self._query(prompts, after, step)
                rows += found
                reached.append(cursor)
        self._rows_cursor = min(reached, default=self._rows_cursor)
        kept = (row for row in rows if not self._is_abandoned(row))
        return sorted(kept, key=lambda row: (row.experience.agent, row.experience.step, row.cursor))

    async def _query(self, prompts: Sequence[PromptId], after: Cursor, step: int) -> tuple[list[Row], Cursor]:
        rows: list[Row] = []
        more = True
        while more:
            got = await self._client.gather(
                kinds=set(self._rule.kinds),
                prompt_ids=list(prompts),
                agents=set(self._teachers),
                after=after,
                max_step=step if self._lockstep else None,
                max_age_s=self._max_age_s,
                max_lag=None if self._lockstep else self._rule.max_lag,
                latest_only=self._rule.latest_only,
            )
            rows += got.rows
            after, more = got.cursor, got.more
            if not self._lockstep:
                self._newest |= got.newest
        return rows, after

    def _lag(self, peer: AgentName, version: Version) -> int | None:
        """Versions behind the peer's newest; None for one of an earlier epoch, before the peer came back with nothing.

        A peer of a run that was taken up again came back with its checkpoint, and counts on from there.
        """
        newest = self._newest.get(peer, version)
        comparable = newest.epoch == version.epoch or self._seams
        return max(newest.step - version.step, 0) if comparable else None

    def _within_lag(self, lag: int | None) -> bool:
        return self._rule.max_lag is None or (lag is not None and lag <= self._rule.max_lag)

    def _usable(self, peer: AgentName, attempt: Attempt) -> bool:
        fresh = self._max_age_s is None or self._clock() - attempt.at_s <= self._max_age_s
        return fresh and self._within_lag(self._lag(peer, attempt.version))


def next_step(met: Collection[int]) -> int:
    """The first step of the common schedule that is not among the met ones."""
    return next(step for step in itertools.count() if step not in met)
