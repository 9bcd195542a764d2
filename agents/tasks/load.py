"""From a task's settings to its prompts: `load_task`.

Every agent of a run loads the same tasks from the same settings and must end with the same prompt ids and the same split,
so everything here depends on (seed, settings) alone.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from agents.errors import TaskError
from agents.tasks import problems
from agents.tasks.config import Add, Data, Greatest, Multiply, ReasoningGym, Reverse, Sort, Subtract, SwapWords, TaskConfig
from agents.tasks.data import Row, read_data
from agents.tasks.gym import read_gym
from agents.types import Prompt
from exchange.types import Message, PromptId

MOST_PROBLEMS = 250_000
"""Of one generated task: every process of a run makes, holds and checks them all, about 1 kB and 0.1 ms each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """One task's prompts. No prompt id is in both lists; each list is in a shuffled order fixed by the seed."""

    name: str
    train: list[Prompt]
    heldout: list[Prompt]

    @property
    def fingerprint(self) -> str:
        """32 hex digits of the SHA-256 of both lists in their order: ids, messages and columns.

        Equal in every process that has the same prompts, and another where a column, the split or the order differs.
        Values that JSON does not know (images) count by their type alone.
        """
        digest = hashlib.sha256(self.name.encode())
        for prompts in (self.train, self.heldout):
            digest.update(b"\n--\n")
            for prompt in prompts:
                row = [
                    prompt.id,
                    prompt.conversational,
                    [[each.role, each.content] for each in prompt.messages],
                    prompt.columns,
                ]
                digest.update(msgspec.json.encode(row, enc_hook=_stand_in, order="deterministic") + b"\n")
        return digest.hexdigest()[:32]


def _stand_in(value: object) -> object:
    return (
        value.tolist() if isinstance(value, np.ndarray | np.generic) else f"{type(value).__module__}.{type(value).__qualname__}"
    )


def prompt_id(task: str, messages: tuple[Message, ...]) -> PromptId:
    """16 hex digits of the SHA-256 of task name and messages: equal for all agents, different for equal texts of two tasks."""
    canonical = msgspec.json.encode([task, [[message.role, message.content] for message in messages]])
    return PromptId(hashlib.sha256(canonical).hexdigest()[:16])


def load_task(config: TaskConfig, *, seed: int) -> TaskData:
    """Make or read the task's prompts and split them.

    Generated tasks hold their whole space when it has at most `limit` problems, else `limit` distinct ones; their answer is
    in `columns["answer"]`. Raises TaskError when fewer than `heldout` + 1 different prompts can be had, or when a generated
    task would hold more than MOST_PROBLEMS.
    """
    rng = random.Random(f"{seed}/{config.name}")
    prompts = SOURCES[type(config)](config, rng)
    if len(prompts) <= config.heldout:
        raise TaskError(
            f"task {config.name!r} has {len(prompts)} different prompts, too few to keep heldout={config.heldout} apart and "
            f"train on the rest; lower `heldout` below {len(prompts)} or enlarge the task"
        )
    rng.shuffle(prompts)
    return TaskData(name=config.name, train=prompts[config.heldout :], heldout=prompts[: config.heldout])


def given_task(name: str, train: Sequence[Row], heldout: Sequence[Row]) -> TaskData:
    """A task of rows that are at hand, both sets in their order. Either may be empty.

    A prompt that is in both is only held out.
    """
    kept = _distinct(name, heldout)
    ids = {prompt.id for prompt in kept}
    return TaskData(name=name, train=[prompt for prompt in _distinct(name, train) if prompt.id not in ids], heldout=kept)


def _generated(space_of: Callable[[Any], problems.Space]) -> Callable[[Any, random.Random], list[Prompt]]:
    def source(config: Any, rng: random.Random) -> list[Prompt]:
        space = space_of(config)
        count = min(space.size, config.limit)
        if count > MOST_PROBLEMS:
            raise TaskError(
                f"task {config.name!r} would hold {count} problems, the most is {MOST_PROBLEMS}; lower `limit`, got "
                f"limit={config.limit}"
            )
        template = config.template or space.template
        prompts = []
        for index in _indices(space.size, config.limit, rng):
            problem, answer = space.at(index)
            messages = (Message(role="user", content=template.replace("{x}", problem)),)
            prompts.append(
                Prompt(id=prompt_id(config.name, messages), task=config.name, messages=messages, columns={"answer": answer})
            )
        return prompts

    return source


def _indices(size: int, limit: int, rng: random.Random) -> list[int]:
    if size <= limit:
        return list(range(size))
    drawn: dict[int, None] = {}
    while len(drawn) < limit:  # not rng.sample(range(size)): that fails from 2**63 problems on
        drawn[rng.randrange(size)] = None
    return list(drawn)


def _from_data(config: Data, rng: random.Random) -> list[Prompt]:
    return _distinct(config.name, read_data(config))


def _from_gym(config: ReasoningGym, rng: random.Random) -> list[Prompt]:
    seed = rng.randrange(2**31) if config.seed is None else config.seed
    return _distinct(config.name, read_gym(config, seed=seed))


def _distinct(task: str, rows: Sequence[Row]) -> list[Prompt]:
    """Rows with equal prompts count once, the first one: a prompt id stands for one set of columns."""
    prompts: dict[PromptId, Prompt] = {}
    for row in rows:
        identity = prompt_id(task, row.messages)
        prompts.setdefault(
            identity,
            Prompt(
                id=identity,
                task=task,
                messages=row.messages,
                columns=row.columns,
                conversational=row.conversational,
            ),
        )
    return list(prompts.values())


SOURCES: Mapping[type, Callable[[Any, random.Random], list[Prompt]]] = {
    Reverse: _generated(problems.reverse),
    Sort: _generated(problems.sort),
    Add: _generated(problems.add),
    Subtract: _generated(problems.subtract),
    Multiply: _generated(problems.multiply),
    Greatest: _generated(problems.greatest),
    SwapWords: _generated(problems.swap_words),
    ReasoningGym: _from_gym,
    Data: _from_data,
}
