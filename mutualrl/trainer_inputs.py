"""What `MutualTrainer` is given, as the tables of a run and the objects that no table can hold."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from agents.config import AgentConfig, HFPolicy, SandboxedReward, TinyPolicy
from agents.errors import TaskError
from agents.policies.policy import Loaded
from agents.rewards.rewards import Reference
from agents.tasks.config import Data, TaskConfig
from agents.tasks.data import Row, read_data, take_rows
from agents.tasks.load import TaskData, given_task
from mutualrl.errors import ConfigError
from mutualrl.load import Table
from mutualrl.trainer_config import agent_table, plain

PolicyInput = str | Path | HFPolicy | TinyPolicy | AgentConfig | PreTrainedModel | Loaded | Mapping[str, Any]
"""A path or hub name, a policy's or an agent's config, a model (with its tokenizer), or a table of an agent's settings."""

RewardInput = Reference | Sequence[Reference]

DatasetInput = str | Path | Iterable[Any] | TaskConfig
"""A path or hub name, rows (a datasets.Dataset, a list of dicts), or the config of a task."""

TRAIN_TASK = "train"
"""The name of a data set that was given without one."""

LONGEST_NAME = 32


def read_policies(
    policies: Mapping[str, PolicyInput] | Sequence[PolicyInput],
) -> tuple[dict[str, Table], dict[str, Loaded]]:
    """Agents' tables by name, and models that were given as objects. Policies without a name are called after their model."""
    named = policies.items() if isinstance(policies, Mapping) else ((None, each) for each in policies)
    tables: dict[str, Table] = {}
    models: dict[str, Loaded] = {}
    for given_name, policy in named:
        table, model = _read_policy(policy, where=f"policies[{given_name or len(tables)!r}]")
        name = given_name or _fresh_name(table, tables)
        if model is not None:
            if any(model[0] is other[0] for other in models.values()):
                raise ConfigError(f"policies: {name!r} is the same model object as an earlier policy; give each its own")
            models[name] = model
        tables[name] = table
    return tables, models


def _read_policy(given: PolicyInput, *, where: str) -> tuple[Table, Loaded | None]:
    if isinstance(given, AgentConfig):
        return plain(given), None
    settings = dict(given) if isinstance(given, Mapping) else {"policy": given}
    policy = settings.pop("policy", None)
    table = agent_table(settings, where=where)
    match policy:
        case str() | Path():
            table["policy"] = {"kind": "hf", "path": str(policy)}
        case HFPolicy() | TinyPolicy():
            table["policy"] = plain(policy)
        case {"kind": _} as settings_of_policy:
            table["policy"] = plain(settings_of_policy)
        case PreTrainedModel() | (PreTrainedModel(), _):
            model = _with_tokenizer(policy, where)
            table["policy"] = {"kind": "hf", "path": model[0].name_or_path or type(model[0]).__name__}
            table["dtype"] = str(model[0].dtype).removeprefix("torch.")
            return table, model
        case _:
            raise ConfigError(
                f"{where}: a policy is a path or hub name, a model or (model, tokenizer), a policy's config, or a table with "
                f"one of these as its `policy`, got {type(policy).__name__}"
            )
    return table, None


def _with_tokenizer(policy: PreTrainedModel | Loaded, where: str) -> Loaded:
    if isinstance(policy, tuple):
        return policy
    try:
        return policy, AutoTokenizer.from_pretrained(policy.name_or_path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where}: no tokenizer at the model's name_or_path={policy.name_or_path!r}; give (model, tokenizer): {error}"
        ) from None


def _fresh_name(table: Table, taken: Mapping[str, Table]) -> str:
    policy = table["policy"]
    source = Path(policy["path"]).name if "path" in policy else str(policy.get("arch", "tiny"))
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", source).strip("-_")[: LONGEST_NAME - 4] or "policy"
    names = (stem if number == 1 else f"{stem}-{number}" for number in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)


def read_rewards(
    rewards: RewardInput | Mapping[str, RewardInput], agents: Iterable[str]
) -> tuple[dict[str, list[Any]], dict[str, list[Reference]]]:
    """By agent: the rewards as its table names them, and as they were given."""
    agents = list(agents)
    by_agent = dict(rewards) if isinstance(rewards, Mapping) else dict.fromkeys(agents, rewards)
    if set(by_agent) != set(agents):
        raise ConfigError(
            f"reward_funcs must have one entry per policy ({', '.join(agents)}), got {', '.join(map(str, by_agent))}"
        )
    given: dict[str, list[Any]] = {
        name: list(each) if isinstance(each, list | tuple) else [each] for name, each in by_agent.items()
    }
    return {name: [_reward_name(each) for each in functions] for name, functions in given.items()}, given


def _reward_name(reward: Reference) -> Any:
    if isinstance(reward, str):
        return reward
    if isinstance(reward, SandboxedReward):
        return plain(reward)
    if not callable(reward) or isinstance(reward, PreTrainedModel):
        raise ConfigError(f"reward_funcs: a reward is a function, its name or a SandboxedReward, got {type(reward).__name__}")
    return import_string(reward)


def import_string(function: Callable[..., Any]) -> str:
    """`module:name` where that leads to the function, else what it is called: a name for people."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__qualname__)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError):
        found = None
    return f"{module}:{name}" if found is function else name


def read_datasets(
    train: DatasetInput | Sequence[TaskConfig] | Mapping[str, DatasetInput],
    evaluation: DatasetInput | Mapping[str, DatasetInput] | None,
) -> tuple[list[Table], dict[str, TaskData]]:
    """The run's tasks as tables, and those whose rows were given.

    A name of `evaluation` that `train` has not is a task that is only evaluated; without names it belongs to the one task of
    `train`.
    """
    if isinstance(train, TaskConfig):
        train = [train]
    if isinstance(train, list | tuple) and train and all(isinstance(each, TaskConfig) for each in train):
        train = {each.name: each for each in train}
    trained: Mapping[str, Any] = train if isinstance(train, Mapping) else {TRAIN_TASK: train}
    if evaluation is None:
        held_out: Mapping[str, Any] = {}
    elif isinstance(evaluation, Mapping):
        held_out = evaluation
    elif len(trained) == 1:
        held_out = {next(iter(trained)): evaluation}
    else:
        raise ConfigError(f"eval_dataset: give a dict of data sets by task; train_dataset has {', '.join(trained)}")
    tables, tasks = [], {}
    for name in dict.fromkeys([*trained, *held_out]):
        rows, kept = trained.get(name), held_out.get(name)
        if isinstance(rows, TaskConfig) and not isinstance(rows, Data) and kept is not None:
            raise ConfigError(f"eval_dataset: the task {name!r} holds out prompts of its own; give the data another name")
        if isinstance(rows, TaskConfig) and kept is None:
            tables.append(plain(rows) | {"name": name})
        elif isinstance(rows, str | Path) and kept is None:
            tables.append({"kind": "data", "name": name, "path": str(rows), "heldout": 0})
        else:
            tasks[name] = _given(name, rows, kept)
            path = f"(given to MutualTrainer) {_describe(kept if rows is None else rows)}"
            tables.append({"kind": "data", "name": name, "path": path, "heldout": len(tasks[name].heldout)})
    return tables, tasks


def _given(name: str, train: Any, heldout: Any) -> TaskData:
    try:
        return given_task(name, _rows(name, train), _rows(name, heldout))
    except (TaskError, ValueError) as error:
        raise ConfigError(f"data set {name!r}: {error}") from error


def _rows(name: str, given: Any) -> list[Row]:
    if isinstance(given, str | Path):
        given = Data(name=name, path=str(given))
    if isinstance(given, Data):
        return read_data(given)
    if given is None or (isinstance(given, Iterable) and not isinstance(given, Mapping)):
        return take_rows(given or [], Data(name=name, path=f"data set {name!r}"))
    raise ConfigError(f"data set {name!r}: it is a path, a datasets.Dataset, a list of dicts or a Data config, got {given!r}")


def _describe(given: Any) -> str:
    size = f", {len(given)} rows" if hasattr(given, "__len__") else ""
    return f"{type(given).__module__}.{type(given).__qualname__}{size}"
