"""Real tiny agents on a hub in memory: whole steps, bit for bit."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import exchange
from agents.agent import Agent
from agents.errors import RewardError
from exchange.config import HubConfig
from exchange.types import AgentName, StepPrompts, Version
from mutualrl.config import Evaluation, Run
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


async def train(run: Run, path: Path, *, silent: str = "") -> dict[str, dict[str, torch.Tensor]]:
    """Run all agents but the silent one to their end; their parameters by agent and name."""
    parts = {name: build_parts(run, AgentName(name), RunDir(path)) for name in run.agents if name != silent}
    config = HubConfig(
        run_id="test", members=frozenset(run.agents), edges=hub_edges(run), memory_bytes=run.exchange.memory_bytes
    )
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

        for name in parts:
            group.create_task(play(name))
    return {name: dict(each.policy.model.named_parameters()) for name, each in parts.items()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


async def test_sampled_evaluations_leave_training_as_it_is(tmp_path: Path) -> None:
    weights = {}
    for name, evaluation in (("without", {"every": 0}), ("with", {"every": 1, "num_samples": 4, "pass_k": [1, 4]})):
        (tmp_path / name).mkdir()
        run = msgspec.structs.replace(graded({"rule": "isolated"}), evaluation=msgspec.convert(evaluation, Evaluation))
        weights[name] = (await train(run, tmp_path / name))["alpha"]
    assert_equal(weights["without"], weights["with"])
    lines = [msgspec.json.decode(line) for line in (tmp_path / "with" / "evals.jsonl").read_bytes().splitlines()]
    assert len(lines) == 10 and all(len(line["num_correct"]) == 4 and line["num_samples"] == 4 for line in lines)
    assert all(line["pass_at_k"]["4"] >= line["pass_at_k"]["1"] for line in lines)
    metrics = (tmp_path / "with" / "metrics.jsonl").read_text()
    assert metrics.count('"alpha/eval/sort/pass@4"') == 5


def overlap(completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """A graded reward, so that even policies that know little learn something in every step."""
    return [sum(map(str.__eq__, text, right)) / len(right) for text, right in zip(completions, answer, strict=True)]


def graded(sharing: dict[str, object], *, agents: int = 1, mode: str = "lockstep") -> Run:
    """A run whose agents are judged by `overlap`."""
    run = make_run(sharing, agents=agents, mode=mode)
    rewards = (f"{__name__}:overlap",)
    judged = {name: msgspec.structs.replace(agent, rewards=rewards) for name, agent in run.agents.items()}
    return msgspec.structs.replace(run, agents=judged)


@pytest.fixture(scope="module")
def isolated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    path = tmp_path_factory.mktemp("isolated")
    parameters = asyncio.run(train(graded({"rule": "isolated"}), path))["alpha"]
    lines = [msgspec.json.decode(line) for line in (path / "metrics.jsonl").read_bytes().splitlines()]
    steps = [line for line in lines if "alpha/reward" in line]
    assert len(steps) == 4 and all(line.get("alpha/grad_norm", 0.0) > 0 for line in steps), "nothing was learned"
    return parameters


def twice_told(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """Raises when an answer is not its own prompt's; equal rewards for all."""
    for prompt, right in zip(prompts, answer, strict=True):
        letters = prompt.split()[1].rstrip(":")
        assert right == (letters[::-1] if prompt.startswith("reverse") else "".join(sorted(letters))), (prompt, right)
    return [1.0] * len(completions)


async def test_columns_stay_with_their_prompts_and_steps_without_a_lesson_pass(tmp_path: Path) -> None:
    run = make_run({"rule": "isolated"}, mode="async")
    agent = msgspec.structs.replace(run.agents["alpha"], rewards=(f"{__name__}:twice_told",), max_staleness=1)
    run = msgspec.structs.replace(run, agents={"alpha": agent}, steps=6)
    before: dict[str, torch.Tensor] = dict(
        build_parts(run, AgentName("alpha"), RunDir(tmp_path)).policy.model.named_parameters()
    )
    assert_equal((await train(run, tmp_path))["alpha"], before)
    lines = [msgspec.json.decode(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
    steps = [line for line in lines if "alpha/reward" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert all(line["alpha/skipped_steps"] == line["alpha/frac_reward_zero_std"] == 1 for line in steps)
    assert not any("alpha/loss" in line for line in steps)


RULES: list[dict[str, object]] = [
    {"rule": "sgt", "lambda": 1.0},
    {"rule": "sgt", "gate": "off"},
    {"rule": "xgrpo"},
    {"rule": "xgrpo", "std": "own"},
    {"rule": "prp"},
    {"rule": "prp", "denominator": "receiver"},
    {"rule": "hacpo"},
    {"rule": "graft"},
]


@pytest.mark.parametrize("sharing", RULES)
async def test_without_peers_every_rule_is_isolated_bit_for_bit(
    sharing: dict[str, object], isolated: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    assert_equal((await train(graded(sharing), tmp_path))["alpha"], isolated)


@pytest.mark.parametrize("sharing", [*RULES[:6:2], *RULES[6:]])
async def test_with_a_teacher_that_never_comes_every_rule_is_isolated_bit_for_bit(
    sharing: dict[str, object], isolated: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    run = msgspec.structs.replace(graded(sharing, agents=2, mode="async"), step_timeout_s=0.05)
    assert_equal((await train(run, tmp_path, silent="beta"))["alpha"], isolated)


def staled(run: Run, **settings: object) -> Run:
    agents = {name: msgspec.structs.replace(agent, **settings) for name, agent in run.agents.items()}
    return msgspec.structs.replace(run, agents=agents)


async def alike_twice(run: Run, tmp_path: Path) -> list[dict[str, float]]:
    """Train twice, see the same parameters, and return the lines of alpha's steps."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first, second = await train(run, tmp_path / "first"), await train(run, tmp_path / "second")
    for name in run.agents:
        assert_equal(first[name], second[name])
    lines = [msgspec.json.decode(line) for line in (tmp_path / "first" / "metrics.jsonl").read_bytes().splitlines()]
    return [line for line in lines if "alpha/reward" in line]


async def test_lockstep_with_samples_ahead_gives_the_same_numbers_twice(tmp_path: Path) -> None:
    run = staled(graded({"rule": "sgt", "lambda": 1.0}, agents=2), max_staleness=2)
    steps = await alike_twice(run, tmp_path)
    assert [line["alpha/sample/staleness_max"] for line in steps] == [0, 1, 2, 2]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all("alpha/sampling/importance_sampling_ratio/mean" in line for line in steps[1:])
    assert all(line["alpha/peer/beta/hit_rate"] == 1.0 for line in steps if "alpha/peer/beta/hit_rate" in line)


@pytest.mark.parametrize("staleness", ["drop", "withhold"])
async def test_samples_ahead_are_trained_in_async_mode_too(staleness: str, tmp_path: Path) -> None:
    run = staled(graded({"rule": "sgt"}, agents=2, mode="async"), max_staleness=1, staleness=staleness)
    await train(run, tmp_path)
    lines = [msgspec.json.decode(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
    steps = [line for line in lines if "beta/reward" in line]
    assert [line["beta/sample/staleness_max"] for line in steps] == [0, 1, 1, 1]
    assert all(line.get("beta/grad_norm", 0.0) > 0 for line in steps)


async def test_dynamic_sampling_in_lockstep_gives_the_same_numbers_twice_and_closes_steps_with_all_its_prompts(
    tmp_path: Path,
) -> None:
    run = staled(make_run({"rule": "sgt", "lambda": 1.0}, agents=2), dynamic_sampling_rounds=1, rewards=("exact_match",))
    steps = await alike_twice(run, tmp_path)
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert any(line["alpha/dynamic_sampling/rounds"] == 1 for line in steps), "nothing was added"
    for line in steps:
        sampled = 6 * (1 + line["alpha/dynamic_sampling/rounds"])
        live = line["alpha/dynamic_sampling/kept"]
        assert live == round(sampled * (1 - line["alpha/frac_reward_zero_std"]))
        assert line["alpha/rows/own"] == 4 * live
    assert sum(line["alpha/rescues"] for line in steps) > 0


def nothing(completions: Sequence[str], **_: object) -> list[float]:
    return [0.1] * len(completions)


async def test_a_run_whose_groups_are_all_dead_ends_without_an_update(tmp_path: Path) -> None:
    run = staled(make_run({"rule": "isolated"}), dynamic_sampling_rounds=9, rewards=(f"{__name__}:nothing",))
    parts = build_parts(run, AgentName("alpha"), RunDir(tmp_path))
    before = {name: value.clone() for name, value in parts.policy.model.named_parameters()}
    assert_equal((await train(run, tmp_path))["alpha"], before)
    lines = [msgspec.json.decode(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
    steps = [line for line in lines if "alpha/reward" in line]
    # 24 prompts (16 words and 16 of two tasks, 4 of each held out) are used up by 3 rounds behind the first 6.
    assert [line["alpha/dynamic_sampling/rounds"] for line in steps] == [3.0] * 4
    assert all(line["alpha/skipped_steps"] == 1 and line["alpha/dynamic_sampling/kept"] == 0 for line in steps)


async def test_told_to_stop_an_agent_does_not_wait_for_teachers_at_the_start(tmp_path: Path) -> None:
    run = graded({"rule": "sgt"}, agents=2)
    stop = asyncio.Event()
    stop.set()
    parts = build_parts(run, AgentName("alpha"), RunDir(tmp_path))
    async with exchange.memory() as hub, hub.connect("alpha") as client, asyncio.timeout(20):
        name = AgentName("alpha")
        teachers_of = [AgentName("beta")]
        agent = Agent(name, run.agents[name], loop_of(run), parts, client, teachers=teachers_of, started_at_s=time.time())
        assert not await agent.run(stop)


async def test_told_to_stop_an_agent_that_waits_in_lockstep_leaves_with_a_checkpoint(tmp_path: Path) -> None:
    run = graded({"rule": "sgt"}, agents=2)
    stop = asyncio.Event()
    parts = build_parts(run, AgentName("alpha"), RunDir(tmp_path))
    config = HubConfig(run_id="test", members=frozenset(run.agents), edges=hub_edges(run))
    async with exchange.memory(config) as hub, hub.connect("alpha") as client, hub.connect("beta") as beta:
        agent = Agent(
            AgentName("alpha"),
            run.agents["alpha"],
            loop_of(run),
            parts,
            client,
            teachers=[AgentName("beta")],
            started_at_s=time.time(),
        )
        running = asyncio.create_task(agent.run(stop))
        # Once alpha has closed step 0 all that is left of the step is to wait for beta, who never comes.
        here = StepPrompts(agent=AgentName("beta"), step=0, version=Version(beta.epoch, 0), prompt_ids=())
        await beta.publish(here)
        await beta.gather(kinds={"prompts"}, agents={AgentName("alpha")}, min_step=0, min_count=1, deadline_s=30.0)
        stop.set()
        async with asyncio.timeout(20):
            assert not await running
    assert (tmp_path / "checkpoints" / "alpha" / "step-000000" / "config.json").exists()


async def test_an_agent_that_fails_leaves_a_checkpoint_of_the_steps_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = graded({"rule": "isolated"})
    parts = build_parts(run, AgentName("alpha"), RunDir(tmp_path))
    score, calls = parts.rewards.score, []

    async def fail_in_the_third_step(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 4:  # the evaluation before the first step is one
            raise RewardError("judge is gone")
        return await score(*arguments, **named)

    monkeypatch.setattr(parts.rewards, "score", fail_in_the_third_step)
    async with exchange.memory() as hub, hub.connect("alpha") as client:
        name = AgentName("alpha")
        agent = Agent(name, run.agents[name], loop_of(run), parts, client, teachers=[], started_at_s=time.time())
        with pytest.raises(RewardError, match="judge is gone"):
            await agent.run(asyncio.Event())
    assert [path.name for path in (tmp_path / "checkpoints" / "alpha").iterdir()] == ["step-000002"]


@pytest.mark.parametrize("sharing", [{"rule": "sgt", "lambda": 1.0}, {"rule": "prp"}, {"rule": "xgrpo"}, {"rule": "hacpo"}])
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
