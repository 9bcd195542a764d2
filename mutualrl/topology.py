"""Who learns from whom, and what must cross: what the learner's rule needs and the edge allows, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agents.sharing import KINDS as PEER_KINDS
from exchange.types import Kind
from mutualrl.config import Run, Topology
from mutualrl.errors import ConfigError
from mutualrl.schema import nearest

KINDS: tuple[Kind, ...] = ("rollouts", "rewards", "successes")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Route:
    """One edge of a run. kinds: what crosses; empty when the learner's rule takes nothing that the edge allows."""

    learner: str
    teacher: str
    kinds: frozenset[Kind]


def routes(run: Run) -> tuple[Route, ...]:
    """Every edge of the topology with what crosses it, in the order of the agents; ConfigError on unknown agents."""
    order = list(run.agents)
    found = [
        Route(learner=learner, teacher=teacher, kinds=PEER_KINDS[type(run.agents[learner].sharing)] & set(allowed))
        for learner, teacher, allowed in edges(run.topology, order)
    ]
    return tuple(sorted(found, key=lambda route: (order.index(route.learner), order.index(route.teacher))))


def hub_edges(run: Run) -> frozenset[tuple[str, str, Kind]]:
    """(learner, teacher, kind) triples: all that the exchange may hand over."""
    return frozenset((route.learner, route.teacher, kind) for route in routes(run) for kind in route.kinds)


def published_kinds(run: Run, producer: str) -> frozenset[Kind]:
    """What `producer` must publish: the union of what its learners' rules need. Less is never sent as more."""
    return frozenset(kind for route in routes(run) if route.teacher == producer for kind in route.kinds)


def teachers(run: Run, learner: str) -> tuple[str, ...]:
    """The agents from which anything reaches `learner`."""
    return tuple(route.teacher for route in routes(run) if route.learner == learner and route.kinds)


def edges(topology: Topology, agents: Sequence[str]) -> Iterator[tuple[str, str, Sequence[str]]]:
    """(learner, teacher, kinds allowed) of every edge, each once; ConfigError on an end that is no agent."""
    if topology.shape == "edges":
        allowed: dict[tuple[str, str], Sequence[str]] = {}
        for index, edge in enumerate(topology.edges):
            for end, name in (("learner", edge.learner), ("teacher", edge.teacher)):
                _require_known(f"topology.edges.{index}.{end}", name, agents)
            if edge.learner == edge.teacher:
                raise ConfigError(f"topology.edges.{index}: an agent cannot teach itself, got {edge.learner!r} twice")
            if (edge.learner, edge.teacher) in allowed:
                raise ConfigError(f"topology.edges.{index}: {edge.learner!r} learns from {edge.teacher!r} by an earlier edge")
            allowed[edge.learner, edge.teacher] = KINDS if edge.kinds is None else edge.kinds
        yield from ((learner, teacher, kinds) for (learner, teacher), kinds in allowed.items())
        return
    if topology.shape == "complete":
        pairs = {(learner, teacher) for learner in agents for teacher in agents}
    elif topology.shape == "ring":
        pairs = {(agents[index], agents[index - 1]) for index in range(len(agents))}
    else:
        center = topology.shape.removeprefix("hub:")
        _require_known("topology.shape", center, agents)
        pairs = {pair for spoke in agents for pair in ((center, spoke), (spoke, center))}
    yield from ((learner, teacher, KINDS) for learner, teacher in pairs if learner != teacher)


def _require_known(path: str, name: str, agents: Sequence[str]) -> None:
    if name not in agents:
        raise ConfigError(f"{path}: no agent of this name, got {name!r}; {nearest(name, agents)}")
