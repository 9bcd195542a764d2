"""Reading what runs leave behind, whole and torn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic_run import ALONE, TAUGHT, eval_line, make_config, write_lines, write_run

from agents.sharing.config import Isolated
from mutualrl.report.comparison import rollouts, seconds
from mutualrl.report.hits import hit_rate, hit_series
from mutualrl.report.outcomes import Pair, judge, mean_gain
from mutualrl.report.records import load_record


def test_reads_a_whole_run(tmp_path: Path) -> None:
    run = load_record(write_run(tmp_path / "run", TAUGHT))
    assert run.agents == ("alpha", "beta")
    assert run.tasks("alpha") == ["reverse", "sort"]
    assert run.tasks("beta") == ["sort", "reverse"]
    assert [row.step for row in run.curve("alpha", "sort")] == [0, 20, 40, 60, 80, 100]
    assert run.unreadable_lines == 0
    assert rollouts(run, "alpha") == 100 * 32 * 6
    assert seconds(run, "alpha") == pytest.approx(80.0)


def test_torn_and_foreign_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", TAUGHT)
    whole = load_record(directory)
    for name in ("evals.jsonl", "metrics.jsonl", "rescues.jsonl"):
        with (directory / name).open("ab") as file:
            file.write(b'[1, 2]\n"text"\n{"agent": 3}\n\xff\xfe\n{"agent":"alpha","step":1')
    torn = load_record(directory)
    assert torn.unreadable_lines == 3 * 5
    assert (torn.evals, torn.steps, torn.rescues) == (whole.evals, whole.steps, whole.rescues)


HUGE = b"9" * 400


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("metrics.jsonl", b'{"agent":"alpha","step":1,"alpha/reward":' + HUGE + b"}"),
        ("metrics.jsonl", b'{"agent":"alpha","step":1,"wall_s":' + HUGE + b"}"),
        ("metrics.jsonl", b'{"agent":"alpha","step":' + HUGE + b"}"),
        ("metrics.jsonl", b'{"agent":"alpha","step":true}'),
        ("metrics.jsonl", b'{"agent":"alpha","step":-1}'),
        ("metrics.jsonl", b"[" * 200_000),
        ("metrics.jsonl", b'{"a":' * 200_000),
        ("evals.jsonl", b'{"agent":"alpha","step":1,"task":"sort","accuracy":1e999}'),
        ("evals.jsonl", b'{"agent":"alpha","step":1,"task":"sort","accuracy":NaN}'),
        ("evals.jsonl", b'{"agent":"alpha","step":1,"task":"sort","accuracy":' + HUGE + b"}"),
        ("evals.jsonl", b'{"agent":"alpha","step":' + HUGE + b',"task":"sort","accuracy":0.5}'),
        ("evals.jsonl", b'{"agent":"alpha","step":1,"task":"sort","accuracy":0.5,"correct":[1,999],"prompt_ids":["a","b"]}'),
        ("evals.jsonl", b"[" * 200_000),
        ("rescues.jsonl", b'{"agent":"a","step":' + HUGE + b',"peer":"b","task":"t","prompt":"p","text":"x"}'),
        ("rescues.jsonl", b'{"agent":"a","step":1,"peer":"b","task":"t","prompt":"p","text":"x","residual":NaN}'),
    ],
)
def test_hostile_lines_are_left_out_and_counted(tmp_path: Path, name: str, line: bytes) -> None:
    (tmp_path / name).write_bytes(line + b"\n")
    run = load_record(tmp_path)
    assert (run.unreadable_lines, run.evals, run.steps, run.rescues) == (1, (), (), ())


def test_directories_in_the_place_of_files_are_counted(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "evals.jsonl", "rescues.jsonl", "config.json", "manifest.json", "exchange.json"):
        (tmp_path / name).mkdir()
    run = load_record(tmp_path)
    assert (run.unreadable_lines, run.config, run.manifest, run.exchange) == (3, None, None, None)


@pytest.mark.parametrize("name", ["config.json", "manifest.json", "exchange.json"])
@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"agents":' * 100_000, b'{"steps":' + HUGE + b"}"])
def test_hostile_whole_files_are_as_good_as_missing(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    run = load_record(tmp_path)
    assert (run.config, run.manifest, run.exchange) == (None, None, None)


def test_not_a_number_is_no_value(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"agent":"alpha","step":1,"wall_s":1.0,"alpha/reward":NaN,"alpha/loss":null,"alpha/entropy":0.5}\n'
    )
    [step] = load_record(tmp_path).steps
    assert dict(step.values) == {"entropy": 0.5}


def test_an_empty_directory_is_an_empty_run_and_a_missing_one_an_error(tmp_path: Path) -> None:
    run = load_record(tmp_path)
    assert (run.agents, run.evals, run.config, run.exchange) == ((), (), None, None)
    with pytest.raises(FileNotFoundError, match="no run directory"):
        load_record(tmp_path / "missing")


def test_unreadable_whole_files_are_as_good_as_missing(tmp_path: Path) -> None:
    for name in ("config.json", "manifest.json", "exchange.json"):
        (tmp_path / name).write_text('{"half":')
    run = load_record(tmp_path)
    assert (run.config, run.manifest, run.exchange) == (None, None, None)


def test_an_evaluation_made_twice_counts_once(tmp_path: Path) -> None:
    lines = [eval_line("alpha", "sort", 20, [0, 0]), eval_line("alpha", "sort", 20, [1, 0])]
    write_lines(tmp_path / "evals.jsonl", lines)
    [row] = load_record(tmp_path).evals
    assert row.accuracy == 0.5


def test_hit_rate_counts_every_prompt_alike(tmp_path: Path) -> None:
    def line(step: int, rate: float, prompts: int) -> dict[str, object]:
        return {"agent": "a", "step": step, "a/peer/b/hit_rate": rate, "a/peer/b/prompts": prompts}

    write_lines(tmp_path / "metrics.jsonl", [line(1, 1.0, 30), line(2, 0.5, 10), line(2, 0.0, 10)])
    run = load_record(tmp_path)
    # 30 + 5 + 0 hits of 50 prompts; step 2 has 5 of 20.
    assert hit_rate(run, "a", ["b"]) == pytest.approx(0.7)
    assert hit_series(run, "a", ["b"]) == [(1, 1.0), (2, 0.25)]
    assert hit_rate(run, "b", ["a"]) is None


def test_outcomes_against_the_control_by_hand(tmp_path: Path) -> None:
    before = [eval_line("alpha", "sort", 0, [0, 0, 0, 1])]
    write_lines(tmp_path / "evals.jsonl", [*before, eval_line("alpha", "sort", 50, [1, 1, 0, 1])])
    control = tmp_path / "control"
    control.mkdir()
    write_lines(control / "evals.jsonl", [*before, eval_line("alpha", "sort", 50, [0, 1, 0, 0])])
    [outcome] = judge([Pair(run=load_record(tmp_path), control=load_record(control))])
    assert (outcome.before, outcome.after, outcome.control) == (0.25, 0.75, 0.25)
    assert outcome.gain is not None
    assert outcome.gain.mean == pytest.approx(0.5)
    assert (outcome.harmed, outcome.heldout, outcome.own_skill) == (0, 4, False)


def test_own_skills_and_peers_are_averaged_apart(tmp_path: Path) -> None:
    run = load_record(write_run(tmp_path / "run", TAUGHT))
    control = load_record(write_run(tmp_path / "control", ALONE, make_config(Isolated())))
    pair = Pair(run=run, control=control)
    peers, own = mean_gain([pair], own_skill=False), mean_gain([pair], own_skill=True)
    assert peers is not None and own is not None
    assert peers.low > 0.25
    assert abs(own.mean) < 0.05
    assert mean_gain([Pair(run=run, control=None)], own_skill=False) is None


def test_a_run_before_its_first_step_has_no_result(tmp_path: Path) -> None:
    (tmp_path / "evals.jsonl").write_text(json.dumps(eval_line("alpha", "sort", 0, [1, 0])) + "\n")
    run = load_record(tmp_path)
    [outcome] = judge([Pair(run=run, control=run)])
    assert (outcome.before, outcome.after, outcome.gain, outcome.harmed) == (0.5, None, None, None)
