"""Who learns from whom, and what crosses."""

from __future__ import annotations

import pytest

from agents.config import AgentConfig, TinyPolicy
from agents.sharing.config import PRP, SGT, XGRPO, Isolated, SharingConfig
from agents.tasks.config import Sort
from mutualrl.config import Edge, Run, Topology
from mutualrl.errors import ConfigError
from mutualrl.topology import hub_edges, published_kinds, routes, teachers


def run_of(topology: Topology, **rules: SharingConfig) -> Run:
    agents = {name: AgentConfig(policy=TinyPolicy(), sharing=rule) for name, rule in rules.items()}
    return Run(tasks=(Sort(name="sort"),), agents=agents, topology=topology)


def pairs(run: Run) -> list[str]:
    return [f"{route.learner}<{route.teacher}" for route in routes(run)]


def test_shapes() -> None:
    rules = {"a": SGT(), "b": SGT(), "c": SGT()}
    assert pairs(run_of(Topology(), **rules)) == ["a<b", "a<c", "b<a", "b<c", "c<a", "c<b"]
    assert pairs(run_of(Topology(shape="ring"), **rules)) == ["a<c", "b<a", "c<b"]
    assert pairs(run_of(Topology(shape="hub:b"), **rules)) == ["a<b", "b<a", "b<c", "c<b"]
    edges = (Edge(learner="c", teacher="a"),)
    assert pairs(run_of(Topology(shape="edges", edges=edges), **rules)) == ["c<a"]


@pytest.mark.parametrize("shape", ["complete", "ring", "hub:a"])
def test_one_agent_has_no_edges(shape: str) -> None:
    assert routes(run_of(Topology(shape=shape), a=SGT())) == ()


def test_what_crosses_is_what_the_learner_needs() -> None:
    run = run_of(Topology(), a=SGT(), b=XGRPO(), c=PRP(), d=Isolated())
    crossing = {(route.learner, route.teacher): route.kinds for route in routes(run)}
    assert crossing["a", "d"] == {"successes"}
    assert crossing["b", "d"] == {"rewards"}
    assert crossing["c", "d"] == {"rollouts"}
    assert crossing["d", "a"] == frozenset()
    assert published_kinds(run, "d") == {"successes", "rewards", "rollouts"}
    assert published_kinds(run, "a") == {"rewards", "rollouts"}
    assert teachers(run, "d") == ()


def test_an_edge_that_forbids_what_is_needed_carries_nothing() -> None:
    edges = (Edge(learner="a", teacher="b", kinds=("rewards",)), Edge(learner="b", teacher="a", kinds=("successes",)))
    run = run_of(Topology(shape="edges", edges=edges), a=SGT(), b=SGT())
    assert hub_edges(run) == {("b", "a", "successes")}
    assert published_kinds(run, "b") == frozenset()
    assert teachers(run, "a") == ()


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        (Topology(shape="hub:alpa"), "topology.shape: .*'alpa'; did you mean 'alpha'"),
        (Topology(shape="edges", edges=(Edge(learner="alpha", teacher="zoe"),)), r"topology.edges.0.teacher: .*'zoe'"),
        (Topology(shape="edges", edges=(Edge(learner="beta", teacher="beta"),)), "cannot teach itself"),
        (Topology(shape="edges", edges=(Edge(learner="alpha", teacher="beta"),) * 2), "topology.edges.1: .*earlier edge"),
    ],
)
def test_ends_that_are_no_agents_are_named(topology: Topology, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        routes(run_of(topology, alpha=SGT(), beta=SGT()))
