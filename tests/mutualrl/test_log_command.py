"""`mutualrl log`: what it lists, prints as JSON, and refuses."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import exchange
from exchange.disk import DiskStore
from exchange.testing import FakeClock, a_rollout_group, a_success, publication_of, rewards_of, step_prompts
from exchange.types import AgentName, PromptId, Version
from mutualrl import cli, exit_codes

GOLDEN = Path(__file__).parents[1] / "golden" / "log.txt"
# Cursors of a real hub begin at the clock.
FIRST = 1_883_320_010_656_448_512

Log = Callable[..., tuple[int, str]]


class Critique(exchange.PromptExperience, frozen=True, kw_only=True, tag="critiques/1"):
    """A kind of a project's own."""

    words: np.ndarray[Any, np.dtype[np.uint8]]
    word_lengths: np.ndarray[Any, np.dtype[np.int32]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two agents, as its hub left it."""
    critique = Critique(
        agent=AgentName("judge"),
        step=2,
        version=Version(1, 0),
        prompt_id=PromptId("4f0c"),
        task="reverse",
        words=np.frombuffer(b"too\xffshort", np.uint8),
        word_lengths=np.array([4, 5], np.int32),
    )
    crossed = [
        rewards_of("alpha", 1, "4f0c", [1.0, float("nan")]),
        a_success("beta", 1, "77aa", "cbä"),
        step_prompts("alpha", 1, "4f0c", "77aa"),
        a_rollout_group("alpha", 2, "4f0c", completions=2, tokens=100),
        critique,
    ]
    clock = FakeClock(1_700_000_000.0)
    store = DiskStore.open(tmp_path / "run" / "records", run_id="r", clock=clock, wall_ns=lambda: int(clock.now * 1e9))
    store.commit([publication_of(each, FIRST + n, at=clock.now + n / 8) for n, each in enumerate(crossed)])
    store.close()
    return tmp_path / "run"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Log]:
    """Calls the command; its exit code, and what was printed on standard output or, where it failed, on standard error."""

    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["mutualrl", "log", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        shown = capsys.readouterr()
        return ended.value.code, shown.err if ended.value.code else shown.out

    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("COLUMNS", "40")
    time.tzset()
    yield call
    monkeypatch.undo()
    time.tzset()


def objects(shown: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in shown.splitlines()]


def test_the_listing(run: Path, log: Log) -> None:
    """The golden file holds what was printed, without the blanks at the ends of lines."""
    code, shown = log(run)
    assert code == 0
    assert [line.rstrip() for line in shown.splitlines()] == GOLDEN.read_text(encoding="utf-8").splitlines()


def test_filters_and_the_limit(run: Path, log: Log) -> None:
    def found(*arguments: object) -> list[int]:
        return [each["cursor"] - FIRST for each in objects(log(run, "--json", *arguments)[1])]

    assert found() == [0, 1, 2, 3, 4]
    assert found("--kind", "rewards", "--kind", "critiques") == [0, 4]
    assert found("--agent", "alpha", "--prompt", "77aa") == [2]
    assert found("--after", FIRST + 2) == [3, 4]
    assert found("--limit", 2) == [3, 4]
    assert log(run, "--kind", "critique")[1] == "no records\n"
    assert log(run, "--limit", 2)[1].endswith("the newest 2; more with --limit\n")


def test_whole_records_as_json_with_texts_as_strings(run: Path, log: Log) -> None:
    code, shown = log(run, "--json")
    assert code == 0
    rewards, success, _, group, critique = objects(shown)
    assert rewards["time"] == "2023-11-14T22:13:20.000+00:00"
    assert rewards["record"]["rewards"] == [1.0, None], "JSON has no NaN"
    assert success["record"]["texts"] == ["cbä"] and success["record"]["token_ends"] == [1, 2, 3, 4]
    assert len(group["record"]["logprobs"]) == 200 and group["record"]["finished"] == [True, True]
    assert critique["record"]["words"] == ["too\\xff", "short"] and critique["record"]["type"] == "critiques/1"


def test_the_directory_of_a_hub_will_do(run: Path, log: Log) -> None:
    assert log(run / "records", "--json") == log(run, "--json")


def test_directories_without_records_are_refused(run: Path, log: Log, tmp_path: Path) -> None:
    code, shown = log(tmp_path)
    assert code == exit_codes.BAD_CONFIG and "no run in" in shown
    assert log(tmp_path / "none")[0] == 2
    (tmp_path / "manifest.json").write_text("{}")
    code, shown = log(tmp_path)
    assert code == exit_codes.BAD_CONFIG and "exchange.disk_bytes = 0" in shown


def test_a_damaged_record_ends_the_list_with_2_and_its_place(run: Path, log: Log) -> None:
    (file,) = run.glob("records/*.seg")
    file.write_bytes(file.read_bytes().replace(b"short", b"shirt"))
    code, shown = log(run, "--json")
    assert code == exit_codes.BAD_CONFIG
    assert "checksum" in shown and "00000001.seg" in shown and "Traceback" not in shown
    assert log(run)[0] == 0, "a list does not read the records themselves"


def test_a_record_that_its_producer_wrote_wrongly_says_so_and_the_list_goes_on(run: Path, log: Log) -> None:
    wrong, right = (
        publication_of(a_success("alpha", 3, "4f0c"), FIRST + 9),
        publication_of(rewards_of("alpha", 3, "p"), FIRST + 10),
    )
    without_arrays = replace(wrong.record, encoded=replace(wrong.record.encoded, frames=()))
    store = DiskStore.open(run / "records", run_id="r")
    store.commit([replace(wrong, record=without_arrays), right])
    store.close()
    code, shown = log(run, "--json", "--limit", 2)
    assert code == 0
    first, second = objects(shown)
    assert "outside its frame" in first["error"] and "record" not in first
    assert second["record"]["type"] == "rewards/1"
