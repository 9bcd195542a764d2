"""Runs one config under several sharing rules and seeds and lays the results side by side.

Every pair of rule and seed is a run of `mutualrl up` of its own, one after the other, so that a comparison and a single
run are the same program. A finished pair is kept when the comparison is called again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import msgspec

from agents.config import AgentConfig
from agents.sharing.config import HACPO, PRP, SGT, XGRPO, Graft, Isolated, SGTPlacebo, SharingConfig
from mutualrl import exit_codes
from mutualrl.config import MAX_SEED, Run
from mutualrl.errors import ConfigError, RunDirError
from mutualrl.foreground import run_command
from mutualrl.load import load_run
from mutualrl.manifest import write_atomically
from mutualrl.report.comparison import (
    BUDGET_CONTROL,
    COMPARISON_FILE,
    CONTROL,
    Comparison,
    pair_dir,
    read_pairs,
)
from mutualrl.report.records import load_record
from mutualrl.rundir import usable
from mutualrl.schema import nearest

Runner = Callable[[Sequence[str]], int]

_KINDS: dict[str, type[SharingConfig]] = {
    CONTROL: Isolated,
    BUDGET_CONTROL: Isolated,
    "prp": PRP,
    "xgrpo": XGRPO,
    "sgt": SGT,
    "sgt_ungated": SGT,
    "sgt_placebo": SGTPlacebo,
    "hacpo": HACPO,
    "graft": Graft,
}
RULES = tuple(_KINDS)


def run_compare(
    config: Path,
    overrides: list[str],
    *,
    rules: list[str],
    seeds: list[int],
    output_dir: Path,
    require_gain: float | None,
    runner: Runner | None = None,
) -> int:
    """Run every (rule, seed), write compare.json, compare.png and report.html into output_dir, and print the tables.

    Args: rules: of RULES. seeds: each gives one run per rule. require_gain: least mean gain on peers' skills, in 0..1,
    of the first sharing rule over `isolated`. runner: runs a command line of mutualrl and returns its exit code.
    Returns: 0; 1 when the gain is below require_gain; the exit code of a run that did not end with 0 (130 on SIGINT).
    Raises: ConfigError for a bad config, rule or seed, before anything is started; RunDirError when a pair is in use.
    """
    from mutualrl.report.console import print_comparison

    rules, seeds = list(dict.fromkeys(rules)), list(dict.fromkeys(seeds))
    check_request(rules, seeds, require_gain)
    code = run_pairs(config, overrides, rules=rules, seeds=seeds, output_dir=output_dir, runner=runner or run_command)
    if code != exit_codes.DONE:
        return code
    comparison = read_pairs(output_dir, [(rule, seed) for rule in rules for seed in seeds])
    report = write_results(comparison, output_dir)
    print_comparison(comparison)
    print(f"report: {report}")
    return judge_gain(comparison, require_gain)


def run_pairs(
    config: Path, overrides: list[str], *, rules: list[str], seeds: list[int], output_dir: Path, runner: Runner
) -> int:
    """Run what is not finished, seed by seed; the first exit code that is not 0 ends it and is returned."""
    base = load_run(config, overrides)
    plan = {(rule, seed): [*overrides, *pair_overrides(base, rule, seed)] for seed in seeds for rule in rules}
    expected = {pair: load_run(config, changes) for pair, changes in plan.items()}
    with usable(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
    for (rule, seed), changes in plan.items():
        run_dir = pair_dir(output_dir, rule, seed)
        if is_finished(run_dir, expected[rule, seed]):
            print(f"{run_dir.name}: kept, it is finished")
            continue
        with usable(run_dir):
            _set_aside(run_dir)
        print(f"{run_dir.name}: running", flush=True)
        code = runner(["up", str(config), *changes, "--run-name", run_dir.name, "--output-dir", str(run_dir)])
        if code != exit_codes.DONE:
            print(f"{run_dir.name} ended with exit code {code}; the comparison stops here", file=sys.stderr)
            return code
    return exit_codes.DONE


def write_results(comparison: Comparison, output_dir: Path) -> Path:
    """Write compare.json, compare.png and the reports, those of the single runs again, whose control is known now."""
    from mutualrl.report import write_comparison_report, write_report
    from mutualrl.report.comparison_chart import save_gain_chart

    document = msgspec.json.format(msgspec.json.encode(comparison.document()), indent=2)
    write_atomically(output_dir / COMPARISON_FILE, document + b"\n")
    save_gain_chart(comparison, output_dir / "compare.png")
    for run in comparison.runs.values():
        write_report(run.path)
    return write_comparison_report(output_dir)


def check_request(rules: Sequence[str], seeds: Sequence[int], require_gain: float | None) -> None:
    """Raise ConfigError for rules or seeds with which there is nothing to compare."""
    for rule in rules:
        if rule not in _KINDS:
            raise ConfigError(f"--rules: no such rule, got {rule!r}; {nearest(rule, RULES)}")
    if not rules or not seeds:
        raise ConfigError(f"a comparison needs at least one rule and one seed, got rules={rules}, seeds={seeds}")
    for seed in seeds:
        if not 0 <= seed <= MAX_SEED:
            raise ConfigError(f"--seeds: a seed is a whole number from 0 to {MAX_SEED}, got {seed}")
    if require_gain is not None and not math.isfinite(require_gain):
        raise ConfigError(f"--require-gain must be finite, got {require_gain}")
    if require_gain is not None and (CONTROL not in rules or set(rules) <= {CONTROL, BUDGET_CONTROL}):
        raise ConfigError(f"--require-gain needs a sharing rule and {CONTROL!r} among --rules, got rules={rules}")


def pair_overrides(base: Run, rule: str, seed: int) -> list[str]:
    """The overrides that turn a config into the run of one rule and seed.

    An agent whose rule is of this kind already keeps its settings of it; others get the kind's defaults.
    """
    changes = [f"seed={seed}"]
    for name, agent in base.agents.items():
        changes.append(f"agents.{name}.sharing={_inline_table(sharing_of(agent, rule))}")
        if rule == BUDGET_CONTROL:
            changes.append(f"agents.{name}.num_generations={agent.num_generations * len(base.agents)}")
    return changes


def sharing_of(agent: AgentConfig, rule: str) -> SharingConfig:
    """The agent's sharing config under a rule of RULES."""
    kind = _KINDS[rule]
    alike = isinstance(agent.sharing, SGT if issubclass(kind, SGT) else kind)
    fields = msgspec.structs.asdict(agent.sharing) if alike else {}
    if issubclass(kind, SGT):
        fields["gate"] = "off" if rule == "sgt_ungated" else "on"
    return kind(**fields)


def fingerprint(run: Run) -> str:
    """Hash of everything in a resolved config that can change its numbers: all but its name and place."""
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(run, name="run", output_dir=""))).hexdigest()


def is_finished(run_dir: Path, expected: Run) -> bool:
    """Whether this directory holds a run of this config that came to its end, with all that a comparison needs of it."""
    if not run_dir.is_dir():
        return False
    record = load_record(run_dir)
    done = record.manifest is not None and record.manifest.status == "done"
    judged = {(row.agent, row.task) for row in record.evals if row.step == expected.steps}
    return (
        done
        and record.config is not None
        and fingerprint(record.config) == fingerprint(expected)
        and judged >= {(agent, task.name) for agent in expected.agents for task in expected.tasks}
    )


def judge_gain(comparison: Comparison, require_gain: float | None) -> int:
    """0 when the first sharing rule's mean gain on peers' skills is at least this, else 1; says which."""
    if require_gain is None:
        return exit_codes.DONE
    rule = comparison.sharing_rules[0]
    gain = comparison.gain(rule, own_skill=False)
    if gain is None:
        print(f"{rule} cannot be judged: no task beyond the agents' own skills was evaluated", file=sys.stderr)
        return exit_codes.RUN_FAILED
    verdict = "reaches" if gain.mean >= require_gain else "is below"
    print(f"{rule}'s mean gain on peers' skills, {gain.mean:+.3f}, {verdict} the required {require_gain:+.3f}")
    return exit_codes.DONE if gain.mean >= require_gain else exit_codes.RUN_FAILED


def _set_aside(run_dir: Path) -> None:
    """Rename what is left of an unfinished or different run, so that nothing is lost and the name is free."""
    if not os.path.lexists(run_dir):
        return
    with ExitStack() as held:
        if run_dir.is_dir():
            _lock(run_dir, held.enter_context((run_dir / "lock").open("a")))
        number = 1
        while os.path.lexists(aside := run_dir.with_name(f"{run_dir.name}.aside-{number}")):
            number += 1
        run_dir.rename(aside)
    print(f"{run_dir.name}: unfinished or of another config, moved to {aside.name}")


def _lock(run_dir: Path, lock: TextIO) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunDirError(
            f"run directory {run_dir} is in use by another run; wait for it or give another --output-dir"
        ) from None


def _inline_table(sharing: SharingConfig) -> str:
    """The struct as a TOML inline table; JSON's scalars are TOML's, and a None is left to the default."""
    fields = {key: value for key, value in msgspec.to_builtins(sharing).items() if value is not None}
    return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in fields.items()) + "}"
