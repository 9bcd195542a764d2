"""What a run file can get wrong beyond types and ranges: names that point nowhere, agents that cannot learn, rewards.

Needs no torch and fetches nothing; what does is checked by each agent before its first step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from agents.errors import RewardError, TaskError
from agents.policies.config import HFPolicy
from agents.rewards.config import SandboxedReward
from agents.rewards.functions import BUILT_IN
from agents.rewards.rewards import find_signature
from agents.samplers.config import VLLM
from agents.sharing.config import PRP, Isolated
from agents.tasks.config import Data
from agents.tasks.load import load_task
from mutualrl.config import Run
from mutualrl.errors import ConfigError
from mutualrl.given import NOTHING, Given
from mutualrl.schema import nearest
from mutualrl.topology import routes, teachers
from mutualrl.trackers import missing_packages

_LOCAL_SUFFIXES = (".jsonl", ".json", ".parquet")
_AGENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_RESERVED = ("hub", "supervisor")


def validate(run: Run, given: Given = NOTHING) -> list[str]:
    """Warnings for what is allowed but probably not meant; ConfigError with all that makes the run impossible."""
    available, problems = _count_training_prompts(run, given)
    problems += [*_check_names(run), *_check_agents(run, available, given), *missing_packages(run)]
    try:
        routes(run)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(["the run cannot start:", *(f"  {problem}" for problem in problems)]))
    return list(_warnings(run))


def _check_names(run: Run) -> Iterator[str]:
    if not run.agents:
        yield "agents: a run needs at least one [agents.NAME] table, got none"
    if not run.tasks:
        yield "tasks: a run needs at least one [[tasks]] table, got none"
    seen: dict[str, int] = {}
    for index, task in enumerate(run.tasks):
        if task.name in seen:
            yield f"tasks.{index}.name: already the name of tasks.{seen[task.name]}, got name={task.name!r}"
        seen.setdefault(task.name, index)
    for name in run.agents:
        if not _AGENT_NAME.fullmatch(name):
            yield f"agents.{name}: a name is 1 to 32 letters, digits, '-' and '_', got {name!r}"
        elif name in _RESERVED:
            yield f"agents.{name}: the run has a role of this name already; choose another"


def _check_agents(run: Run, available: int | None, given: Given) -> Iterator[str]:
    """available: training prompts of all tasks together, None when not known before the agents read them."""
    tasks = [task.name for task in run.tasks]
    signature_of = cache(find_signature)  # a sandboxed function is found by a process of its own
    for name, agent in run.agents.items():
        for path, task_names in (("skills", agent.skills), ("warm_start.mix", tuple(agent.warm_start.mix))):
            for task_name in task_names:
                if task_name not in tasks:
                    yield f"agents.{name}.{path}: no task of this name, got {task_name!r}; {nearest(task_name, tasks)}"
        if available is not None and agent.prompts_per_step > available:
            yield (
                f"agents.{name}.prompts_per_step: more than the tasks' {available} training prompts, got "
                f"prompts_per_step={agent.prompts_per_step}"
            )
        if isinstance(agent.sampler, VLLM) and not Path(agent.sampler.python).is_file():
            yield (
                f"agents.{name}.sampler.python: no such file, got python={agent.sampler.python!r}; name an interpreter that "
                "has vLLM (`make venv-vllm` builds .venv-vllm)"
            )
        if run.mode == "lockstep" and agent.max_staleness and agent.staleness != "wait":
            yield (
                f"agents.{name}.staleness: in lockstep, whose numbers do not depend on timing, batches are taken in order, got "
                f'staleness={agent.staleness!r}; set "wait", or mode = "async"'
            )
        if agent.objective.sync_ref_model and isinstance(agent.policy, HFPolicy) and agent.policy.lora is not None:
            yield (
                f"agents.{name}.objective.sync_ref_model: with lora the reference is the base, which does not move; "
                "drop one of the two"
            )
        names: dict[str, str] = {}
        for reward in given.rewards.get(name, agent.rewards):
            reference = reward.sandbox if isinstance(reward, SandboxedReward) else str(reward)
            try:
                reward_name = signature_of(reward).name
                if reward_name in names:
                    yield f"agents.{name}.rewards: {reference!r} and {names[reward_name]!r} have the same name, {reward_name!r}"
                names.setdefault(reward_name, reference)
            except RewardError as error:
                hint = "" if ":" in reference else f"; {nearest(reference, BUILT_IN)}"
                yield f"agents.{name}.rewards: {error}{hint}"


def _count_training_prompts(run: Run, given: Given) -> tuple[int | None, list[str]]:
    """Training prompts of all tasks, None if a data set is not a local file; and what is wrong with the tasks."""
    total: int | None = 0
    problems = []
    for index, task in enumerate(run.tasks):
        if task.name in given.tasks:
            total = None if total is None else total + len(given.tasks[task.name].train)
            continue
        if isinstance(task, Data) and not Path(task.path).is_file() and not task.path.endswith(_LOCAL_SUFFIXES):
            total = None
            continue
        try:
            count = len(load_task(task, seed=run.seed).train)
        except TaskError as error:
            problems.append(f"tasks.{index}: {error}")
        else:
            total = None if total is None else total + count
    return (None if problems else total), problems


def _warnings(run: Run) -> Iterator[str]:
    for name, agent in run.agents.items():
        if isinstance(agent.sharing, Isolated) or teachers(run, name):
            continue
        if len(run.agents) == 1:
            yield f"{name} is alone: it runs as isolated"
        else:
            yield f"{name} is alone: no edge of the topology brings what its sharing rule needs; it runs as isolated"
    for name, agent in run.agents.items():
        if agent.sampling.top_p < 1 or agent.sampling.top_k > 0:
            yield (
                f"{name} samples from a cut support (top_p, top_k), but learns under the full one: "
                "ratios and log-probs of the two differ"
            )
        if isinstance(agent.sharing, PRP) and agent.sharing.denominator == "receiver" and agent.objective.num_iterations == 1:
            yield f'{name}: with denominator="receiver" and one iteration every peer ratio is 1 and the clip never acts'
    threads = sum(agent.threads * agent.num_processes for agent in run.agents.values())
    cores = os.cpu_count() or 1
    if threads > cores:
        yield f"the agents' threads add up to {threads}, but this machine has {cores} cores: steps will be slow"
