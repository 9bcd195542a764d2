"""Prompts, completions and groups: what travels inside an agent.

Shape legend: P prompts · G completions of one prompt · T tokens of one completion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from exchange.types import Message, PromptId, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem. id: hash of task and messages, equal for all agents. columns: what reward functions get by name.

    conversational: the data gave messages, not text, and reward functions get messages back (TRL's convention).
    """

    id: PromptId
    task: str
    messages: tuple[Message, ...]
    columns: Mapping[str, object]
    conversational: bool = False

    @property
    def text(self) -> str:
        """The content of all messages, one per line; for people to read, never for a model."""
        return "\n".join(message.content for message in self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled completion.

    ids [T]: as sampled, the end-of-sequence token included where it was sampled; never re-encoded. logprobs [T]: natural
    log, under the sampling distribution. ends [T]: byte offset in `text` behind each token (zero-width for end tokens).
    finished: ended by an end-of-sequence token or a stop string, not by the length limit. text: UTF-8 bytes of the content
    tokens (may end within a character when not finished).
    """

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ends: npt.NDArray[np.int32]
    text: bytes
    finished: bool
    has_eos: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All completions of one prompt in one step. prompt_ids [Tp]: the policy's own rendering of the prompt.

    rewards [G]: float32, NaN where every reward function abstained; None before scoring.
    """

    prompt: Prompt
    prompt_ids: npt.NDArray[np.int32]
    completions: tuple[Completion, ...]
    step: int
    version: Version
    rewards: npt.NDArray[np.float32] | None = None

    def scored(self, rewards: npt.NDArray[np.float32]) -> Group:
        """The same group with its rewards [G]."""
        if len(rewards) != len(self.completions):
            raise ValueError(f"`rewards` must have one entry per completion ({len(self.completions)}), got {len(rewards)}")
        return replace(self, rewards=rewards)
