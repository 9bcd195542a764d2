"""Which runs a comparison starts, which it keeps, and what it makes of their results."""

from __future__ import annotations

import fcntl
import io
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_run import ALONE, TAUGHT, Finals, make_manifest, write_lines, write_run

from agents.sharing.config import PRP, SGT, XGRPO, Isolated, SGTPlacebo
from mutualrl import exit_codes
from mutualrl.compare import judge_gain, run_compare, run_pairs
from mutualrl.config import Run
from mutualrl.errors import ConfigError, RunDirError
from mutualrl.foreground import run_command
from mutualrl.load import load_run
from mutualrl.report.comparison import Comparison, load_comparison, read_pairs
from mutualrl.report.console import print_comparison
from mutualrl.rundir import RunDir

CONFIG = """
steps = 20
topology.shape = "complete"
[[tasks]]
kind = "reverse"
name = "reverse"
[[tasks]]
kind = "sort"
name = "sort"
[defaults]
num_generations = 6
policy = {kind = "tiny"}
sharing = {rule = "sgt", lambda = 1.0, gate = "off"}
[agents.alpha]
skills = ["reverse"]
[agents.beta]
skills = ["sort"]
sharing = {rule = "xgrpo", max_lag = 5}
"""

FINALS: dict[str, Finals] = {
    "isolated": ALONE,
    "isolated_budget": {**ALONE, ("alpha", "sort"): 0.65},
    "prp": {**ALONE, ("beta", "sort"): 0.5},
    "sgt": TAUGHT,
}


class FakeUp:
    """Stands for `mutualrl up`: resolves the config as it does, and writes a run that ended at FINALS."""

    def __init__(self, ends: Callable[[str], int] = lambda name: 0) -> None:
        self.started: list[str] = []
        self.runs: dict[str, Run] = {}
        self._ends = ends

    def __call__(self, arguments: Sequence[str]) -> int:
        command, config, *rest = arguments
        options = rest.index("--run-name")
        assert (command, rest[options + 2]) == ("up", "--output-dir")
        run_dir = Path(rest[options + 3])
        assert not run_dir.exists()
        self.started.append(run_dir.name)
        run = self.runs[run_dir.name] = load_run(Path(config), rest[:options])
        code = self._ends(run_dir.name)
        finals = FINALS.get(run_dir.name.split("-seed")[0], ALONE)
        write_run(run_dir, finals, run, seed=run.seed, status="stopped" if code else "done")
        return code


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


def run(config: Path, fake: FakeUp, rules: list[str], seeds: Sequence[int] = (0,), overrides: Sequence[str] = ()) -> int:
    output_dir = config.parent / "out"
    return run_pairs(config, list(overrides), rules=rules, seeds=list(seeds), output_dir=output_dir, runner=fake)


def results(config: Path, rules: list[str], seeds: Sequence[int] = (0,)) -> Comparison:
    assert run(config, FakeUp(), rules, seeds) == 0
    return read_pairs(config.parent / "out", [(rule, seed) for rule in rules for seed in seeds])


def test_every_rule_and_seed_runs_once_seed_by_seed(config: Path) -> None:
    fake = FakeUp()
    assert run(config, fake, ["isolated", "sgt"], [0, 3]) == 0
    assert fake.started == ["isolated-seed0", "sgt-seed0", "isolated-seed3", "sgt-seed3"]
    assert fake.runs["sgt-seed3"].seed == 3


def test_a_rule_of_the_agents_own_kind_keeps_its_settings(config: Path) -> None:
    fake = FakeUp()
    run(
        config, fake, ["isolated", "prp", "xgrpo", "sgt", "sgt_ungated", "sgt_placebo"], overrides=["defaults.sharing.window=3"]
    )
    sharing = {
        name.removesuffix("-seed0"): {agent: made.agents[agent].sharing for agent in made.agents}
        for name, made in fake.runs.items()
    }
    assert sharing["isolated"] == {"alpha": Isolated(), "beta": Isolated()}
    assert sharing["prp"] == {"alpha": PRP(), "beta": PRP()}
    assert sharing["xgrpo"] == {"alpha": XGRPO(), "beta": XGRPO(max_lag=5)}
    assert sharing["sgt"] == {"alpha": SGT(lambda_=1.0, window=3, gate="on"), "beta": SGT()}
    assert sharing["sgt_ungated"] == {"alpha": SGT(lambda_=1.0, window=3, gate="off"), "beta": SGT(gate="off")}
    assert sharing["sgt_placebo"] == {"alpha": SGTPlacebo(lambda_=1.0, window=3), "beta": SGTPlacebo()}


def test_equal_budget_samples_as_much_as_all_agents_together(config: Path) -> None:
    fake = FakeUp()
    run(config, fake, ["isolated_budget"])
    [made] = fake.runs.values()
    assert [agent.num_generations for agent in made.agents.values()] == [12, 12]
    assert all(agent.sharing == Isolated() for agent in made.agents.values())


def test_finished_pairs_are_kept(config: Path) -> None:
    run(config, FakeUp(), ["isolated", "sgt"])
    again = FakeUp()
    assert run(config, again, ["isolated", "sgt", "prp"]) == 0
    assert again.started == ["prp-seed0"]


def test_another_config_runs_again_and_loses_nothing(config: Path) -> None:
    run(config, FakeUp(), ["sgt"])
    again = FakeUp()
    run(config, again, ["sgt"], overrides=["steps=40"])
    run(config, again, ["sgt"], overrides=["steps=60"])
    assert again.started == ["sgt-seed0", "sgt-seed0"]
    kept = [RunDir(config.parent / "out" / name).read_config().steps for name in ("sgt-seed0.aside-1", "sgt-seed0.aside-2")]
    assert kept == [20, 40]


def test_name_and_place_of_a_run_do_not_make_it_another(config: Path) -> None:
    run(config, FakeUp(), ["sgt"])
    again = FakeUp()
    run(config, again, ["sgt"], overrides=["name=other", "output_dir=elsewhere"])
    assert again.started == []


def test_an_unfinished_pair_is_done_again(config: Path) -> None:
    run(config, FakeUp(), ["isolated", "sgt"])
    RunDir(config.parent / "out" / "sgt-seed0").write_manifest(make_manifest("running"))
    again = FakeUp()
    run(config, again, ["isolated", "sgt"])
    assert again.started == ["sgt-seed0"]
    assert (config.parent / "out" / "sgt-seed0.aside-1").is_dir()


@pytest.mark.parametrize("missing", [("alpha", "sort"), None])
def test_a_pair_without_its_final_evaluations_is_done_again(config: Path, missing: tuple[str, str] | None) -> None:
    run(config, FakeUp(), ["sgt"])
    evals = config.parent / "out" / "sgt-seed0" / "evals.jsonl"
    rows = [json.loads(line) for line in evals.read_text().splitlines()]
    kept = [row for row in rows if row["step"] < 20 or (missing and (row["agent"], row["task"]) != missing)]
    write_lines(evals, kept)
    again = FakeUp()
    run(config, again, ["sgt"])
    assert again.started == ["sgt-seed0"]


def test_whatever_lies_in_the_place_of_a_pair_is_set_aside(config: Path) -> None:
    output_dir = config.parent / "out"
    output_dir.mkdir()
    (output_dir / "sgt-seed0").write_text("mine")
    (output_dir / "sgt-seed0.aside-1").symlink_to("nowhere")
    assert run(config, FakeUp(), ["sgt"]) == 0
    assert (output_dir / "sgt-seed0.aside-2").read_text() == "mine"


def test_a_place_that_cannot_hold_a_comparison_is_named(config: Path) -> None:
    (config.parent / "out").write_text("mine")
    with pytest.raises(RunDirError, match="out cannot be used"):
        run(config, FakeUp(), ["sgt"])


def test_a_run_that_does_not_end_well_ends_the_comparison(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeUp(lambda name: 130 if name == "sgt-seed0" else 0)
    assert run(config, fake, ["isolated", "sgt", "prp"]) == 130
    assert fake.started == ["isolated-seed0", "sgt-seed0"]
    assert "sgt-seed0 ended with exit code 130" in capsys.readouterr().err


def test_a_pair_in_use_is_left_alone(config: Path) -> None:
    run_dir = config.parent / "out" / "sgt-seed0"
    run_dir.mkdir(parents=True)
    with (run_dir / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunDirError, match="sgt-seed0 is in use"):
            run(config, FakeUp(), ["sgt"])
    assert run_dir.is_dir()


@pytest.mark.parametrize(
    ("rules", "seeds", "require_gain", "message"),
    [
        (["sgtt"], [0], None, "did you mean 'sgt'"),
        ([], [0], None, "at least one rule"),
        (["sgt"], [], None, "at least one rule and one seed"),
        (["sgt"], [0, -1], None, "--seeds: .* got -1"),
        (["sgt"], [2**63], None, "--seeds: .* got 9223372036854775808"),
        (["isolated", "sgt"], [0], float("nan"), "--require-gain must be finite"),
        (["sgt"], [0], 0.1, "--require-gain needs"),
        (["isolated", "isolated_budget"], [0], 0.1, "--require-gain needs"),
    ],
)
def test_senseless_requests_start_nothing(
    config: Path, rules: list[str], seeds: list[int], require_gain: float | None, message: str
) -> None:
    fake = FakeUp()
    with pytest.raises(ConfigError, match=message):
        run_compare(config, [], rules=rules, seeds=seeds, output_dir=config.parent, require_gain=require_gain, runner=fake)
    assert fake.started == []


def test_required_gain_is_that_of_the_first_sharing_rule(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = results(config, ["isolated", "sgt", "prp"])
    gain = comparison.gain("sgt", own_skill=False)
    assert gain is not None and gain.mean > 0.3
    assert judge_gain(comparison, gain.mean) == exit_codes.DONE
    assert judge_gain(comparison, gain.mean + 0.001) == exit_codes.RUN_FAILED
    assert f"{gain.mean:+.3f}, is below the required" in capsys.readouterr().out
    assert judge_gain(comparison, None) == exit_codes.DONE


@pytest.mark.parametrize("content", [b"\xff{", b"[" * 100_000, b'{"rows": 3}'])
def test_a_broken_result_file_is_as_good_as_missing(config: Path, content: bytes) -> None:
    run(config, FakeUp(), ["isolated", "sgt"])
    (config.parent / "out" / "compare.json").write_bytes(content)
    assert set(load_comparison(config.parent / "out").rules) == {"isolated", "sgt"}


def test_rows_say_what_became_of_every_agent_and_task(config: Path) -> None:
    comparison = results(config, ["isolated", "isolated_budget", "prp", "sgt"], [0, 1])
    document = comparison.document()
    assert len(document.rows) == 4 * 2 * 2 * 2
    harmed = {(row.rule, row.agent, row.task) for row in document.rows if row.harmed}
    assert harmed == {("prp", "beta", "sort")}
    [row] = [r for r in document.rows if (r.rule, r.seed, r.agent, r.task) == ("isolated_budget", 1, "alpha", "sort")]
    record = comparison.runs["isolated_budget", 1]
    assert row.after == record.curve("alpha", "sort")[-1].accuracy
    assert (row.own_skill, row.heldout, row.rollouts) == (False, 72, 20 * 16 * 12)
    assert (row.rescues, row.hit_rate, row.seconds) == (0, None, 16.0)
    against = {(gain.rule, gain.against) for gain in document.gains}
    assert ("sgt", "isolated_budget") in against and ("isolated", "isolated") not in against


def test_without_a_control_harm_is_unknown(config: Path) -> None:
    comparison = results(config, ["sgt"])
    assert {row.harmed for row in comparison.document().rows} == {None}
    assert comparison.gain("sgt", own_skill=False) is None


def test_tables_show_gains_and_harm(config: Path) -> None:
    comparison = results(config, ["isolated", "prp", "sgt"])
    output = io.StringIO()
    print_comparison(comparison, Console(file=output))
    lines = output.getvalue().splitlines()
    gain = comparison.gain("sgt", own_skill=False)
    assert gain is not None
    [mean_line] = [line for line in lines if line.startswith(" sgt ") and f"{gain.mean:+.2f} (" in line]
    assert f"({gain.low:+.2f} to {gain.high:+.2f})" in mean_line
    harms = [line.split()[-1] for line in lines if "sort, own" in line]
    assert harms == ["yes", "no"]
    assert not any("…" in line for line in lines)


@pytest.mark.slow
def test_a_whole_comparison(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output_dir = config.parent / "out"
    code = run_compare(
        config, [], rules=["sgt", "isolated"], seeds=[0], output_dir=output_dir, require_gain=0.15, runner=FakeUp()
    )
    assert code == 0
    rows = json.loads((output_dir / "compare.json").read_text())["rows"]
    assert [(row["rule"], row["agent"], row["task"]) for row in rows[:2]] == [
        ("sgt", "alpha", "reverse"),
        ("sgt", "alpha", "sort"),
    ]
    assert (output_dir / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "With sgt, they taught each other, and nobody was hurt." in (output_dir / "report.html").read_text()
    assert "points above training alone" in (output_dir / "sgt-seed0" / "report.html").read_text()
    assert "reaches the required" in capsys.readouterr().out
    assert load_comparison(output_dir).rules == ("sgt", "isolated")


INTERRUPTER = """
import os, signal, sys
signal.signal(signal.SIGINT, lambda number, frame: sys.exit(7))
os.kill(os.getppid(), signal.SIGINT)
while True:
    signal.pause()
"""


def test_ctrl_c_reaches_the_run_and_gives_its_code() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert run_command([], program=[sys.executable, "-c", INTERRUPTER]) == 130
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("program", "code"), [("raise SystemExit(2)", 2), ("import os; os.kill(os.getpid(), 9)", 128 + 9), ("", 0)]
)
def test_exit_codes_of_runs_are_passed_on(program: str, code: int) -> None:
    assert run_command([], program=[sys.executable, "-c", program]) == code
