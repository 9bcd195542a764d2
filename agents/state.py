"""What an agent must know beside its weights and its optimizer to go on behind a step as if nothing had happened.

Everything that is drawn depends on (seed, step) alone, so that no generator has a state to be kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from agents.peers import FeedState
from agents.sharing.rule import Waiting
from agents.types import Prompt
from exchange.types import PromptId


class WaitingPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt that waits for peers' experience, by its id."""

    prompt_id: PromptId
    prompt_ids: list[int]
    since: int


class AgentState(msgspec.Struct, frozen=True, kw_only=True):
    """An agent between two steps. Written to a checkpoint; never sent.

    step: steps made. evaluated: the step behind which it was last evaluated, -1 before the first time. met: steps of the
    common schedule that it trained on. lines: how many it has written into each file of the run. data: fingerprint of each
    task's prompts. rule: what its sharing rule remembers beside the waiting prompts. trial: prompts of a rescue trial, and
    whether they were delivered.
    """

    step: int
    evaluated: int
    wall_s: float
    met: list[int]
    lines: dict[str, int]
    data: dict[str, str]
    waiting: list[WaitingPrompt]
    rule: Any
    trial: dict[PromptId, bool]
    feed: FeedState


def pack_waiting(waiting: Mapping[PromptId, Waiting]) -> list[WaitingPrompt]:
    """What a rule holds open, in its order."""
    return [WaitingPrompt(key, each.prompt_ids.tolist(), each.since) for key, each in waiting.items()]


def unpack_waiting(packed: list[WaitingPrompt], prompts: Mapping[PromptId, Prompt]) -> dict[PromptId, Waiting]:
    """The reverse of `pack_waiting`; KeyError for a prompt that is not among `prompts`."""
    return {
        each.prompt_id: Waiting(
            prompt=prompts[each.prompt_id], prompt_ids=np.array(each.prompt_ids, dtype=np.int32), since=each.since
        )
        for each in packed
    }
