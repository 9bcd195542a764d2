"""The only place where an agent's config becomes objects: policy, sampler, rewards, rule, learner, exchange client."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path

import exchange
from agents.agent import Agent
from agents.checkpoint import load_state
from agents.config import AgentConfig
from agents.errors import CheckpointError, PolicyError, RewardError, TaskError
from agents.learner import Learner, LearnerSettings
from agents.learner_group import LearnerGroup
from agents.loop import Loop, Parts
from agents.objectives.choose import components
from agents.policies.policy import Policy, build_policy
from agents.publish import Producer
from agents.ranks import Ranks
from agents.receiver import PeerReceiver
from agents.rewards.rewards import Rewards
from agents.samplers.choose import build_sampler
from agents.samplers.sampler import Sampler
from agents.seam import Seam
from agents.sharing import make_rule
from agents.sharing.config import SGT
from agents.sink import JsonlSink
from agents.state import AgentState
from agents.stopping import unless_stopped
from agents.tasks.load import TaskData, load_task
from agents.warm_start import warm_start
from exchange.types import AgentName
from mutualrl.checkpoints import join, read_checkpoint
from mutualrl.config import Run
from mutualrl.errors import ConfigError
from mutualrl.given import NOTHING, Given
from mutualrl.leader import lead
from mutualrl.manifest import Manifest
from mutualrl.rundir import RunDir
from mutualrl.topology import published_kinds, routes, teachers

logger = logging.getLogger("mutualrl.agent")

DEFAULT_SUCCESS_THRESHOLD = 1.0


async def agent_main(path: Path, name: str, stop: asyncio.Event) -> None:
    """Be agent `name` of the run in this directory until its steps are made or `stop` is set.

    Nothing is spent before everything that can be checked is checked: a policy, task or reward that does not fit raises
    ConfigError.
    """
    run_dir = RunDir(path)
    run, manifest = run_dir.read_config(), run_dir.read_manifest()
    agent_name = AgentName(name)
    # Building and warming up a policy takes seconds, on a thread that the end of the process ends: told to stop, there is
    # nothing yet that would be worth saving.
    builder = ThreadPoolExecutor(1, thread_name_prefix="build")
    build = partial(build_parts, run, agent_name, run_dir, checkpoint=manifest.checkpoint)
    building = asyncio.get_running_loop().run_in_executor(builder, build)
    parts = await unless_stopped(stop, building)
    builder.shutdown(wait=False)
    if parts is not None:
        await take_part(run, manifest, agent_name, parts, stop)


async def take_part(run: Run, manifest: Manifest, name: AgentName, parts: Parts, stop: asyncio.Event) -> bool:
    """Train with these parts as agent `name` on the run's hub; returns whether all steps were made.

    Waits for the hub first. Cancelled, it leaves a checkpoint of the steps made, as where `stop` is set.
    """
    client = exchange.connect(
        manifest.endpoint, name=name, run_id=manifest.run_id, request_timeout_s=run.exchange.request_timeout_s
    )
    async with client as ex:
        agent = Agent(
            name,
            run.agents[name],
            loop_of(run, manifest.seams),
            parts,
            ex,
            teachers=[AgentName(teacher) for teacher in teachers(run, name)],
            started_at_s=datetime.fromisoformat(manifest.started).timestamp(),
        )
        finished = await agent.run(stop)
    logger.info("%s %s", name, "finished" if finished else "stopped early, with a checkpoint")
    return finished


def loop_of(run: Run, seams: Sequence[Seam] = ()) -> Loop:
    """What the run says about every agent's loop. seams: where it was taken up again."""
    return Loop(
        seed=run.seed,
        steps=run.steps,
        mode=run.mode,
        schedule=run.schedule,
        evaluate_every=run.evaluation.every,
        evaluation_batch_size=run.evaluation.batch_size,
        num_samples=run.evaluation.num_samples,
        pass_k=run.evaluation.pass_k,
        success_threshold=run.evaluation.threshold,
        save_steps=run.save_steps,
        dump_every=run.dump_every,
        step_timeout_s=run.step_timeout_s,
        seams=seams,
    )


def build_parts(run: Run, name: AgentName, run_dir: RunDir, *, checkpoint: int | None = None, given: Given = NOTHING) -> Parts:
    """Everything that agent `name` works with, checked, and warmed up or as in the run's checkpoint of this name.

    Raises ConfigError when a part cannot be had or the checkpoint is of other data.
    """
    part = None
    try:
        if checkpoint is not None:
            part = run_dir.checkpoints / read_checkpoint(run_dir.checkpoints, checkpoint).parts[name].path
        return _build_parts(run, name, run_dir, part, given)
    except (TaskError, RewardError, PolicyError, CheckpointError) as error:
        raise ConfigError(f"agents.{name}: {error}") from error


def _build_parts(run: Run, name: AgentName, run_dir: RunDir, part: Path | None, given: Given) -> Parts:
    config = run.agents[name]
    if config.num_processes > 1 and given is not NOTHING:
        raise PolicyError(
            f"num_processes={config.num_processes} needs agents in processes of their own, which see no objects of this one: "
            "use `mutualrl up` with a run file"
        )
    tasks = [given.tasks.get(task.name) or load_task(task, seed=run.seed) for task in run.tasks]
    functions = given.rewards.get(name, config.rewards)
    rewards = Rewards(functions, config.reward_weights, policy=name, on_error=config.reward_error)
    policy = build_policy(
        config.policy,
        seed=run.seed,
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
        loaded=given.models.get(name),
    )
    sampler = build_sampler(config, policy, log=run_dir.log(f"{name}.vllm"))
    preflight(tasks, rewards, sampler)
    if part is not None:
        policy.load(part)
    elif config.warm_start.steps:
        started = time.perf_counter()
        loss = warm_start(policy, config.warm_start, tasks, seed=run.seed)
        logger.info("warm start: loss %.4f after %.1f s", loss, time.perf_counter() - started)
    learner = start_learner(config, policy, run_dir, name)
    state = None if part is None else resume(part, learner, tasks)
    receiver = PeerReceiver(
        policy.tokenizer,
        rewards,
        max_completion_length=config.sampling.max_completion_length,
        config=config.translation,
    )
    return Parts(
        policy=policy,
        sampler=sampler,
        learner=learner,
        rewards=rewards,
        receiver=receiver,
        rule=make_rule(config.sharing, config.objective, receiver, salt=f"{run.seed}/{name}"),
        producer=Producer(
            agent=name,
            kinds=published_kinds(run, name),
            tokenizer=policy.tokenizer.fingerprint,
            reward_fingerprint=rewards.fingerprint,
            temperature=config.sampling.temperature,
            success_threshold=success_threshold(run, name),
        ),
        tasks=tasks,
        sink=JsonlSink(run_dir.path),
        checkpoints=run_dir.checkpoints / name,
        dumps=run_dir.dumps,
        callback=given.callback,
        resume=state,
        on_saved=partial(join, run_dir.checkpoints, run),
    )


def start_learner(config: AgentConfig, policy: Policy, run_dir: RunDir, name: AgentName) -> Learner | LearnerGroup:
    """The agent's learner, with the other processes that it has, if any."""
    if config.num_processes == 1:
        return build_learner(config, policy)
    return lead(run_dir, name, policy, size=config.num_processes, build=partial(build_learner, config))


def resume(part: Path, learner: Learner | LearnerGroup, tasks: Sequence[TaskData]) -> AgentState:
    """Put the learner into the state of a part, whose weights the policy has; returns the agent's.

    Raises CheckpointError when the tasks' data are not those that the agent trained on.
    """
    state = load_state(part)
    changed = [task.name for task in tasks if task.fingerprint != state.agent.data.get(task.name)]
    if changed:
        raise CheckpointError(
            f"the data of {', '.join(map(repr, changed))} are not those of the run so far: {part} was saved with others; "
            "restore them, or start a new run"
        )
    learner.restore(state.learner)
    return state.agent


def rebuild_learner(run: Run, name: str, part: Path | None) -> Learner:
    """An agent's learner with its policy as they were in a part, or before the first step; for replays.

    Raises AgentError when they cannot be had.
    """
    config = run.agents[name]
    tasks = [load_task(task, seed=run.seed) for task in run.tasks]
    policy = build_policy(config.policy, seed=run.seed, device=config.device, dtype=config.dtype, threads=config.threads)
    if part is not None:
        policy.load(part)
    elif config.warm_start.steps:
        warm_start(policy, config.warm_start, tasks, seed=run.seed)
    learner = build_learner(config, policy)
    if part is not None:
        learner.restore(load_state(part).learner)
    return learner


def preflight(tasks: Sequence[TaskData], rewards: Rewards, sampler: Sampler) -> None:
    """Raise before anything is spent when a prompt is too long, a text cannot be spelled or a reward's column is missing."""
    prompts = [prompt for task in tasks for prompt in (*task.train, *task.heldout)]
    rewards.check_columns(prompts)
    sampler.preflight(prompts)


def build_learner(config: AgentConfig, policy: Policy, ranks: Ranks | None = None) -> Learner:
    """The learner with the components of the agent's objective and sharing rule."""
    return Learner(
        policy.model,
        components(config.objective, config.sharing, max_completion_length=config.sampling.max_completion_length),
        LearnerSettings(
            temperature=config.sampling.temperature,
            pad_id=policy.tokenizer.pad_id,
            micro_batch_size=config.micro_batch_size,
            num_iterations=config.objective.num_iterations,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            ref_model_sync_steps=config.objective.ref_model_sync_steps if config.objective.sync_ref_model else None,
            ref_model_mixup_alpha=config.objective.ref_model_mixup_alpha,
        ),
        ranks,
    )


def success_threshold(run: Run, producer: str) -> float:
    """The lowest reward that a learner of `producer` counts as a success."""
    rules = [run.agents[route.learner].sharing for route in routes(run) if route.teacher == producer]
    thresholds = [rule.threshold for rule in rules if isinstance(rule, SGT)]
    return min(thresholds, default=DEFAULT_SUCCESS_THRESHOLD)
