"""What a run file can get wrong beyond types and ranges: names that point nowhere, agents that cannot learn, rewards.

Needs neither torch nor a data set; what does need them is checked by each agent before its first step.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator

from agents.config import AgentConfig
from agents.sharing.config import Isolated
from agents.tasks.config import Reverse, TaskConfig
from mutualrl.config import Run
from mutualrl.errors import ConfigError
from mutualrl.schema import nearest
from mutualrl.topology import routes, teachers

BUILT_IN_REWARDS = ("exact_match", "contains_answer")

_AGENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_RESERVED = ("hub", "supervisor")


def validate(run: Run) -> list[str]:
    """Warnings for what is allowed but probably not meant; ConfigError with all that makes the run impossible."""
    problems = [*_check_names(run), *_check_agents(run)]
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


def _check_agents(run: Run) -> Iterator[str]:
    tasks = [task.name for task in run.tasks]
    sizes = [_training_prompts(task) for task in run.tasks]
    available = None if None in sizes else sum(size for size in sizes if size is not None)
    for index, (task, size) in enumerate(zip(run.tasks, sizes, strict=True)):
        if size is not None and size < 1:
            yield (
                f"tasks.{index}.heldout: leaves no prompt to train on, got heldout={task.heldout} of "
                f"{size + task.heldout} problems"
            )
    for name, agent in run.agents.items():
        for path, task_names in (("skills", agent.skills), ("warm_start.mix", tuple(agent.warm_start.mix))):
            for task_name in task_names:
                if task_name not in tasks:
                    yield f"agents.{name}.{path}: no task of this name, got {task_name!r}; {nearest(task_name, tasks)}"
        if available is not None and 1 <= available < agent.prompts_per_step:
            yield (
                f"agents.{name}.prompts_per_step: more than the tasks' {available} training prompts, got "
                f"prompts_per_step={agent.prompts_per_step}"
            )
        yield from _check_rewards(name, agent)


def _check_rewards(name: str, agent: AgentConfig) -> Iterator[str]:
    for reward in agent.rewards:
        module, colon, function = reward.partition(":")
        if not colon:
            if reward not in BUILT_IN_REWARDS:
                yield (
                    f"agents.{name}.rewards: unknown reward, got {reward!r}; {nearest(reward, BUILT_IN_REWARDS)} "
                    "(or package.module:function)"
                )
        elif not module or not function.isidentifier():
            yield f"agents.{name}.rewards: an import string is package.module:function, got {reward!r}"
        elif not _importable(module):
            yield f"agents.{name}.rewards: no module {module!r} on the import path, got {reward!r}"


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _training_prompts(task: TaskConfig) -> int | None:
    """How many prompts a letter task leaves for training; None for tasks whose size is known only once built."""
    if not isinstance(task, Reverse):
        return None
    problems: int = len(set(task.alphabet)) ** task.length
    return min(problems, task.limit) - task.heldout


def _warnings(run: Run) -> Iterator[str]:
    for name, agent in run.agents.items():
        if isinstance(agent.sharing, Isolated) or teachers(run, name):
            continue
        if len(run.agents) == 1:
            yield f"{name} is alone: it runs as isolated"
        else:
            yield f"{name} is alone: no edge of the topology brings what its sharing rule needs; it runs as isolated"
    threads = sum(agent.threads for agent in run.agents.values())
    cores = os.cpu_count() or 1
    if threads > cores:
        yield f"the agents' threads add up to {threads}, but this machine has {cores} cores: steps will be slow"
