"""What a sharing rule is, what it is given, and what it returns.

A rule belongs to the agent that receives. It decides which peer experience it needs, which peer rows enter the batch, and
over which set of rewards advantages are computed. Three switches, one pipeline (Mutual Reinforcement Learning,
arXiv 2605.07244).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from agents.rows import Row
from agents.types import Group, Prompt
from exchange.types import AgentName, GroupRewards, Kind, PromptId, RolloutGroup, VerifiedSuccesses
from tokenalign import Trace, Translation

PeerExperience = GroupRewards | VerifiedSuccesses | RolloutGroup
Peers = Mapping[PromptId, Sequence[PeerExperience]]


E = TypeVar("E", GroupRewards, RolloutGroup)


def newest_of_each_peer(experience: Sequence[PeerExperience], kind: type[E]) -> list[E]:
    """Each peer's newest record of a kind, peers in the order of their names."""
    newest: dict[AgentName, E] = {}
    for record in experience:
        if isinstance(record, kind) and (record.agent not in newest or record.version > newest[record.agent].version):
            newest[record.agent] = record
    return [newest[agent] for agent in sorted(newest)]


class Receiver(Protocol):
    """What a rule may ask of the agent that it works for."""

    @property
    def reward_fingerprint(self) -> str: ...

    @property
    def tokenizer_fingerprint(self) -> str: ...

    async def verify(self, prompts: Sequence[Prompt], texts: Sequence[bytes]) -> npt.NDArray[np.float32]:
        """Score peers' texts [N] with the receiver's own reward functions, NaN where they abstain."""
        ...

    def adopt(self, peer: Trace, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The sampled ids of a peer with the receiver's own tokenizer, checked; a TokenAlignError as in `translate`.

        Ends in the receiver's own end-of-sequence token iff the peer's text ended by itself.
        """
        ...

    def translate(self, peers: Sequence[Trace]) -> Translation:
        """Receiver ids for peers' texts; those that lose more than the receiver allows, or are too long, are left empty,
        and taking one of them from the result raises its TokenAlignError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescue:
    """One peer success that entered the batch, kept for the report."""

    peer: AgentName
    prompt: Prompt
    source: Trace
    translation: Translation


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A step's training rows. counters: metric name -> value, logged under the agent's name.

    withheld: rescues that a coin kept out of the rows.
    """

    rows: Sequence[Row]
    counters: Mapping[str, float] = field(default_factory=dict)
    rescues: Sequence[Rescue] = ()
    withheld: Sequence[Rescue] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A prompt of an earlier step that waits for peers' experience. prompt_ids [Tp]: as rendered. since: that step."""

    prompt: Prompt
    prompt_ids: npt.NDArray[np.int32]
    since: int


class Forgetful:
    """For rules that remember nothing from step to step."""

    waiting: Mapping[PromptId, Waiting] = MappingProxyType({})

    def memory(self) -> object:
        return None

    def recall(self, memory: object, waiting: Mapping[PromptId, Waiting]) -> None:
        self.waiting = waiting


class SharingRule(Protocol):
    """kinds: short names of the experience that it needs. window: steps for which a prompt stays open for late experience.

    max_lag: in producer versions, None for no limit. max_age_s: by the hub's clock, None for no limit. latest_only: of a
    peer's experience on a prompt only the newest is of use. waiting: prompts of earlier steps on which late experience is
    still of use, in a fixed order.
    """

    kinds: frozenset[Kind]
    window: int
    max_lag: int | None
    max_age_s: float | None
    latest_only: bool

    @property
    def waiting(self) -> Mapping[PromptId, Waiting]: ...

    def memory(self) -> object:
        """What the rule remembers from step to step beside `waiting`, as plain values that msgpack holds; None for nothing."""
        ...

    def recall(self, memory: object, waiting: Mapping[PromptId, Waiting]) -> None:
        """Go on from what `memory` and `waiting` gave."""
        ...

    def wants(self, groups: Sequence[Group]) -> Sequence[PromptId]:
        """Prompts of this step on which peers' experience is of use, once its groups are scored."""
        ...

    async def share(self, groups: Sequence[Group], peers: Peers, *, step: int, steps: int, rng: np.random.Generator) -> Shared:
        """Turn the step's own groups and the peers' experience on own and open prompts into training rows."""
        ...
