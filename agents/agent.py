"""One agent: the loop that samples, judges, publishes, gathers, shares and learns.

Who waits for whom, in one step:

    schedule ─> sample ─> reward ─> publish ─> gather ─> share ─> learn ─> sync ─> tell
                  │         │          │          │                 │       │
               torch     reward    hub's ack   hub's answer;      torch thread;
               thread;   thread    (credit)    a peer only in     the sampler's
               sampler                         lockstep           process, if any

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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from agents.checkpoint import save_checkpoint
from agents.config import AgentConfig
from agents.evaluate import TaskScore, evaluate
from agents.learner import Learner
from agents.metrics import completion_lines, group_metrics, rescue_line
from agents.peers import Gathered, PeerFeed, next_step
from agents.policies.policy import Policy
from agents.publish import Producer
from agents.receiver import PeerReceiver
from agents.rewards.rewards import Rewards
from agents.rows import Stream
from agents.samplers.sampler import Sampler
from agents.sharing.config import SGT
from agents.sharing.rule import Shared, SharingRule
from agents.sink import JsonlSink
from agents.stopping import pause, unless_stopped
from agents.tasks.load import TaskData
from agents.tasks.schedule import draw
from agents.trial import CoinTrial
from agents.types import Group, Prompt
from exchange.client import Client
from exchange.types import AgentName, StepPrompts, Version

T = TypeVar("T")

logger = logging.getLogger("mutualrl.agent")

MAX_RESCUES_LOGGED = 200
"""Rescues written for the report, per agent; the counters count all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What a run says about the loop of each of its agents."""

    seed: int
    steps: int
    mode: Literal["async", "lockstep"]
    schedule: Literal["seed", "follow"]
    evaluate_every: int
    evaluation_batch_size: int
    success_threshold: float
    checkpoint_every: int
    step_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that an agent works with, made by whoever knows the config."""

    policy: Policy
    sampler: Sampler
    learner: Learner
    rewards: Rewards
    receiver: PeerReceiver
    rule: SharingRule
    producer: Producer
    tasks: Sequence[TaskData]
    sink: JsonlSink
    checkpoints: Path


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
        self._train = [prompt for task in parts.tasks for prompt in task.train]
        self._feed = PeerFeed(
            client,
            parts.rule,
            teachers=teachers,
            prompts={prompt.id: prompt for prompt in self._train},
            lockstep=loop.mode == "lockstep",
            step_timeout_s=loop.step_timeout_s,
        )
        self._started_at_s = started_at_s
        self._version = Version(client.epoch, 0)
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="torch")
        # Agents of one run must not share their random numbers, or equal policies would sample alike.
        self._seed = zlib.crc32(f"{loop.seed}/{name}".encode())
        self._rescues_logged = 0
        self._trial = CoinTrial() if isinstance(config.sharing, SGT) and config.sharing.coin else None
        self._met: set[int] = set()

    async def run(self, stop: asyncio.Event) -> bool:
        """Train; returns whether all steps were made. `stop` ends the loop within the current step.

        Told to stop, or failing on the way (a lost hub, a reward that raises), it leaves a checkpoint of the steps made.
        """
        step = 0
        saved = False
        try:
            if await unless_stopped(stop, self._sync()) is None:
                return False
            await unless_stopped(stop, self._join())
            await self._evaluate(0, stop)
            while step < self._loop.steps and not stop.is_set():
                if await self._step(step, stop):
                    step += 1
                    await self._look_back(step, stop)
            finished = step == self._loop.steps
            self._feed.hits.close()
            self._log(step, self._feed.hits.take())
            if finished and (not self._loop.evaluate_every or step % self._loop.evaluate_every):
                await self._evaluate(step, stop)
            await self._end_trial(step, stop)
            await self._checkpoint("final" if finished else f"step-{step:06d}", step)
            saved = True
            return finished
        finally:
            if not saved and step:
                await self._checkpoint(f"step-{step:06d}", step)
            await asyncio.to_thread(self._parts.sampler.close)
            self._torch.shutdown(wait=False, cancel_futures=True)
            self._parts.rewards.close()

    async def _join(self) -> None:
        """Say that this agent is there, and wait for its teachers to say so, so that the first to load is not alone."""
        here = StepPrompts(agent=self._name, step=0, version=self._version, prompt_ids=())
        await self._client.publish(here)
        absent = await self._feed.wait_for_teachers()
        if absent:
            logger.warning("%s starts without %s, which did not come in time", self._name, ", ".join(absent))

    async def _on_torch_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._torch, work)

    async def _sync(self) -> Mapping[str, float]:
        """Let the sampler draw from the weights as they are now."""
        return await self._on_torch_thread(lambda: self._parts.sampler.update(self._version))

    async def _step(self, step: int, stop: asyncio.Event) -> bool:
        """One step; False when told to stop before it had learned."""
        started = time.perf_counter()
        prompts = await self._draw()
        groups = await self._sample(prompts, step)
        sampled = time.perf_counter()
        # What waits for others or for rewards is given up at once when the run is told to stop; the step is then void.
        met = await unless_stopped(stop, self._meet_peers(step, groups))
        if met is None:
            return False
        groups, gathered, shared = met
        if stop.is_set():
            return False
        waited = time.perf_counter() - sampled
        learned = await self._on_torch_thread(lambda: self._parts.learner.step(shared.rows, prompts=len(prompts)))
        self._version = Version(self._version.epoch, self._version.step + 1)
        synced = await self._sync()
        await self._client.progress(step=step + 1, version=self._version)
        await pause(stop, self._config.min_step_s - (time.perf_counter() - started))
        metrics = {**group_metrics(groups), **gathered.metrics, **shared.counters, **learned, **synced}
        metrics |= self._streams(shared)
        metrics |= self._feed.hits.take() | self._parts.receiver.take() | self._parts.rewards.take()
        metrics |= {
            "step_time": time.perf_counter() - started,
            "sample_time": sampled - started,
            "exchange_time": waited,
        }
        metrics["tokens_per_s"] = metrics["num_tokens"] / metrics["step_time"]
        self._log(step + 1, metrics)
        self._log_rescues(step + 1, shared)
        if self._trial is not None:
            self._trial.take(shared)
        return True

    async def _look_back(self, step: int, stop: asyncio.Event) -> None:
        """Evaluate and save when it is time to, after `step` steps."""
        if self._loop.evaluate_every and step % self._loop.evaluate_every == 0:
            await self._evaluate(step, stop)
        if self._loop.checkpoint_every and step % self._loop.checkpoint_every == 0:
            await self._checkpoint(f"step-{step:06d}", step)

    async def _meet_peers(self, step: int, groups: Sequence[Group]) -> tuple[list[Group], Gathered, Shared]:
        """Judge the groups, publish them, gather what peers know, and turn both into training rows."""
        scored = await self._score(groups)
        await self._publish(scored, step)
        gathered = await self._feed.gather(step, [group.prompt.id for group in scored], self._parts.rule.wants(scored))
        rng = np.random.default_rng([self._seed, step])
        self._parts.receiver.check_sampled(scored, np.random.default_rng([self._seed, step, 1]))
        shared = await self._parts.rule.share(scored, gathered.experience, step=step, steps=self._loop.steps, rng=rng)
        return scored, gathered, shared

    async def _draw(self) -> list[Prompt]:
        count = self._config.prompts_per_step
        chosen: list[Prompt] = []
        if self._loop.schedule == "follow":
            await self._feed.refresh()
            chosen = self._feed.follow(self._met, count)
        if len(chosen) == count:
            return chosen
        have = {prompt.id for prompt in chosen}
        own = next_step(self._met)
        self._met.add(own)
        drawn = draw(self._train, seed=self._loop.seed, step=own, count=count)
        return (chosen + [prompt for prompt in drawn if prompt.id not in have])[:count]

    async def _sample(self, prompts: Sequence[Prompt], step: int) -> list[Group]:
        return await self._on_torch_thread(
            lambda: self._parts.sampler.sample(
                prompts,
                num_generations=self._config.num_generations,
                step=step,
                version=self._version,
                seed=self._seed,
            )
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

    async def _evaluate(self, step: int, stop: asyncio.Event) -> None:
        scores = await self._scores(self._parts.tasks, stop)
        if scores is None:
            return
        self._log(step, {f"eval/{score.task}/accuracy": score.accuracy for score in scores})
        for score in scores:
            self._parts.sink.evaluation(self._evaluation_line(step, score))

    async def _end_trial(self, step: int, stop: asyncio.Event) -> None:
        """What the prompts are worth now whose rescue was delivered, and those whose was not."""
        tasks = [] if self._trial is None else self._trial.tasks()
        scores = await self._scores(tasks, stop) if tasks else None
        if scores is None or self._trial is None:
            return
        for line in self._trial.lines(scores):
            self._parts.sink.trial({"agent": self._name, "step": step} | line)

    async def _scores(self, tasks: Sequence[TaskData], stop: asyncio.Event) -> list[TaskScore] | None:
        """Greedy accuracy on the tasks' held-out prompts; None when told to stop meanwhile."""
        evaluating = evaluate(
            self._parts.sampler,
            tasks,
            self._parts.rewards,
            batch_size=self._loop.evaluation_batch_size,
            threshold=self._loop.success_threshold,
            executor=self._torch,
        )
        return await unless_stopped(stop, evaluating)

    def _evaluation_line(self, step: int, score: TaskScore) -> dict[str, object]:
        return {
            "agent": self._name,
            "step": step,
            "wall_s": self._wall_s(),
            "task": score.task,
            "own_skill": score.task in self._config.skills,
            "accuracy": score.accuracy,
            "correct": [int(each) for each in score.correct],
            "prompt_ids": list(score.prompt_ids),
            "mean_length": score.mean_length,
            "eos_rate": score.eos_rate,
        }

    async def _checkpoint(self, name: str, step: int) -> None:
        await self._on_torch_thread(
            lambda: save_checkpoint(self._parts.policy, self._parts.checkpoints, name=name, step=step, version=self._version)
        )

    def _streams(self, shared: Shared) -> dict[str, float]:
        counts = {stream: sum(row.stream is stream for row in shared.rows) for stream in Stream}
        total = max(len(shared.rows), 1)
        return {f"rows/{stream}": float(count) for stream, count in counts.items()} | {
            "peer/share": (total - counts[Stream.OWN]) / total if shared.rows else 0.0
        }

    def _wall_s(self) -> float:
        return round(time.time() - self._started_at_s, 3)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not metrics:
            return
        line: dict[str, object] = {"agent": self._name, "step": step, "wall_s": self._wall_s()}
        line |= {f"{self._name}/{name}": round(value, 6) for name, value in metrics.items()}
        self._parts.sink.metrics(line)

    def _log_rescues(self, step: int, shared: Shared) -> None:
        for rescue in shared.rescues:
            if self._rescues_logged < MAX_RESCUES_LOGGED:
                self._rescues_logged += 1
                self._parts.sink.rescue({"agent": self._name, "step": step} | rescue_line(rescue))


async def _done(work: Awaitable[object]) -> None:
    await work
