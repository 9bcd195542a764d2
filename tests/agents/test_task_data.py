"""Layouts that users of TRL, verl and verifiers bring, and reasoning-gym's tasks."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agents.errors import RewardError, TaskError
from agents.rewards.rewards import Rewards
from agents.tasks.config import Data, ReasoningGym
from agents.tasks.load import TaskData, load_task
from agents.types import Prompt

ROWS: list[dict[str, Any]] = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n} for n in range(4)]

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}


def prompts(task: TaskData) -> dict[str, Prompt]:
    return {prompt.text: prompt for prompt in task.train + task.heldout}


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.mark.parametrize("name", ["d.json", "lines.json", "d.jsonl", "d.parquet"])
def test_every_file_format_gives_the_same_task(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "d.parquet":
        write_parquet(path, ROWS)
    else:
        path.write_text(json.dumps(ROWS, indent=1) if name == "d.json" else "".join(json.dumps(row) + "\n" for row in ROWS))
    task = load_task(Data(name="d", path=str(path), heldout=1, limit=3), seed=0)
    assert prompts(task)["2+1="].columns == {"answer": "3", "level": 2}
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]))
    assert task.fingerprint == load_task(Data(name="d", path=str(tmp_path / "same.jsonl"), heldout=1), seed=0).fingerprint


def test_files_that_are_not_what_they_say_are_named(tmp_path: Path) -> None:
    (tmp_path / "d.parquet").write_bytes(b"no parquet")
    (tmp_path / "d.json").write_text("[{")
    (tmp_path / "one.json").write_text(json.dumps(ROWS[0]))
    for data, message in [
        (Data(name="d", path=str(tmp_path / "d.parquet")), r"cannot read path='.*d\.parquet'"),
        (Data(name="d", path=str(tmp_path / "none.parquet")), r"cannot read path='.*none\.parquet'"),
        (Data(name="d", path=str(tmp_path / "d.json")), r"d\.json: not a JSON value"),
        (Data(name="d", path=str(tmp_path / "one.json"), source="json"), "must hold a list of rows, got dict"),
        (Data(name="d", path=str(tmp_path / "none.json"), source="json"), "cannot read path="),
    ]:
        with pytest.raises(TaskError, match=message):
            load_task(data, seed=0)


async def test_verls_parquet_is_read_and_judged_without_a_setting(tmp_path: Path) -> None:
    write_parquet(tmp_path / "d.parquet", [VERL, VERL | {"prompt": [{"role": "user", "content": "2+2?"}]}])
    task = load_task(Data(name="d", path=str(tmp_path / "d.parquet"), heldout=1), seed=0)
    row = prompts(task)["1+1?"]
    assert row.conversational
    assert row.columns["ground_truth"] == "2" and row.columns["extra_info"] == {"split": "train", "index": 0}

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        assert (data_source, extra_info["index"]) == ("openai/gsm8k", 0)
        return float(solution_str == ground_truth)

    rewards = Rewards([compute_score, "exact_match"])
    rewards.check_columns([row])
    assert (await rewards.score([row], [b"2"])).total.tolist() == [2.0]


def test_a_ground_truth_of_its_own_is_kept(tmp_path: Path) -> None:
    write_parquet(
        tmp_path / "d.parquet", [VERL | {"ground_truth": "mine"}, VERL | {"prompt": [{"role": "user", "content": "x"}]}]
    )
    task = load_task(Data(name="d", path=str(tmp_path / "d.parquet"), heldout=1), seed=0)
    assert prompts(task)["1+1?"].columns["ground_truth"] == "mine"


def test_a_prompt_may_have_another_name(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"question": "2+2?", "answer": "4"}\n')
    task = load_task(Data(name="d", path=str(tmp_path / "d.jsonl"), prompt_column="question", heldout=1), seed=0)
    assert prompts(task)["1+1?"].columns == {"answer": "2"}
    with pytest.raises(TaskError, match="line 1: no `prompt` column, got columns answer, question; `prompt_column`"):
        load_task(Data(name="d", path=str(tmp_path / "d.jsonl"), heldout=1), seed=0)


@pytest.mark.slow
async def test_reasoning_gyms_problems_and_its_own_scorer() -> None:
    pytest.importorskip("reasoning_gym")
    config = ReasoningGym(
        name="sums", dataset="chain_sum", size=40, heldout=8, template="{x} Answer:", config={"max_terms": 2, "max_digits": 1}
    )
    task = load_task(config, seed=0)
    assert not {each.id for each in task.train} & {each.id for each in task.heldout}
    row = task.train[0]
    assert row.text.endswith(" Answer:")
    other = Prompt(id=row.id, task="other", messages=row.messages, columns={"answer": "1"})
    right = str(row.columns["answer"])
    rewards = Rewards(["reasoning_gym"], on_error="abstain")
    try:
        rewards.check_columns([row, other])
        texts = [f" {right}\n".encode(), f"It is <answer>{right}</answer>.".encode(), b"no", right.encode()]
        scores = await rewards.score([row, row, row, other], texts)
        assert scores.total[:3].tolist() == [1, 1, 0]
        assert rewards.take() == {"rewards/reasoning_gym/error": 0}
        await rewards.score([other], [b"1"])
        assert rewards.take() == {"rewards/reasoning_gym/error": 1}, "no prompt of such a task: a mistake, not abstention"
    finally:
        rewards.close()


@pytest.mark.slow
def test_what_reasoning_gym_cannot_make_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("reasoning_gym")
    from agents.tasks import gym_rows

    for request, message in [
        ({"dataset": "chain_sums", "settings": {}}, "reasoning-gym has no data set 'chain_sums'; it has chain_sum"),
        ({"dataset": "chain_sum", "settings": {"terms": 3}}, "'chain_sum' with {'terms': 3} cannot be made: TypeError: "),
    ]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
        gym_rows.main()
        assert json.loads(capsys.readouterr().out)["error"].startswith(message)


def test_an_error_of_the_process_that_makes_problems_names_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.tasks.gym._BOOT", 'print(\'{"error": "no such data set"}\')')
    with pytest.raises(TaskError, match="task 'g': no such data set"):
        load_task(ReasoningGym(name="g", dataset="chain_sum"), seed=0)
    with pytest.raises(ValueError, match=r"set size beside it, got config.size"):
        ReasoningGym(name="g", dataset="chain_sum", config={"size": 3})


def test_without_the_library_the_command_that_installs_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("reasoning_gym", "math_verify"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r})")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TaskError, match=r"it needs reasoning-gym, `pip install 'mutualrl\[data\]'`"):
        load_task(ReasoningGym(name="g", dataset="chain_sum"), seed=0)
    with pytest.raises(RewardError, match=r"'accuracy_reward' cannot be imported: .*it needs math-verify, `pip install"):
        Rewards(["accuracy_reward"])


@pytest.mark.slow
async def test_accuracy_is_of_mathematics_boxed_or_plain() -> None:
    pytest.importorskip("math_verify")
    cases: list[tuple[str, object, float | None]] = [
        (r"My answer is \boxed{\frac{1}{3}}", r"\frac{1}{3}", 1),
        (r"\boxed{1/2}", r"\frac{1}{3}", 0),
        ("The answer is 12.", "#### 12", 1),
        (" 0.5\n", r"$\frac12$", 1),
        (r"$\boxed{12}$ and 13", 12, 1),
        ("nothing here", "12", 0),
        ("", "12", 0),
        ("12", "no mathematics", None),
        ("12", None, None),
        (r"\boxed{9^{9^{9^9}}}", "13", None),
    ]
    rows = [Prompt(id=load_id(n), task="t", messages=(), columns={"answer": right}) for n, (_, right, _) in enumerate(cases)]
    rewards = Rewards(["accuracy_reward"])
    try:
        scores = await rewards.score(rows, [text.encode() for text, _, _ in cases])
        assert [None if each != each else each for each in scores.total.tolist()] == [expected for _, _, expected in cases]
    finally:
        rewards.close()


def load_id(number: int) -> Any:
    return f"p{number}"
