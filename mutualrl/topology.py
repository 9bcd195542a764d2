"""Who learns from whom: the run's topology as a directed graph, and what must cross each of its edges.

An edge of the graph points the way experience flows, from teacher to learner, and carries the kinds that it allows.
What crosses is what the learner's sharing rule needs and the edge allows, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agents.sharing.config import PRP, SGT, XGRPO, Isolated, SharingConfig
from mutualrl.config import Run, Topology
from mutualrl.errors import ConfigError
from mutualrl.schema import nearest

if TYPE_CHECKING:
    import networkx as nx

KINDS = ("rollouts", "rewards", "successes")

NEEDS: dict[type[SharingConfig], frozenset[str]] = {
    Isolated: frozenset(),
    PRP: frozenset({"rollouts"}),
    XGRPO: frozenset({"rewards"}),
    SGT: frozenset({"successes"}),
}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Route:
    """One edge of a run. kinds: what crosses; empty when the learner's rule takes nothing that the edge allows."""

    learner: str
    teacher: str
    kinds: frozenset[str]


def routes(run: Run) -> tuple[Route, ...]:
    """Every edge of the topology with what crosses it, in the order of the agents; ConfigError on unknown agents."""
    order = list(run.agents)
    found = [
        Route(learner=learner, teacher=teacher, kinds=NEEDS[type(run.agents[learner].sharing)] & set(allowed))
        for teacher, learner, allowed in graph(run.topology, order).edges(data="kinds")
    ]
    return tuple(sorted(found, key=lambda route: (order.index(route.learner), order.index(route.teacher))))


def hub_edges(run: Run) -> frozenset[tuple[str, str, str]]:
    """(learner, teacher, kind) triples: all that the exchange may hand over."""
    return frozenset((route.learner, route.teacher, kind) for route in routes(run) for kind in route.kinds)


def published_kinds(run: Run, producer: str) -> frozenset[str]:
    """What `producer` must publish: the union of what its learners' rules need. Less is never sent as more."""
    return frozenset(kind for route in routes(run) if route.teacher == producer for kind in route.kinds)


def teachers(run: Run, learner: str) -> tuple[str, ...]:
    """The agents from which anything reaches `learner`."""
    return tuple(route.teacher for route in routes(run) if route.learner == learner and route.kinds)


def graph(topology: Topology, agents: list[str]) -> nx.DiGraph:
    """The topology over these agents, every one of them a node; the attribute `kinds` of an edge is what it allows."""
    import networkx as nx

    result = nx.DiGraph()
    result.add_nodes_from(agents)
    if topology.shape == "edges":
        for index, edge in enumerate(topology.edges):
            for end, name in (("learner", edge.learner), ("teacher", edge.teacher)):
                _require_known(f"topology.edges.{index}.{end}", name, agents)
            if edge.learner == edge.teacher:
                raise ConfigError(f"topology.edges.{index}: an agent cannot teach itself, got {edge.learner!r} twice")
            result.add_edge(edge.teacher, edge.learner, kinds=KINDS if edge.kinds is None else edge.kinds)
        return result
    if topology.shape == "complete":
        pairs = [(teacher, learner) for teacher in agents for learner in agents]
    elif topology.shape == "ring":
        pairs = list(zip(agents, agents[1:] + agents[:1], strict=True))
    else:
        center = topology.shape.removeprefix("hub:")
        _require_known("topology.shape", center, agents)
        pairs = [pair for spoke in agents for pair in ((center, spoke), (spoke, center))]
    result.add_edges_from(((teacher, learner) for teacher, learner in pairs if teacher != learner), kinds=KINDS)
    return result


def _require_known(path: str, name: str, agents: list[str]) -> None:
    if name not in agents:
        raise ConfigError(f"{path}: no agent of this name, got {name!r}; {nearest(name, agents)}")
