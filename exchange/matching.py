"""The filters of a gather, and the edges of the topology, as they stand when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exchange.config import Edges
from exchange.messages import Gather
from exchange.types import AgentName, Kind, Version

__all__ = ["Matcher", "is_from"]


def is_from(gather: Gather, learner: AgentName, agent: AgentName) -> bool:
    """Whether the gather asks for records of this producer."""
    return agent != learner if gather.agents is None else agent in gather.agents


@dataclass(frozen=True, slots=True, kw_only=True)
class Matcher:
    """All filters but kind, prompt and cursor, which an index answers. Nothing in it changes, so any thread may ask.

    edges: allowed (learner, teacher, kind); None allows all. newest: versions that a max_lag is counted from. now: on the
    hub's clock.
    """

    learner: AgentName
    gather: Gather
    edges: Edges | None
    newest: Mapping[AgentName, Version]
    now: float

    def matches(self, agent: AgentName, step: int, version: Version, stored_at: float) -> bool:
        """Whether a record of this producer, step, version and time passes."""
        gather = self.gather
        if not is_from(gather, self.learner, agent):
            return False
        if gather.min_step is not None and step < gather.min_step:
            return False
        if gather.max_step is not None and step > gather.max_step:
            return False
        if gather.max_age_s is not None and self.now - stored_at > gather.max_age_s:
            return False
        if gather.max_lag is None:
            return True
        newest = self.newest.get(agent)
        return newest is not None and newest.epoch == version.epoch and newest.step - version.step <= gather.max_lag

    def allowed(self, agent: AgentName, kind: Kind) -> bool:
        """Whether the topology lets the learner have it; prompts may always cross."""
        return self.edges is None or kind == "prompts" or agent == self.learner or (self.learner, agent, kind) in self.edges
