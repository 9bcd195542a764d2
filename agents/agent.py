"""One agent: the loop that samples, judges, publishes, gathers, shares and learns.

Who waits for whom, in one step:

    schedule ─> sample ─> take ─> reward ─> publish ─> gather ─> share ─> learn ─> sync ─> tell
                  │                 │          │          │                 │       │
               torch             reward    hub's ack   hub's answer;      torch     as
               thread, or the    thread    (credit)    a peer only in     thread    sample
               sampler's                               lockstep

With `max_staleness` > 0 what stands left of `take` runs that many batches ahead of the rest (agents/ahead.py): while a step
waits for rewards, hub and peers, the torch thread samples the next ones; a sampler in a process of its own samples also while
the step learns.

The event loop itself never computes: torch runs on one thread of its own, rewards on another or in processes of their own,
so that heartbeats go out whatever a step does. Before its first step an agent waits for its teachers to be there, with a
deadline. In async mode it never waits for a peer again. In lockstep it waits for every teacher to close the same step, with
a deadline, and the error names who did not.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from agents.ahead import Ahead, Batch
from agents.checkpoint import Resumable, point_at, save_part
from agents.config import AgentConfig
from agents.drawing import Drawing
from agents.dump import StepDump, write_dump
from agents.dynamic_sampling import fill
from agents.errors import NonFiniteError
from agents.evaluate import Draws, TaskScore, evaluate
from agents.journal import Journal
from agents.loop import Loop, Parts
from agents.metrics import completion_lines, group_metrics, row_metrics
from agents.peers import Gathered, PeerFeed
from agents.samplers.config import InProcess
from agents.sharing.config import SGT
from agents.sharing.rule import Shared
from agents.state import AgentState, pack_waiting, unpack_waiting
from agents.stopping import pause, unless_stopped
from agents.tasks.load import TaskData
from agents.trial import CoinTrial
from agents.types import Group, Prompt
from exchange.client import Client
from exchange.types import AgentName, PromptId, StepPrompts, Version

T = TypeVar("T")

logger = logging.getLogger("mutualrl.agent")

FINAL = "final"
"""What the part of an agent that made all its steps is also called."""


class Agent:
    """Runs `loop.steps` steps, or until told to stop. `run` may be called once."""

    def __init__(
        self,
        name: AgentName,
        config: AgentConfig,
        loop: Loop,
        parts: Parts,
        client: Client,
        *,
        teachers: Sequence[AgentName],
        started_at_s: float,
    ) -> None:
        self._name = name
        self._config = config
        self._loop = loop
        self._parts = parts
        self._client = client
        train = [prompt for task in parts.tasks for prompt in task.train]
        prompts = {prompt.id: prompt for prompt in train}
        self._feed = PeerFeed(
            client,
            parts.rule,
            teachers=teachers,
            prompts=prompts,
            lockstep=loop.mode == "lockstep",
            step_timeout_s=loop.step_timeout_s,
            seams=loop.seams,
        )
        self._journal = Journal(name, parts.sink, skills=config.skills, started_at_s=started_at_s, callback=parts.callback)
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="torch")
        # What is asked of the sampler is answered in order, so that every batch is of one version's weights.
        in_process = isinstance(config.sampler, InProcess)
        self._sampling = self._torch if in_process else ThreadPoolExecutor(1, thread_name_prefix="sampler")
        # Agents of one run must not share their random numbers, or equal policies would sample alike.
        self._seed = zlib.crc32(f"{loop.seed}/{name}".encode())
        rounds = range(1, config.dynamic_sampling_rounds + 1)
        self._sampling_seeds = [self._seed, *(zlib.crc32(f"{loop.seed}/{name}/{each}".encode()) for each in rounds)]
        self._trial = CoinTrial() if isinstance(config.sharing, SGT) and config.sharing.coin else None
        self._data = {task.name: task.fingerprint for task in parts.tasks}
        self._drawing = Drawing(train, self._feed, seed=loop.seed, schedule=loop.schedule, count=config.prompts_per_step)
        self._made = 0
        self._evaluated = -1
        if parts.resume is not None:
            self._restore(parts.resume, prompts)
        self._version = Version(client.epoch, self._made)
        self._sampled_by = self._version
        self._state = self._note()
        self._ahead = Ahead(
            self._drawing.next, self._sample, max_staleness=config.max_staleness, staleness=config.staleness, first=self._made
        )

    def _restore(self, state: AgentState, prompts: Mapping[PromptId, Prompt]) -> None:
        self._made, self._evaluated = state.step, state.evaluated
        self._drawing.restore(state.met)
        self._feed.restore(state.feed)
        self._parts.rule.recall(state.rule, unpack_waiting(state.waiting, prompts))
        self._journal.resume(state.lines, wall_s=state.wall_s)
        if self._trial is not None:
            self._trial.restore(state.trial, prompts)

    def _note(self) -> AgentState:
        """All that this agent is between two steps, but for weights and optimizer."""
        return AgentState(
            step=self._made,
            evaluated=self._evaluated,
            wall_s=self._journal.wall_s,
            met=sorted(self._drawing.met),
            lines=self._journal.lines(),
            data=self._data,
            waiting=pack_waiting(self._parts.rule.waiting),
            rule=self._parts.rule.memory(),
            trial={} if self._trial is None else self._trial.state(),
            feed=self._feed.state(),
        )

    async def run(self, stop: asyncio.Event) -> bool:
        """Train; returns whether all steps were made. `stop` ends the loop within the current step.

        Told to stop, or failing on the way (a lost hub, a reward that raises), it leaves a checkpoint of the steps made.
        """
        saved = False
        try:
            if await unless_stopped(stop, self._sync()) is None:
                return False
            await unless_stopped(stop, self._join())
            self._parts.callback.on_train_begin(self._name)
            await self._look_back(stop)
            while self._made < self._loop.steps and not stop.is_set():
                if await self._step(self._made, stop):
                    await self._look_back(stop)
            finished = self._made == self._loop.steps
            self._feed.hits.close()
            self._journal.metrics(self._made, self._feed.hits.take())
            if finished and self._evaluated < self._made:
                await self._evaluate(stop)
            await self._end_trial(stop)
            part = await self._checkpoint()
            saved = True
            if finished:
                point_at(self._parts.checkpoints, FINAL, part)
            self._parts.callback.on_train_end(self._name, self._made)
            return finished
        finally:
            await self._ahead.close()
            if not saved and self._made:
                await self._checkpoint()
            await asyncio.to_thread(self._parts.sampler.close)
            self._torch.shutdown(wait=False, cancel_futures=True)
            self._sampling.shutdown(wait=False, cancel_futures=True)
            self._parts.rewards.close()

    async def _join(self) -> None:
        """Say that this agent is there, and wait for its teachers to say so, so that the first to load is not alone."""
        here = StepPrompts(agent=self._name, step=self._made, version=self._version, prompt_ids=())
        await self._client.publish(here)
        absent = await self._feed.wait_for_teachers()
        if absent:
            logger.warning("%s starts without %s, which did not come in time", self._name, ", ".join(absent))

    async def _on_torch_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._torch, work)

    async def _sync(self) -> Mapping[str, float]:
        """Let the sampler draw from the weights as they are now, behind what it was asked before."""

        def sync() -> Mapping[str, float]:
            metrics = self._parts.sampler.update(version)
            self._sampled_by = version
            return metrics

        version = self._version
        return await asyncio.get_running_loop().run_in_executor(self._sampling, sync)

    async def _step(self, step: int, stop: asyncio.Event) -> bool:
        """One step; False when told to stop before it had learned."""
        started = time.perf_counter()
        # What waits for samples, for others or for rewards is given up at once when the run is told to stop; the step is
        # then void.
        taken = await unless_stopped(stop, self._ahead.take(self._version))
        if taken is None:
            return False
        batch, ages = taken
        self._drawing.use(batch.draw)
        sampled = time.perf_counter()
        met = await unless_stopped(stop, self._meet_peers(step, batch))
        if met is None:
            return False
        groups, gathered, shared = met
        if stop.is_set():
            return False
        waited = time.perf_counter() - sampled
        learned = await self._on_torch_thread(lambda: self._learn(step, shared, len(groups)))
        self._made = step + 1
        self._version = Version(self._version.epoch, self._made)
        synced = await self._sync()
        await pause(stop, self._config.min_step_s - (time.perf_counter() - started))
        metrics = {
            **group_metrics(groups),
            **ages,
            **gathered.metrics,
            **shared.counters,
            **learned,
            **synced,
            **row_metrics(shared.rows),
        }
        metrics |= self._feed.hits.take() | self._parts.receiver.take() | self._parts.rewards.take()
        metrics |= {
            "step_time": time.perf_counter() - started,
            "sample_time": sampled - started,
            "exchange_time": waited,
        }
        metrics["tokens_per_s"] = metrics["num_tokens"] / metrics["step_time"]
        self._journal.metrics(self._made, metrics)
        self._journal.rescues(self._made, shared)
        self._parts.callback.on_step_end(self._name, self._made, metrics)
        if self._trial is not None:
            self._trial.take(shared)
        # What is saved is what was noted here, however far into the next step the agent is told to stop.
        self._state = self._note()
        await self._client.progress(step=self._made, version=self._version)
        return True

    def _learn(self, step: int, shared: Shared, prompts: int) -> dict[str, float]:
        """The step's update, on the torch thread. Dumps the step where it is time to, or where its numbers end the run."""
        dump = StepDump(agent=self._name, step=step + 1, prompts=prompts, rows=shared.rows)
        try:
            learned = self._parts.learner.step(shared.rows, prompts=prompts)
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}; the rows of its last step are in {write_dump(self._parts.dumps, dump)}") from error
        if self._loop.dump_every and step % self._loop.dump_every == 0:
            write_dump(self._parts.dumps, replace(dump, metrics=learned))
        return learned

    async def _look_back(self, stop: asyncio.Event) -> None:
        """Evaluate and save when it is time to."""
        every, save_steps = self._loop.evaluate_every, self._loop.save_steps
        is_due = self._made == 0 or (every and self._made % every == 0)
        if is_due and self._evaluated < self._made:
            await self._evaluate(stop)
            self._state = self._note()
        if save_steps and self._made and self._made % save_steps == 0:
            await self._checkpoint()

    async def _meet_peers(self, step: int, batch: Batch) -> tuple[list[Group], Gathered, Shared]:
        """Judge the groups, publish them, gather what peers know, and turn both into training rows."""
        scored, sampling = await self._fill(batch)
        await self._publish(scored, batch.number)
        gathered = await self._feed.gather(step, [group.prompt.id for group in scored], self._parts.rule.wants(scored))
        rng = np.random.default_rng([self._seed, step])
        self._parts.receiver.check_sampled(scored, np.random.default_rng([self._seed, step, 1]))
        shared = await self._parts.rule.share(scored, gathered.experience, step=step, steps=self._loop.steps, rng=rng)
        return scored, gathered, replace(shared, counters={**shared.counters, **sampling})

    async def _fill(self, batch: Batch) -> tuple[list[Group], dict[str, float]]:
        """The batch's groups, judged, with those that dynamic sampling adds, and metrics of it."""

        async def more(round_number: int, groups: Sequence[Group]) -> list[Group]:
            prompts = self._drawing.more(batch.draw, [group.prompt for group in groups])
            return await self._score(await self._sample(prompts, batch.number, round_number)) if prompts else []

        return await fill(await self._score(batch.groups), more, rounds=self._config.dynamic_sampling_rounds)

    async def _sample(self, prompts: Sequence[Prompt], number: int, round_number: int = 0) -> list[Group]:
        sample, count, seed = self._parts.sampler.sample, self._config.num_generations, self._sampling_seeds[round_number]
        return await asyncio.get_running_loop().run_in_executor(
            self._sampling,
            lambda: sample(prompts, num_generations=count, step=number, version=self._sampled_by, seed=seed),
        )

    async def _score(self, groups: Sequence[Group]) -> list[Group]:
        prompts = [group.prompt for group in groups for _ in group.completions]
        completions = [each for group in groups for each in group.completions]
        self._parts.rewards.begin_step(groups[0].step, steps=self._loop.steps)
        scores = await self._parts.rewards.score(
            prompts, [each.text for each in completions], ids=[each.ids for each in completions]
        )
        scored = []
        start = 0
        for group in groups:
            rows = slice(start, start + len(group.completions))
            start = rows.stop
            by_function = {name: values[rows] for name, values in scores.by_function.items()}
            scored.append(group.scored(scores.total[rows], by_function))
        if scores.extra:
            about: dict[str, object] = {"agent": self._name, "step": groups[0].step + 1}
            for line in completion_lines(scored, scores.extra):
                self._parts.sink.completion(about | line)
        return scored

    async def _publish(self, groups: Sequence[Group], step: int) -> None:
        """Everything of the step, then the record that closes it."""
        async with asyncio.TaskGroup() as publishing:
            for group in groups:
                for record in self._parts.producer.records(group):
                    publishing.create_task(_done(self._client.publish(record)))
        await self._client.publish(
            StepPrompts(
                agent=self._name,
                step=step,
                version=self._version,
                prompt_ids=tuple(group.prompt.id for group in groups),
            )
        )

    async def _evaluate(self, stop: asyncio.Event) -> None:
        draws = self._loop.draws(self._name, step=self._made, version=self._sampled_by)
        scores = await self._scores(self._parts.tasks, stop, draws)
        if scores is not None:
            self._journal.evaluation(self._made, scores)
            self._evaluated = self._made

    async def _end_trial(self, stop: asyncio.Event) -> None:
        """What the prompts are worth now whose rescue was delivered, and those whose was not."""
        tasks = [] if self._trial is None else self._trial.tasks()
        scores = await self._scores(tasks, stop) if tasks else None
        if scores is not None and self._trial is not None:
            self._journal.trial(self._made, self._trial.lines(scores))

    async def _scores(
        self, tasks: Sequence[TaskData], stop: asyncio.Event, draws: Draws | None = None
    ) -> list[TaskScore] | None:
        """Results on the tasks' held-out prompts; None when told to stop meanwhile."""
        evaluating = evaluate(
            self._parts.sampler,
            tasks,
            self._parts.rewards,
            batch_size=self._loop.evaluation_batch_size,
            threshold=self._loop.success_threshold,
            executor=self._sampling,
            draws=draws,
        )
        return await unless_stopped(stop, evaluating)

    async def _checkpoint(self) -> Path:
        """Save the state last noted with the weights that belong to it; weights alone where an update did not end."""
        noted, parts = self._state, self._parts

        def save() -> Path:
            whole = parts.learner.steps == noted.step
            state = Resumable(learner=parts.learner.state(), agent=noted) if whole else None
            version = Version(self._version.epoch, noted.step)
            part = save_part(parts.policy, parts.checkpoints, step=noted.step, version=version, state=state)
            parts.on_saved(noted.step)
            return part

        part = await self._on_torch_thread(save)
        self._parts.callback.on_save(self._name, noted.step, part)
        return part


async def _done(work: Awaitable[object]) -> None:
    await work
