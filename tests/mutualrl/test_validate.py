"""Names that point nowhere, agents that cannot learn, rewards that do not exist."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from agents.config import AgentConfig, Objective, Sampling, SandboxedReward, TinyPolicy, WarmStart
from agents.sharing.config import PRP, SGT, Isolated
from agents.tasks.config import Data, Reverse, Sort, TaskConfig
from mutualrl.config import Edge, Run, Topology
from mutualrl.errors import ConfigError
from mutualrl.validate import validate

ALPHA = AgentConfig(policy=TinyPolicy())


def sandboxed(reference: str) -> SandboxedReward:
    return SandboxedReward(sandbox=reference)


def run_with(*tasks: TaskConfig, topology: Topology | None = None, **agents: AgentConfig) -> Run:
    return Run(
        tasks=tasks or (Sort(name="sort"),),
        agents=agents or {"alpha": ALPHA, "beta": ALPHA},
        topology=topology or Topology(),
    )


def changed(**fields: object) -> AgentConfig:
    return msgspec.structs.replace(ALPHA, **fields)


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (msgspec.structs.replace(run_with(), tasks=()), "tasks: a run needs at least one"),
        (run_with(Sort(name="x"), Reverse(name="x")), "tasks.1.name: already the name of tasks.0, got name='x'"),
        (run_with(Sort(name="sort", heldout=216)), "tasks.0: .*heldout=216"),
        (run_with(Data(name="d", path="/nowhere/at/all.jsonl")), "tasks.0: .*/nowhere/at/all.jsonl"),
        (msgspec.structs.replace(run_with(), agents={"al/pha": ALPHA}), "agents.al/pha: a name is"),
        (run_with(hub=ALPHA), "agents.hub: the run has a role of this name"),
        (run_with(alpha=changed(skills=("srot",))), "agents.alpha.skills: no task .*'srot'; did you mean 'sort'"),
        (run_with(alpha=changed(warm_start=WarmStart(steps=1, mix={"x": 1}))), "agents.alpha.warm_start.mix: .*'x'"),
        (run_with(alpha=changed(prompts_per_step=153)), "agents.alpha.prompts_per_step: .* 152 training prompts.*=153"),
        (run_with(alpha=changed(rewards=("exact_mach",))), "agents.alpha.rewards: .*did you mean 'exact_match'"),
        (run_with(alpha=changed(rewards=("no_such_module:f",))), "agents.alpha.rewards: .*no_such_module:f"),
        (run_with(alpha=changed(rewards=("os.path:no_such",))), "agents.alpha.rewards: .*os.path:no_such"),
        (run_with(alpha=changed(rewards=(sandboxed("exact_mach"),))), "agents.alpha.rewards: .*did you mean 'exact_match'"),
        (
            run_with(alpha=changed(rewards=("exact_match", sandboxed("exact_match")))),
            "agents.alpha.rewards: 'exact_match' and 'exact_match' have the same name",
        ),
        (run_with(alpha=changed(rewards=("exact_match",) * 2)), "agents.alpha.rewards: 'exact_match' and .* the same name"),
        (run_with(topology=Topology(shape="hub:zoe")), "topology.shape: .*'zoe'"),
    ],
)
def test_what_makes_a_run_impossible(run: Run, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        validate(run)


def test_no_agents() -> None:
    with pytest.raises(ConfigError, match="agents: a run needs at least one"):
        validate(Run(tasks=(Sort(name="sort"),), agents={}))


def test_an_empty_data_set_is_found_before_anything_is_spent(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("")
    with pytest.raises(ConfigError, match=r"tasks.0: .*no rows in path=.*rows.jsonl"):
        validate(run_with(Data(name="d", path=str(path), heldout=1)))


def test_several_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        validate(run_with(alpha=changed(skills=("a",), rewards=("b",)), topology=Topology(shape="hub:zoe")))
    assert len(str(caught.value).splitlines()) == 4


def test_a_good_run_has_no_warnings() -> None:
    assert validate(run_with()) == []
    assert validate(run_with(alpha=changed(prompts_per_step=152), beta=ALPHA)) == []
    assert validate(run_with(alpha=changed(sharing=Isolated()))) == []


def test_an_agent_without_teachers_is_warned_of() -> None:
    assert validate(run_with(alpha=ALPHA)) == ["alpha is alone: it runs as isolated"]
    edges = Topology(shape="edges", edges=(Edge(learner="beta", teacher="alpha"),))
    (warning,) = validate(run_with(topology=edges, alpha=ALPHA, beta=changed(sharing=SGT())))
    assert warning.startswith("alpha is alone: no edge")


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.9), Sampling(top_k=20)])
def test_a_cut_support_is_warned_of(sampling: Sampling) -> None:
    (warning,) = validate(run_with(alpha=changed(sampling=sampling), beta=ALPHA))
    assert warning.startswith("alpha samples from a cut support (top_p, top_k)")


def test_a_peer_ratio_that_is_always_one_is_warned_of() -> None:
    constant = changed(sharing=PRP(denominator="receiver"))
    (warning,) = validate(run_with(alpha=constant, beta=ALPHA))
    assert warning.startswith('alpha: with denominator="receiver" and one iteration every peer ratio is 1')
    twice = msgspec.structs.replace(constant, objective=Objective(num_iterations=2))
    assert validate(run_with(alpha=twice, beta=ALPHA)) == []


def test_more_threads_than_cores_is_warned_of() -> None:
    cores = os.cpu_count() or 1
    (warning,) = validate(run_with(alpha=changed(threads=cores), beta=ALPHA))
    assert f"add up to {cores + 1}" in warning
