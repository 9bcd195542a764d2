"""Real tiny agents on a hub in memory: whole steps, bit for bit."""

import asyncio
import time
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import exchange
from agents.agent import Agent
from exchange.config import HubConfig
from exchange.types import AgentName
from mutualrl.config import Run
from mutualrl.rundir import RunDir
from mutualrl.topology import hub_edges, teachers
from mutualrl.wiring import build_parts, loop_of

pytestmark = pytest.mark.slow

STRINGS = {"alphabet": "abcd", "length": 2, "heldout": 4}
TINY = {"kind": "tiny", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def make_run(sharing: dict[str, object], *, agents: int = 1, **settings: object) -> Run:
    policies = [TINY | {"arch": "llama"}, TINY | {"arch": "gpt_neox", "tokenizer": "char"}]
    everyone = {
        name: {
            "policy": policy,
            "sharing": sharing,
            "prompts_per_step": 6,
            "num_generations": 4,
            "learning_rate": 1e-3,
            "sampling": {"max_completion_length": 5},
            "skills": [skill],
            "warm_start": {"steps": 40, "mix": {skill: 1.0}, "batch_size": 16, "learning_rate": 1e-2},
        }
        for name, policy, skill in zip(("alpha", "beta"), policies, ("reverse", "sort"), strict=True)
    }
    kept = dict(list(everyone.items())[:agents])
    tasks = [STRINGS | {"name": kind, "kind": kind} for kind in ("reverse", "sort")]
    body = {"tasks": tasks, "agents": kept, "steps": 4, "mode": "lockstep", "evaluation": {"every": 2}} | settings
    return msgspec.convert(body, Run)


async def train(run: Run, path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Run all agents to their end; their parameters by agent and name."""
    parts = {name: build_parts(run, AgentName(name), RunDir(path)) for name in run.agents}
    config = HubConfig(run_id="test", members=frozenset(run.agents), edges=hub_edges(run))
    async with exchange.memory(config) as hub, asyncio.TaskGroup() as group:

        async def play(name: str) -> None:
            async with hub.connect(name) as client:
                agent = Agent(
                    AgentName(name),
                    run.agents[name],
                    loop_of(run),
                    parts[name],
                    client,
                    teachers=[AgentName(each) for each in teachers(run, name)],
                    started_at_s=time.time(),
                )
                assert await agent.run(asyncio.Event())

        for name in run.agents:
            group.create_task(play(name))
    return {name: dict(each.policy.model.named_parameters()) for name, each in parts.items()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.fixture(scope="module")
def isolated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    run = make_run({"rule": "isolated"})
    return asyncio.run(train(run, tmp_path_factory.mktemp("isolated")))["alpha"]


@pytest.mark.parametrize(
    "sharing",
    [
        {"rule": "sgt", "lambda": 1.0},
        {"rule": "sgt", "gate": "off"},
        {"rule": "xgrpo"},
        {"rule": "xgrpo", "std": "own"},
        {"rule": "prp"},
        {"rule": "prp", "denominator": "receiver"},
    ],
)
async def test_without_peers_every_rule_is_isolated_bit_for_bit(
    sharing: dict[str, object], isolated: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    assert_equal((await train(make_run(sharing), tmp_path))["alpha"], isolated)


@pytest.mark.parametrize("sharing", [{"rule": "sgt", "lambda": 1.0}, {"rule": "prp"}, {"rule": "xgrpo"}])
async def test_lockstep_gives_the_same_numbers_twice(sharing: dict[str, object], tmp_path: Path) -> None:
    run = make_run(sharing, agents=2)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first, second = await train(run, tmp_path / "first"), await train(run, tmp_path / "second")
    for name in run.agents:
        assert_equal(first[name], second[name])


async def test_what_a_run_with_sharing_leaves_behind(tmp_path: Path) -> None:
    run = make_run({"rule": "sgt", "lambda": 1.0}, agents=2)
    await train(run, tmp_path)
    metrics = [msgspec.json.decode(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
    alpha = [line for line in metrics if line["agent"] == "alpha" and "alpha/reward" in line]
    assert [line["step"] for line in alpha] == [1, 2, 3, 4]
    assert sum(line["alpha/rescues"] for line in alpha) > 0
    assert all(line["alpha/peer/beta/hit_rate"] == 1.0 for line in alpha if "alpha/peer/beta/hit_rate" in line)
    rescues = [msgspec.json.decode(line) for line in (tmp_path / "rescues.jsonl").read_bytes().splitlines()]
    for line in rescues:
        assert "".join(line["source_tokens"]) == "".join(line["receiver_tokens"]) == line["text"]
    evaluations = [msgspec.json.decode(line) for line in (tmp_path / "evals.jsonl").read_bytes().splitlines()]
    assert {line["step"] for line in evaluations} == {0, 2, 4}
    assert all(len(line["correct"]) == 4 for line in evaluations)


async def test_checkpoints_load_by_from_pretrained_at_once(tmp_path: Path) -> None:
    run = make_run({"rule": "isolated"}, agents=2)
    trained = await train(run, tmp_path)
    for name in run.agents:
        path = tmp_path / "checkpoints" / name / "final"
        model = AutoModelForCausalLM.from_pretrained(path)
        assert_equal(dict(model.named_parameters()), trained[name])
        tokenizer = AutoTokenizer.from_pretrained(path)
        assert tokenizer.decode(tokenizer("reverse abc:")["input_ids"], skip_special_tokens=True) == "reverse abc:"
