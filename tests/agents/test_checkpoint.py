"""A part of a checkpoint is whole or not there, whenever its writer is killed; what it holds comes back to the bit."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from agents.checkpoint import Resumable, load_state, point_at, save_part
from agents.errors import CheckpointError
from agents.hits import Drawn
from agents.learner import LearnerState
from agents.parts import AGENT_FILE, LEARNER_FILE, read_part, step_name
from agents.peers import Attempt, Closed, FeedState
from agents.policies.policy import Policy
from agents.sharing.rule import Waiting
from agents.state import AgentState, pack_waiting, unpack_waiting
from agents.testing import make_prompt
from exchange.types import AgentName, Cursor, PromptId, Version

BETA, P0 = AgentName("beta"), PromptId("p0")
VERSION = Version(1, 3)


class TwoFiles:
    """Saves as a policy does, in a moment."""

    def save(self, path: Path) -> None:
        for name in ("model.safetensors", "config.json"):
            (path / name).write_bytes(name.encode())


POLICY = cast("Policy", TwoFiles())


def a_state(step: int = 3) -> Resumable:
    prompt = make_prompt("p0")
    waiting = {P0: Waiting(prompt=prompt, prompt_ids=np.array([4, 2], np.int32), since=1)}
    feed = FeedState(
        clock_s=2.5,
        steps_cursor=Cursor(7),
        rows_cursor=Cursor(5),
        attempts={BETA: {P0: Attempt(VERSION, 1.5)}},
        newest={BETA: VERSION},
        pending=(Closed(BETA, 4, VERSION, (P0,), 2.0),),
        unfollowed=(),
        hits=(Drawn(step=2, missing={BETA: {P0}}),),
    )
    agent = AgentState(
        step=step,
        evaluated=2,
        wall_s=1.25,
        met=[0, 2],
        lines={"metrics.jsonl": 4},
        data={"sort": "f"},
        waiting=pack_waiting(waiting),
        rule={"": [(1.0, 2)]},
        trial={P0: True},
        feed=feed,
    )
    tensors = {"optimizer.exp_avg.0": torch.tensor([0.1, 1e-30]), "optimizer.step.0": torch.tensor(3.0)}
    return Resumable(learner=LearnerState(tensors=tensors, steps=step, non_finite=1), agent=agent)


def save(directory: Path, step: int = 3) -> Path:
    return save_part(POLICY, directory, step=step, version=VERSION, state=a_state(step))


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    part = save(tmp_path)
    facts, found, told = read_part(part, check=True), load_state(part), a_state()
    assert (part.name, facts.step, facts.version, facts.resumable) == ("step-000003", 3, VERSION, True)
    assert found.agent.feed == told.agent.feed
    assert found.agent.rule == {"": [[1.0, 2]]}
    assert (found.learner.steps, found.learner.non_finite) == (3, 1)
    assert found.learner.tensors.keys() == told.learner.tensors.keys()
    assert all(torch.equal(value, told.learner.tensors[key]) for key, value in found.learner.tensors.items())
    prompt = make_prompt("p0")
    waiting = unpack_waiting(found.agent.waiting, {P0: prompt})[P0]
    assert (waiting.prompt, waiting.prompt_ids.tolist(), waiting.since) == (prompt, [4, 2], 1)


def test_a_part_is_never_changed(tmp_path: Path) -> None:
    part = save(tmp_path)
    before = (part / AGENT_FILE).stat()
    assert save(tmp_path) == part
    assert (part / AGENT_FILE).stat() == before


def test_weights_of_no_step_are_kept_and_not_resumed(tmp_path: Path) -> None:
    part = save_part(POLICY, tmp_path, step=3, version=VERSION, state=None)
    assert (part / "model.safetensors").is_file()
    with pytest.raises(CheckpointError, match="weights alone, of a step that failed in its middle"):
        load_state(part)


@pytest.mark.parametrize("name", [LEARNER_FILE, AGENT_FILE, "config.json"])
def test_a_file_that_rotted_or_is_gone_is_named(name: str, tmp_path: Path) -> None:
    file = save(tmp_path) / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name} is not as it was saved"):
        read_part(file.parent, check=True)
    file.unlink()
    with pytest.raises(CheckpointError, match=name):
        read_part(file.parent, check=True)


def killed_at(number: int, directory: Path) -> bool:
    """Whether a child that saves part 4 and makes it the final one was killed at its n-th touch of the disk."""
    child = os.fork()
    if child == 0:
        count = 0

        def touch(*_: object) -> None:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            if event.startswith(("open", "os.", "shutil.")):
                touch()

        fsync = os.fsync
        os.fsync = lambda fd: (touch(), fsync(fd), touch())[1]  # type: ignore[func-returns-value]
        sys.addaudithook(watch)
        point_at(directory, "final", save(directory, 4))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.slow
def test_killed_at_any_touch_of_the_disk_every_part_is_whole_or_not_there(tmp_path: Path) -> None:
    base = tmp_path / "base"
    point_at(base, "final", save(base))
    number, seen = 1, set()
    while True:
        directory = tmp_path / "again"
        shutil.copytree(base, directory, symlinks=True)
        killed = killed_at(number, directory)
        parts = sorted(path.name for path in directory.iterdir() if path.name.startswith("step-"))
        for name in (*parts, "final"):
            read_part(directory / name, check=True)
            load_state(directory / name)
        assert parts[0] == step_name(3)
        seen.add((len(parts), (directory / "final").readlink().name))
        assert load_state(save(directory, 4)).agent.step == 4  # what was left behind is in nobody's way
        shutil.rmtree(directory)
        if not killed:
            break
        number += 1
    assert number > 20
    assert seen == {(1, "step-000003"), (2, "step-000003"), (2, "step-000004")}
