"""`MutualConfig`: a run's settings as flat keyword arguments, under TRL's names where TRL has the thing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from agents.config import AgentConfig, Objective, Sampling
from mutualrl.config import Run
from mutualrl.errors import ConfigError
from mutualrl.load import Table, merge
from mutualrl.schema import nearest

TRL_NAMES: Mapping[str, tuple[str, ...]] = {
    "max_steps": ("steps",),
    "run_name": ("name",),
    "eval_steps": ("evaluation", "every"),
    "per_device_eval_batch_size": ("evaluation", "batch_size"),
}
"""What TRL calls some of a run's settings."""

_GIVEN_OTHERWISE = {"tasks": "train_dataset", "agents": "policies"}


_SECTIONS: Mapping[str, type[msgspec.Struct]] = {"sampling": Sampling, "objective": Objective}

_AGENT_PLACES: Mapping[str, tuple[str, ...]] = {
    **{name: (section, name) for section, struct in _SECTIONS.items() for name in struct.__struct_encode_fields__},
    **{name: (name,) for name in AgentConfig.__struct_encode_fields__},
}
"""Where in an agent's table a setting stands, by its flat name."""

_RUN_PLACES: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in Run.__struct_encode_fields__ if name not in _GIVEN_OTHERWISE},
    **TRL_NAMES,
}


class MutualConfig:
    """Settings of a run (mutualrl.config.Run) and, for all its policies, of an agent (agents.config.AgentConfig).

    Settings of `sampling` and `objective` may be given by their own name: MutualConfig(max_steps=100, temperature=0.9,
    beta=0.04, sharing="sgt"). A section may be given as a table or as its struct. Raises ConfigError with the nearest name for
    an unknown one; values and ranges are checked when a trainer is made of it.
    """

    def __init__(self, **settings: object) -> None:
        self.tables: Table = {"defaults": {}}
        for name, value in settings.items():
            if name in _RUN_PLACES:
                _put(self.tables, _RUN_PLACES[name], value)
            elif name in _AGENT_PLACES:
                _put(self.tables["defaults"], _AGENT_PLACES[name], value)
            elif name in _GIVEN_OTHERWISE:
                raise ConfigError(f"MutualConfig has no {name}: give MutualTrainer its `{_GIVEN_OTHERWISE[name]}`")
            else:
                hint = nearest(name, [*_RUN_PLACES, *_AGENT_PLACES])
                raise ConfigError(f"MutualConfig: unknown setting, got {name}={value!r}; {hint}")


def agent_table(settings: Mapping[str, object], *, where: str) -> Table:
    """An agent's table of settings by flat names; ConfigError, beginning with `where`, for an unknown name."""
    table: Table = {}
    for name, value in settings.items():
        if name not in _AGENT_PLACES:
            raise ConfigError(f"{where}: unknown setting of a policy, got {name}={value!r}; {nearest(name, _AGENT_PLACES)}")
        _put(table, _AGENT_PLACES[name], value)
    return table


def plain(value: object) -> Any:
    """Structs, tuples and paths as TOML would have them; anything else that TOML has not raises TypeError."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_path)


def _path(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no setting")


def _put(table: Table, place: tuple[str, ...], value: object) -> None:
    try:
        content = plain(value)
    except TypeError as error:
        raise ConfigError(f"{'.'.join(place)}: {error}, got {value!r}") from None
    if place == ("sharing",) and isinstance(content, str):
        content = {"rule": content}
    for key in reversed(place):
        content = {key: content}
    table.update(merge(table, content))
