"""A run that is taken up again goes on as if nothing had happened, to the bit."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console
from test_agents_together import STRINGS, TINY, assert_equal

import exchange
from agents.agent import Agent
from agents.checkpoint import load_state
from agents.dump import dump_path, read_dump, write_dump
from agents.errors import NonFiniteError
from agents.optimizer import MasterAdamW
from exchange.config import HubConfig
from exchange.types import AgentName
from mutualrl.checkpoints import join, manifest_path, newest_whole, steps_saved
from mutualrl.config import Run
from mutualrl.errors import ConfigError, RunDirError
from mutualrl.manifest import Manifest, Role, now
from mutualrl.replay import run_replay
from mutualrl.resume import take_up, wait_for_former
from mutualrl.rundir import RunDir
from mutualrl.topology import hub_edges, teachers
from mutualrl.wiring import build_parts, loop_of

pytestmark = pytest.mark.slow

TIMES = (
    "wall_s",
    "step_time",
    "sample_time",
    "exchange_time",
    "learn_time",
    "tokens_per_s",
    "time_in_queue_s",
    "rollout_wait_s",
)


def make_run(*sharing: Mapping[str, object], steps: int = 6, **settings: object) -> Run:
    """Two agents that are taught a little of one task each, on few prompts, so that epochs end within the run."""
    policies = [
        TINY | {"hidden_size": 16} | {"arch": "llama"},
        TINY | {"hidden_size": 16, "arch": "gpt_neox", "tokenizer": "char"},
    ]
    agents = {
        name: {
            "policy": policy,
            "sharing": rule,
            "prompts_per_step": 4,
            "num_generations": 4,
            "learning_rate": 1e-3,
            "sampling": {"max_completion_length": 4},
            "warm_start": {"steps": 60, "mix": {skill: 1.0}, "batch_size": 16, "learning_rate": 1e-2},
        }
        for name, policy, skill, rule in zip(("alpha", "beta"), policies, ("reverse", "sort"), sharing, strict=True)
    }
    tasks = [STRINGS | {"name": kind, "kind": kind, "alphabet": "abc", "heldout": 2} for kind in ("reverse", "sort")]
    body = {"tasks": tasks, "agents": agents, "steps": steps, "mode": "lockstep", "evaluation": {"every": 2}, "save_steps": 3}
    return msgspec.convert(body | settings, Run)


def new_run(path: Path, run: Run) -> RunDir:
    path.mkdir()
    path.with_name("ipc").mkdir(exist_ok=True, mode=0o700)
    run_dir = RunDir(path)
    run_dir.write_config(run)
    run_dir.write_manifest(Manifest(run_id="test", name="test", status="starting", pid=0, started=now(), endpoint=""))
    return run_dir


@asynccontextmanager
async def hub(run: Run, run_dir: RunDir, folder: Path) -> AsyncIterator[str]:
    """A hub on the run's records."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    config = HubConfig(run_id="test", members=frozenset(run.agents), edges=hub_edges(run))
    directory = run_dir.records if run.exchange.disk_bytes else None
    serving = asyncio.create_task(
        exchange.serve(f"ipc://{folder}/hub", config, stop=stop, on_ready=ready.set_result, directory=directory)
    )
    try:
        yield await ready
    finally:
        stop.set()
        await serving


async def play(run_dir: RunDir, tmp_path: Path, *, stop_behind: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The agents of a run to its end, or until each has made so many steps; their parameters by agent and name."""
    run, manifest = run_dir.read_config(), run_dir.read_manifest()
    parts = {name: build_parts(run, AgentName(name), run_dir, checkpoint=manifest.checkpoint) for name in run.agents}
    stops = {name: asyncio.Event() for name in run.agents}

    async def live(endpoint: str, name: str) -> None:
        async with exchange.connect(endpoint, name=AgentName(name), run_id="test") as client:
            agent = Agent(
                AgentName(name),
                run.agents[name],
                loop_of(run, manifest.seams),
                parts[name],
                client,
                teachers=[AgentName(each) for each in teachers(run, name)],
                started_at_s=datetime.fromisoformat(manifest.started).timestamp(),
            )
            if stop_behind is not None:
                progress = client.progress

                async def tell(*, step: int, version: Any) -> None:
                    await progress(step=step, version=version)
                    if step >= stop_behind[name]:
                        stops[name].set()

                client.progress = tell  # type: ignore[method-assign]
            await agent.run(stops[name])

    async with hub(run, run_dir, tmp_path / "ipc") as endpoint, asyncio.TaskGroup() as group:
        for name in run.agents:
            group.create_task(live(endpoint, name))
    join(run_dir.checkpoints, run)
    return {name: dict(each.policy.model.named_parameters()) for name, each in parts.items()}


def resume(run_dir: RunDir, *overrides: str) -> list[str]:
    run, manifest, warnings = take_up(run_dir, overrides)
    run_dir.write_manifest(manifest)
    assert run == run_dir.read_config()
    return warnings


def lines(run_dir: RunDir, name: str) -> dict[str, list[dict[str, Any]]]:
    """The lines of a file by agent, without times."""
    path = run_dir.path / name
    found: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        values = msgspec.json.decode(line)
        kept = {key: value for key, value in values.items() if key.rpartition("/")[2] not in TIMES}
        found.setdefault(values["agent"], []).append(kept)
    return found


IMITATION: list[dict[str, object]] = [{"rule": "sgt", "lambda": 1.0, "window": 4, "coin": 0.3}, {"rule": "isolated"}]
"""Alpha learns from beta and not the other way round, so that beta may run ahead."""

POOLING: list[dict[str, object]] = [{"rule": "prp"}, {"rule": "xgrpo"}]


@dataclass(frozen=True)
class Played:
    """A run that was never interrupted."""

    run_dir: RunDir
    parameters: dict[str, Any]


@pytest.fixture(scope="module")
def imitated(tmp_path_factory: pytest.TempPathFactory) -> Played:
    path = tmp_path_factory.mktemp("whole")
    run_dir = new_run(path / "run", make_run(*IMITATION))
    played = Played(run_dir, asyncio.run(play(run_dir, path)))
    rescues = [line["alpha/rescues"] for line in lines(run_dir, "metrics.jsonl")["alpha"] if "alpha/rescues" in line]
    assert sum(rescues[:3]) and sum(rescues[3:]), "no rescue on one side of the seam, so that nothing is shown"
    return played


def assert_alike(left: Played, right: Played) -> None:
    """Equal parameters and optimizers of all agents to the bit, and equal files but for times."""
    for name in right.parameters:
        assert_equal(left.parameters[name], right.parameters[name])
        one, other = (load_state(each.run_dir.checkpoints / name / "final").learner for each in (left, right))
        assert one.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(value, other.tensors[key]) for key, value in one.tensors.items())
    for file in ("metrics.jsonl", "evals.jsonl", "rescues.jsonl", "coin.jsonl"):
        assert lines(left.run_dir, file) == lines(right.run_dir, file), file


async def test_six_steps_equal_a_run_of_three_that_is_extended_by_three(imitated: Played, tmp_path: Path) -> None:
    short = new_run(tmp_path / "short", make_run(*IMITATION, steps=3))
    await play(short, tmp_path)
    with pytest.raises(ConfigError, match=r"only `steps` may be given anew, got 'seed=1'"):
        take_up(short, ["seed=1"])
    with pytest.raises(ConfigError, match="at least the 3 that were made, got steps=2"):
        take_up(short, ["steps=2"])
    assert resume(short, "steps=6") == []
    assert_alike(Played(short, await play(short, tmp_path)), imitated)


async def test_six_steps_equal_three_that_were_stopped_and_three(tmp_path: Path) -> None:
    whole = new_run(tmp_path / "whole", make_run(*POOLING))
    expected = Played(whole, await play(whole, tmp_path))
    metrics = lines(whole, "metrics.jsonl")
    assert sum(line.get("alpha/rows/peer", 0) for line in metrics["alpha"]) > 0
    assert sum(line.get("beta/xgrpo/pooled_groups", 0) for line in metrics["beta"]) > 0
    broken = new_run(tmp_path / "broken", make_run(*POOLING))
    await play(broken, tmp_path, stop_behind={"alpha": 3, "beta": 3})
    resume(broken)
    assert_alike(Played(broken, await play(broken, tmp_path)), expected)
    assert steps_saved(broken.checkpoints) == [6, 3]


async def test_steps_of_dynamic_sampling_are_resumed_to_the_bit(tmp_path: Path) -> None:
    run = make_run(*IMITATION)
    agents = {name: msgspec.structs.replace(agent, dynamic_sampling_rounds=2) for name, agent in run.agents.items()}
    run = msgspec.structs.replace(run, agents=agents)
    whole = new_run(tmp_path / "whole", run)
    expected = Played(whole, await play(whole, tmp_path))
    rounds = [line.get("alpha/dynamic_sampling/rounds", 0) for line in lines(whole, "metrics.jsonl")["alpha"]]
    assert sum(rounds[-3:]) > 0, "no round behind the seam, so that nothing is shown"
    broken = new_run(tmp_path / "broken", run)
    await play(broken, tmp_path, stop_behind={"alpha": 3, "beta": 3})
    resume(broken)
    assert_alike(Played(broken, await play(broken, tmp_path)), expected)


async def test_agents_that_stopped_at_unequal_steps_meet_again(imitated: Played, tmp_path: Path) -> None:
    broken = new_run(tmp_path / "broken", make_run(*IMITATION))
    await play(broken, tmp_path, stop_behind={"alpha": 2, "beta": 5})
    checkpoint, _ = newest_whole(broken.checkpoints)
    assert {name: part.step for name, part in checkpoint.parts.items()} == {"alpha": 2, "beta": 5}
    resume(broken)
    assert_alike(Played(broken, await play(broken, tmp_path)), imitated)


async def test_what_came_behind_the_checkpoint_has_never_been(imitated: Played, tmp_path: Path) -> None:
    broken = new_run(tmp_path / "broken", make_run(*IMITATION))
    await play(broken, tmp_path, stop_behind={"alpha": 5, "beta": 5})
    manifest_path(broken.checkpoints, 5).unlink()  # as if the run had been killed before its end
    with (broken.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"agent": "alpha", "st')
    resume(broken)
    assert max(line["step"] for found in lines(broken, "metrics.jsonl").values() for line in found) == 3
    assert not (broken.checkpoints / "alpha" / "step-000005").exists()
    resume(broken)  # killed before it had begun, and taken up once more
    assert_alike(Played(broken, await play(broken, tmp_path)), imitated)


async def test_a_changed_config_and_changed_data_are_refused_by_name(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [msgspec.json.encode({"prompt": f"{letter}:", "answer": letter}) for letter in "abcabcdd"]
    data.write_bytes(b"\n".join(rows))
    tasks = [{"kind": "data", "name": "letters", "path": str(data), "heldout": 1}]
    agent = {"policy": TINY, "sharing": {"rule": "isolated"}, "prompts_per_step": 2, "num_generations": 2}
    run = msgspec.convert({"tasks": tasks, "agents": {"alpha": agent}, "steps": 1, "save_steps": 1}, Run)
    run_dir = new_run(tmp_path / "run", run)
    await play(run_dir, tmp_path)
    run_dir.write_config(msgspec.structs.replace(run, seed=7))
    with pytest.raises(ConfigError, match="seed: 0 -> 7"):
        take_up(run_dir, [])
    run_dir.write_config(run)
    data.write_bytes(b"\n".join(rows).replace(b"b", b"B"))
    resume(run_dir, "steps=2")
    with pytest.raises(ConfigError, match=r"agents\.alpha: the data of 'letters' are not those of the run so far"):
        await play(run_dir, tmp_path)


async def test_a_run_without_a_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path / "run", make_run({"rule": "isolated"}, {"rule": "isolated"}))
    run_dir.checkpoints.mkdir()
    with pytest.raises(RunDirError, match="has no whole checkpoint to go on from"):
        take_up(run_dir, [])


async def test_a_dumped_step_is_made_again_to_the_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = new_run(tmp_path / "run", make_run(*POOLING, dump_every=3, evaluation={"every": 0}))
    await play(run_dir, tmp_path)
    assert sorted(path.name for path in (run_dir.dumps / "alpha").iterdir()) == [
        "step-000001.safetensors",
        "step-000004.safetensors",
    ]
    recorded = {line["step"]: line.get("alpha/loss") for line in lines(run_dir, "metrics.jsonl")["alpha"]}
    console = Console(width=160)
    for step in (1, 4):  # from the weights at the start, and from the checkpoint behind step 3
        assert run_replay(run_dir.path, "alpha", step, console=console) == 0
        shown = capsys.readouterr().out
        assert "equal to the bit" in shown
        assert round(read_dump(dump_path(run_dir.dumps, "alpha", step)).metrics["loss"], 6) == recorded[step]
    with pytest.raises(RunDirError, match="step 5 of alpha was not dumped"):
        run_replay(run_dir.path, "alpha", 5)
    with pytest.raises(ConfigError, match="no agent of this name, got 'alhpa'"):
        run_replay(run_dir.path, "alhpa", 1)
    shutil.rmtree(run_dir.checkpoints / "alpha" / "step-000003")
    with pytest.raises(RunDirError, match=r"takes a checkpoint behind step 3, or dumps of all steps"):
        run_replay(run_dir.path, "alpha", 4)
    dump = read_dump(dump_path(run_dir.dumps, "alpha", 1))
    changed = [replace(row, advantage=row.advantage * 1.0001) for row in dump.rows]
    write_dump(run_dir.dumps, replace(dump, rows=changed))
    assert run_replay(run_dir.path, "alpha", 1, console=console) == 1
    assert "DIFFERS" in capsys.readouterr().out


async def test_numbers_that_end_a_run_are_dumped_with_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(*POOLING, steps=20, save_steps=0)
    run_dir = new_run(tmp_path / "run", msgspec.structs.replace(run, agents={"alpha": run.agents["alpha"]}))
    monkeypatch.setattr(MasterAdamW, "step", lambda _self, _loss: (float("nan"), False))
    with pytest.raises(ExceptionGroup) as raised:
        await play(run_dir, tmp_path)
    (error,) = raised.value.exceptions
    assert isinstance(error, NonFiniteError)
    (path,) = (run_dir.dumps / "alpha").iterdir()
    assert str(path) in str(error)
    dump = read_dump(path)
    assert dump.rows and not dump.metrics
    (part,) = (run_dir.checkpoints / "alpha").iterdir()
    assert load_state(part).agent.step == dump.step - 1, "the weights are those of the last whole step"


def test_processes_of_the_former_life_are_waited_for_and_strangers_are_not(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path / "run", make_run({"rule": "isolated"}, {"rule": "isolated"}))
    for arguments, expected in (([str(run_dir.path)], True), (["elsewhere"], False)):
        with subprocess.Popen([sys.executable, "-c", "input()", *arguments], stdin=subprocess.PIPE) as process:
            manifest = run_dir.read_manifest()
            run_dir.write_manifest(msgspec.structs.replace(manifest, roles=(Role(name="alpha", pid=process.pid),)))
            with pytest.raises(RunDirError, match=f"pid {process.pid}") if expected else nullcontext():
                wait_for_former(run_dir, patience_s=0.05)
            process.communicate(b"\n")
        wait_for_former(run_dir)
