"""Generated tasks, data files and the schedule."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.errors import TaskError
from agents.tasks.config import Add, Data, Greatest, Multiply, Reverse, Sort, Subtract, SwapWords, TaskConfig
from agents.tasks.load import TaskData, load_task, prompt_id
from agents.tasks.schedule import draw
from exchange.types import Message


def answers(task: TaskData) -> dict[str, object]:
    return {prompt.text: prompt.columns["answer"] for prompt in task.train + task.heldout}


@pytest.mark.parametrize(
    ("config", "size", "problem", "answer"),
    [
        (Reverse(name="r"), 216, "reverse abd:", "dba"),
        (Sort(name="s"), 216, "sort dab:", "abd"),
        (Add(name="a"), 441, "20+3=", "23"),
        (Add(name="a2", smallest=10, largest=99, limit=9000), 8100, "10+99=", "109"),
        (Subtract(name="m"), 210, "19-3=", "16"),
        (Subtract(name="m2", smallest=10, largest=20, heldout=6), 66, "20-10=", "10"),
        (Multiply(name="x"), 169, "12*11=", "132"),
        (Greatest(name="g", largest=9), 1000, "greatest of 3, 9, 7:", "9"),
        (SwapWords(name="w"), 132, "swap red cat:", "cat red"),
        (Reverse(name="t", template="{x} backwards {y}"), 216, "abd backwards {y}", "dba"),
    ],
)
def test_a_small_space_is_enumerated_with_right_answers(config: TaskConfig, size: int, problem: str, answer: str) -> None:
    task = load_task(config, seed=0)
    assert len(answers(task)) == size == len(task.train) + len(task.heldout)
    assert answers(task)[problem] == answer


@pytest.mark.parametrize("config", [Add(name="n", smallest=3, largest=8), Subtract(name="n"), Multiply(name="n", smallest=1)])
def test_arithmetic_is_right_and_stays_in_its_range(config: Add | Subtract | Multiply) -> None:
    task = load_task(msgspec.structs.replace(config, heldout=1), seed=0)
    for problem, answer in answers(task).items():
        numbers = [int(each) for each in re.split(r"\D", problem)[:2]]
        assert config.smallest <= min(numbers) <= max(numbers) <= config.largest
        assert eval(problem.removesuffix("=")) == int(str(answer)) >= 0


def test_the_sign_is_written_as_asked() -> None:
    task = load_task(Add(name="n", sign=" plus ", template="{x} ="), seed=0)
    assert answers(task)["12 plus 7 ="] == "19"


def test_a_range_of_numbers_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="`largest` must be > 20 and <= 1000000000, got largest=10"):
        Add(name="a", smallest=20, largest=10)


def test_a_few_shot_prompt_is_a_template_of_several_lines() -> None:
    task = load_task(Add(name="a", template="1+1=2\n2+3=5\n{x}="), seed=0)
    assert answers(task)["1+1=2\n2+3=5\n20+3="] == "23"


def test_the_fingerprint_is_of_prompts_columns_split_and_order() -> None:
    def made(*, seed: int = 0, **settings: int) -> TaskData:
        return load_task(msgspec.structs.replace(Add(name="a"), **settings), seed=seed)

    task = made()
    assert task.fingerprint == made().fingerprint
    first = task.train[0]
    other_column = replace(first, columns={**first.columns, "level": 1})
    different = [
        task,
        made(seed=1),
        made(heldout=65),
        made(largest=21),
        replace(task, name="b"),
        replace(task, train=task.train[::-1]),
        replace(task, train=[other_column, *task.train[1:]]),
        replace(task, train=[*task.train[1:]]),
    ]
    assert len({each.fingerprint for each in different}) == len(different)


def test_a_fingerprint_does_not_depend_on_the_order_of_columns_or_on_addresses() -> None:
    def with_columns(**columns: object) -> str:
        prompt = replace(load_task(Add(name="a"), seed=0).train[0], columns=columns)
        return TaskData(name="a", train=[prompt], heldout=[]).fingerprint

    assert with_columns(a=1, b={"x": 1, "y": 2}) == with_columns(b={"y": 2, "x": 1}, a=1)
    assert with_columns(a=np.arange(3)) == with_columns(a=[0, 1, 2]) != with_columns(a=np.arange(1, 4))
    assert with_columns(a=object()) == with_columns(a=object())


def test_a_huge_space_gives_limit_distinct_problems() -> None:
    task = load_task(Reverse(name="r", alphabet="abcdefghijklmnopqrstuvwxyz", length=32, limit=300), seed=0)
    assert len(answers(task)) == 300
    assert all(answer == text[len("reverse ") : -1][::-1] for text, answer in answers(task).items())


def test_more_problems_than_a_run_can_hold_are_refused_at_once() -> None:
    with pytest.raises(TaskError, match="would hold 3000000 problems, the most is 250000; lower `limit`, got limit=3000000"):
        load_task(Reverse(name="r", length=32, limit=3_000_000), seed=0)
    assert len(answers(load_task(Reverse(name="r", length=2, limit=3_000_000, heldout=1), seed=0))) == 36


def test_splits_are_disjoint_and_fixed_by_seed_and_name() -> None:
    def ids(name: str, seed: int) -> list[str]:
        return [prompt.id for prompt in load_task(Sort(name=name), seed=seed).heldout]

    task = load_task(Sort(name="s"), seed=3)
    assert not {p.id for p in task.train} & {p.id for p in task.heldout}
    assert ids("s", 3) == ids("s", 3)
    assert set(ids("s", 3)) != set(ids("s", 4))
    assert not set(ids("s", 3)) & set(ids("other", 3))


def test_prompt_id_is_a_hash_of_task_and_messages() -> None:
    message = Message(role="user", content="x")
    assert prompt_id("t", (message,)) == prompt_id("t", (Message(role="user", content="x"),))
    others = {
        prompt_id("u", (message,)),
        prompt_id("t", (Message(role="system", content="x"),)),
        prompt_id("t", (message, message)),
        prompt_id("t", (message,)),
    }
    assert len(others) == 4


def test_too_few_prompts_for_the_held_out_ones() -> None:
    with pytest.raises(TaskError, match=r"'w' has 2 different prompts.*heldout=64"):
        load_task(SwapWords(name="w", words=("a", "b", "a")), seed=0)


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_rows_pass_columns_through(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "brief"}, {"role": "user", "content": "2*3"}]
    path = write(
        tmp_path / "d.jsonl",
        {"prompt": "1+1", "answer": "2", "level": 1},
        "\n",
        {"prompt": turns, "answer": "6"},
        {"prompt": "1+1", "answer": "a second row with an equal prompt"},
    )
    task = load_task(Data(name="d", path=path, heldout=1, template="Q: {x}"), seed=0)
    by_text = {prompt.text: prompt for prompt in task.train + task.heldout}
    assert set(by_text) == {"Q: 1+1", "brief\n2*3"}
    assert by_text["Q: 1+1"].columns == {"answer": "2", "level": 1}
    assert not by_text["Q: 1+1"].conversational
    assert by_text["brief\n2*3"].conversational
    assert [message.role for message in by_text["brief\n2*3"].messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json\n", r"d\.jsonl, line 2: not a JSON value"),
        ("[1]\n", "line 2: a row must be an object"),
        ('{"question": "x"}\n', "line 2: no `prompt` column, got columns question"),
        ('{"prompt": 3}\n', "line 2: `prompt` must be text or a list of messages"),
        ('{"prompt": "x", "deep": ' + "[" * 100_000 + "]" * 100_000 + "}\n", r"d\.jsonl, line 2: .*nested too deep"),
        ('{"prompt": "x", "policy": "y"}\n', r"line 2: reward functions get 'policy' from the run; rename"),
        ('{"prompt": "x", "prompts": 1, "completions": 2}\n', r"line 2: reward functions get 'completions' from the run"),
        ('{"prompt": []}\n', "line 2: `prompt` has no messages"),
        ('{"prompt": [{"role": "user", "content": ["part"]}]}\n', r"line 2: `prompt` must be .*content"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "x"}, line)
    with pytest.raises(TaskError, match=message):
        load_task(Data(name="d", path=path, heldout=1), seed=0)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", '\ufeff{"prompt": "x"}\n', {"prompt": "\ufeffy"})
    task = load_task(Data(name="d", path=path, heldout=1), seed=0)
    assert {prompt.text for prompt in task.train + task.heldout} == {"x", "\ufeffy"}


def test_empty_and_missing_data(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no rows in path="):
        load_task(Data(name="d", path=write(tmp_path / "empty.jsonl")), seed=0)
    with pytest.raises(TaskError, match="cannot read path="):
        load_task(Data(name="d", path=str(tmp_path / "none.jsonl")), seed=0)


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", *({"prompt": str(n)} for n in range(10)))
    task = load_task(Data(name="d", path=path, heldout=1, limit=4), seed=0)
    assert {prompt.text for prompt in task.train + task.heldout} == {"0", "1", "2", "3"}


@pytest.mark.slow
def test_a_saved_dataset_is_read_with_its_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": f"p{n}", "answer": str(n)} for n in range(5)])
    datasets.DatasetDict({"train": rows, "test": rows.select([0, 1])}).save_to_disk(str(tmp_path / "d"))
    task = load_task(Data(name="d", path=str(tmp_path / "d"), split="test", heldout=1), seed=0)
    assert answers(task) == {"p0": "0", "p1": "1"}
    with pytest.raises(TaskError, match="split='absent'"):
        load_task(Data(name="d", path=str(tmp_path / "d"), split="absent", heldout=1), seed=0)


TWO_TASKS = [*load_task(Reverse(name="r", heldout=72), seed=0).train, *load_task(Sort(name="s", heldout=72), seed=0).train]


@settings(max_examples=40)
@given(step=st.integers(0, 2000), few=st.integers(1, 40), more=st.integers(0, 40), seed=st.integers(0, 9))
def test_agents_with_fewer_prompts_meet_the_head_of_the_others(step: int, few: int, more: int, seed: int) -> None:
    shorter = draw(TWO_TASKS, seed=seed, step=step, count=few)
    longer = draw(TWO_TASKS, seed=seed, step=step, count=few + more)
    assert shorter == longer[:few]
    assert len({prompt.id for prompt in longer}) == few + more


def test_interleaving_of_tasks_does_not_matter() -> None:
    mixed = [prompt for pair in zip(TWO_TASKS[:144], TWO_TASKS[144:], strict=True) for prompt in pair]
    assert draw(mixed, seed=1, step=7, count=32) == draw(TWO_TASKS, seed=1, step=7, count=32)


def test_tasks_are_mixed_evenly_also_when_the_count_is_odd() -> None:
    counts = Counter(prompt.task for step in range(100) for prompt in draw(TWO_TASKS, seed=0, step=step, count=3))
    assert counts == {"r": 150, "s": 150}


@pytest.mark.parametrize("count", [1, 8, 32])
def test_an_epoch_meets_every_prompt_equally_often_and_none_again_soon(count: int) -> None:
    train = TWO_TASKS[:144]
    met: dict[str, list[int]] = {prompt.id: [] for prompt in train}
    for step in range(144):
        for prompt in draw(train, seed=5, step=step, count=count):
            met[prompt.id].append(step)
    assert {len(steps) for steps in met.values()} == {count}
    gaps = [later - sooner for steps in met.values() for sooner, later in pairwise(steps)]
    assert min(gaps, default=144) >= 144 // count // 2


def test_draws_depend_on_the_seed_and_the_epoch() -> None:
    def ids(seed: int, step: int) -> list[str]:
        return [prompt.id for prompt in draw(TWO_TASKS[:144], seed=seed, step=step, count=20)]

    assert ids(0, 0) != ids(1, 0)
    assert ids(0, 0) != ids(0, 144)


def test_a_small_task_is_used_up_and_the_others_go_on() -> None:
    train = TWO_TASKS[:3] + TWO_TASKS[144:164]
    drawn = draw(train, seed=0, step=0, count=20)
    assert Counter(prompt.task for prompt in drawn) == {"r": 3, "s": 17}
    with pytest.raises(TaskError, match=r"at most the number of training prompts \(23\), got prompts_per_step=24"):
        draw(train, seed=0, step=0, count=24)
