"""A run's checkpoint: all parts or none, the newest whole one, as many as are wanted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from agents.config import AgentConfig, TinyPolicy
from agents.parts import AGENT_FILE, LEARNER_FILE, PART_FILE, PartFacts, files_of, step_name
from agents.tasks.config import Sort
from exchange.types import Version
from mutualrl.checkpoints import differences, forget_rest, join, newest_whole, plain, steps_saved
from mutualrl.config import Run
from mutualrl.errors import RunDirError

AGENT = AgentConfig(policy=TinyPolicy())
RUN = Run(tasks=(Sort(name="sort"),), agents={"alpha": AGENT, "beta": AGENT})


def save(directory: Path, agent: str, step: int, *, files: tuple[str, ...] = (AGENT_FILE, LEARNER_FILE)) -> Path:
    part = directory / agent / step_name(step)
    part.mkdir(parents=True)
    for name in files:
        (part / name).write_bytes(f"{agent} {step}".encode())
    facts = PartFacts(step=step, version=Version(0, step), files=files_of(part))
    (part / PART_FILE).write_bytes(msgspec.json.encode(facts))
    return part


def left(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.glob("*/*"))


def test_a_manifest_is_written_when_all_parts_of_its_step_are_there(tmp_path: Path) -> None:
    save(tmp_path, "alpha", 5)
    save(tmp_path, "alpha", 10)
    assert join(tmp_path, RUN, 5) is None
    save(tmp_path, "beta", 5)
    assert join(tmp_path, RUN, 10) is None
    joined = join(tmp_path, RUN, 5)
    assert joined is not None and newest_whole(tmp_path) == (joined, [])
    assert {name: part.path for name, part in joined.parts.items()} == {
        "alpha": "alpha/step-000005",
        "beta": "beta/step-000005",
    }


def test_weights_alone_are_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, "alpha", 5, files=("model.safetensors",))
    save(tmp_path, "beta", 5)
    assert join(tmp_path, RUN, 5) is None


def test_at_the_end_the_last_parts_are_joined_whatever_their_steps(tmp_path: Path) -> None:
    for agent, step in (("alpha", 5), ("alpha", 9), ("beta", 5), ("beta", 7)):
        save(tmp_path, agent, step)
    save(tmp_path, "alpha", 10, files=("model.safetensors",))
    joined = join(tmp_path, RUN)
    assert joined is not None and joined.step == 7
    assert {name: part.step for name, part in joined.parts.items()} == {"alpha": 9, "beta": 7}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (f"beta/step-000010/{LEARNER_FILE}", b"be"),
        (f"beta/step-000010/{LEARNER_FILE}", None),
        (f"beta/step-000010/{PART_FILE}", b"{}"),
        ("step-000010.json", b"{"),
    ],
    ids=["cut", "gone", "part.json", "manifest"],
)
def test_a_damaged_checkpoint_is_passed_over_and_told(file: str, content: bytes | None, tmp_path: Path) -> None:
    for step in (5, 10):
        for agent in RUN.agents:
            save(tmp_path, agent, step)
        join(tmp_path, RUN, step)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    checkpoint, damage = newest_whole(tmp_path)
    assert checkpoint.step == 5
    assert len(damage) == 1 and "step-000010" in damage[0]
    (tmp_path / "alpha" / "step-000005" / AGENT_FILE).unlink()
    with pytest.raises(RunDirError, match=r"no whole checkpoint to go on from[\s\S]*step-000010[\s\S]*agent\.msgpack"):
        newest_whole(tmp_path)


def test_the_newest_are_kept_and_what_no_manifest_could_name_yet(tmp_path: Path) -> None:
    run = msgspec.structs.replace(RUN, save_total_limit=2)
    for step in (5, 10, 15, 20):
        save(tmp_path, "alpha", step)
    for step in (5, 10, 15):
        save(tmp_path, "beta", step)
        join(tmp_path, run, step)
    assert steps_saved(tmp_path) == [15, 10]
    assert left(tmp_path) == [
        *(f"alpha/step-0000{step}" for step in (10, 15, 20)),
        *(f"beta/step-0000{step}" for step in (10, 15)),
    ]


def test_what_came_behind_a_checkpoint_is_forgotten_and_what_killed_writers_left(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        for agent in RUN.agents:
            save(tmp_path, agent, step)
        if step < 15:
            join(tmp_path, RUN, step)
    (tmp_path / "alpha" / ".step-000020.77.tmp").mkdir()
    (tmp_path / "alpha" / "final").symlink_to("step-000015")
    checkpoint, _ = newest_whole(tmp_path)
    for _ in range(2):
        forget_rest(tmp_path, checkpoint)
        assert left(tmp_path) == [f"{agent}/step-0000{step}" for agent in ("alpha", "beta") for step in ("05", "10")]


def test_differences_of_configs_are_named_by_path() -> None:
    changed = msgspec.structs.replace(AGENT, learning_rate=0.5)
    other = msgspec.structs.replace(RUN, steps=7, agents={"alpha": AGENT, "beta": changed})
    assert [*differences(plain(RUN), plain(other))] == ["steps: 100 -> 7", "agents.beta.learning_rate: 1e-06 -> 0.5"]
