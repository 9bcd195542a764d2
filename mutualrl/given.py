"""What a program hands to a run as objects, where a config can only name things."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agents.callbacks import Callback
from agents.rewards.rewards import Reference
from agents.tasks.load import TaskData

if TYPE_CHECKING:
    from agents.policies.policy import Loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Stands in for what the run's config says. A run file's processes are given nothing.

    tasks: by name. rewards, models: by agent; a model is trained in place. callback: told how the agents get on.
    """

    tasks: Mapping[str, TaskData] = field(default_factory=dict)
    rewards: Mapping[str, Sequence[Reference]] = field(default_factory=dict)
    models: Mapping[str, Loaded] = field(default_factory=dict)
    callback: Callback = field(default_factory=Callback)


NOTHING = Given()
