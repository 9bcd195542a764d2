"""Who learns from whom, as a directed graph, and what must cross each edge: what the learner's rule needs and the edge
allows, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agents.sharing import KINDS as PEER_KINDS
from exchange.types import Kind
from mutualrl.config import Edge, Run, Topology
from mutualrl.errors import ConfigError
from mutualrl.schema import nearest

if TYPE_CHECKING:
    import networkx as nx

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
        for teacher, learner, allowed in graph(run.topology, order).edges(data="kinds")
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


def graph(topology: Topology, agents: Sequence[str]) -> nx.DiGraph:
    """The topology over these agents, each of them a node. An edge points the way experience flows, from teacher to
    learner; its attribute `kinds` is what it allows. ConfigError on an end that is no agent."""
    import networkx as nx

    if topology.shape == "complete":
        result = nx.complete_graph(agents, create_using=nx.DiGraph)
    elif topology.shape == "ring":
        result = nx.cycle_graph(agents, create_using=nx.DiGraph)
    elif topology.shape == "edges":
        result = nx.DiGraph()
        result.add_nodes_from(agents)
        _add_edges(result, topology.edges)
        return result
    else:
        center = topology.shape.removeprefix("hub:")
        _require_known("topology.shape", center, agents)
        result = nx.star_graph([center, *(spoke for spoke in agents if spoke != center)]).to_directed()
    result.remove_edges_from(list(nx.selfloop_edges(result)))
    nx.set_edge_attributes(result, KINDS, "kinds")
    return result


def _add_edges(result: nx.DiGraph, edges: Sequence[Edge]) -> None:
    for index, edge in enumerate(edges):
        for end, name in (("learner", edge.learner), ("teacher", edge.teacher)):
            _require_known(f"topology.edges.{index}.{end}", name, list(result))
        if edge.learner == edge.teacher:
            raise ConfigError(f"topology.edges.{index}: an agent cannot teach itself, got {edge.learner!r} twice")
        if result.has_edge(edge.teacher, edge.learner):
            raise ConfigError(f"topology.edges.{index}: {edge.learner!r} learns from {edge.teacher!r} by an earlier edge")
        result.add_edge(edge.teacher, edge.learner, kinds=KINDS if edge.kinds is None else edge.kinds)


def _require_known(path: str, name: str, agents: Sequence[str]) -> None:
    if name not in agents:
        raise ConfigError(f"{path}: no agent of this name, got {name!r}; {nearest(name, agents)}")
