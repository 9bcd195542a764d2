"""Prompts, completions and groups: what travels inside an agent.

Shape legend: P prompts · G completions of one prompt · T tokens of one completion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from exchange.types import Message, PromptId, Version

ANSWER_COLUMNS = ("answer", "solution", "ground_truth")
"""What data sets call the reference answer; where one is asked for and not there, the first of the others stands in."""


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

    def column_for(self, name: str) -> str | None:
        """The column that answers to this name: itself, or another of ANSWER_COLUMNS in its stead; None: there is none."""
        candidates = (name, *ANSWER_COLUMNS) if name in ANSWER_COLUMNS else (name,)
        return next((candidate for candidate in candidates if candidate in self.columns), None)


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

    rewards [G]: float32, NaN where every reward function abstained; None before scoring. by_function: each function's own
    verdicts [G], unweighted. off_policy: sampled by older weights than those that will learn from it, or by another engine
    than the learner's. withheld: not to be trained on; its rewards count wherever a group's do. dead: found by dynamic
    sampling to have equal rewards throughout; its rows without an advantage are left out.
    """

    prompt: Prompt
    prompt_ids: npt.NDArray[np.int32]
    completions: tuple[Completion, ...]
    step: int
    version: Version
    rewards: npt.NDArray[np.float32] | None = None
    by_function: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    off_policy: bool = False
    withheld: bool = False
    dead: bool = False

    def scored(
        self, rewards: npt.NDArray[np.float32], by_function: Mapping[str, npt.NDArray[np.float32]] | None = None
    ) -> Group:
        """The same group with its rewards [G]."""
        if len(rewards) != len(self.completions):
            raise ValueError(f"`rewards` must have one entry per completion ({len(self.completions)}), got {len(rewards)}")
        return replace(self, rewards=rewards, by_function=by_function or {})
