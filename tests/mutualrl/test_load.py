"""From a run file and overrides to a checked run."""

from __future__ import annotations

import pickle
from pathlib import Path

import msgspec
import pytest

from agents.config import AgentConfig, HFPolicy, SandboxedReward, TinyPolicy
from agents.sharing.config import PRP, SGT, Isolated
from mutualrl.config import Run
from mutualrl.errors import ConfigError
from mutualrl.load import load_run, merge, parse_override

RUN_FILE = """
steps = 7
[[tasks]]
kind = "reverse"
name = "reverse"
[[tasks]]
kind = "sort"
name = "sort"
[defaults]
learning_rate = 0.5
sharing = { rule = "sgt", lambda = 0.25, window = 3 }
objective = { epsilon = 0.3, beta = 0.01 }
policy = { kind = "tiny", hidden_size = 64 }
[agents.alpha]
objective = { beta = 0.02 }
[agents.beta]
learning_rate = 0.125
sharing = { rule = "prp" }
policy = { kind = "hf", path = "somewhere" }
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return path


def problems(run_file: Path, *overrides: str) -> list[str]:
    """The lines of the error below its heading."""
    with pytest.raises(ConfigError) as caught:
        load_run(run_file, overrides)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_defaults_lie_under_every_agent_and_tables_merge_deeply(run_file: Path) -> None:
    run = load_run(run_file)
    alpha, beta = run.agents["alpha"], run.agents["beta"]
    assert (alpha.learning_rate, beta.learning_rate) == (0.5, 0.125)
    assert (alpha.objective.epsilon, alpha.objective.beta) == (0.3, 0.02)
    assert alpha.sharing == SGT(lambda_=0.25, window=3)
    assert alpha.policy == TinyPolicy(hidden_size=64)


def test_another_choice_replaces_the_table_of_the_first(run_file: Path) -> None:
    beta = load_run(run_file).agents["beta"]
    assert beta.sharing == PRP()
    assert beta.policy == HFPolicy(path="somewhere")


def test_the_same_choice_merges(run_file: Path) -> None:
    run = load_run(run_file, ["agents.alpha.sharing.rule=sgt", "agents.alpha.sharing.window=9"])
    assert run.agents["alpha"].sharing == SGT(lambda_=0.25, window=9)


@pytest.mark.parametrize("order", [1, -1])
def test_an_override_may_change_the_choice_and_its_keys_in_any_order(run_file: Path, order: int) -> None:
    overrides = ["defaults.sharing.rule=prp", "defaults.sharing.weight=0.125"][::order]
    assert load_run(run_file, overrides).agents["alpha"].sharing == PRP(weight=0.125)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=3", 3),
        ("a.b=1e-4", 1e-4),
        ("a.b=true", True),
        ("a.b=[1, 2]", [1, 2]),
        ('a.b="x=y"', "x=y"),
        ("a.b=hub:alpha", "hub:alpha"),
        ("a.b=x=y", "x=y"),
        ("a.b=", ""),
        ("a.b=1\nc = 2", "1\nc = 2"),
    ],
)
def test_an_override_is_a_toml_value_or_a_bare_string(text: str, value: object) -> None:
    assert parse_override(text) == (["a", "b"], value)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ('a."b.c"=1', ["a", "b.c"]),
        ("a.'b=c'.d=1", ["a", "b=c", "d"]),
        (r'"a\"b" = 1', ['a"b']),
        (" a . b =1", ["a", "b"]),
        ("tasks.0.x-y=1", ["tasks", "0", "x-y"]),
    ],
)
def test_keys_may_stand_in_quotes(text: str, keys: list[str]) -> None:
    assert parse_override(text) == (keys, 1)


@pytest.mark.parametrize("text", ["steps", "=3", "a..b=3", ".a=3", "", '"a=3', 'a"b"=3', r'"\q"=3', "a.=3"])
def test_a_misshapen_override_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        parse_override(text)


def test_overrides_reach_into_arrays_of_tables(run_file: Path) -> None:
    run = load_run(run_file, ["tasks.1.heldout=5", "steps=9"])
    assert [task.heldout for task in run.tasks] == [64, 5]
    assert run.steps == 9
    with pytest.raises(ConfigError, match="no entry 2 in an array of 2"):
        load_run(run_file, ["tasks.2.heldout=5"])


def test_conflicting_overrides_are_named(run_file: Path) -> None:
    with pytest.raises(ConfigError, match="'topology' is set to a value"):
        load_run(run_file, ["topology=ring", "topology.shape=ring"])


def test_merge_changes_neither_side() -> None:
    base = {"a": {"b": 1}}
    assert merge(base, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}
    assert base == {"a": {"b": 1}}


def test_every_problem_is_reported_at_its_own_path(run_file: Path) -> None:
    found = problems(
        run_file,
        "stepz=3",
        "evaluation.every=-1",
        "tasks.1.kind=srot",
        "agents.beta.objective.loss_type=gpro",
        "agents.beta.sampling.temperature=hot",
        "agents.alpha.learning_rte=1",
    )
    assert found == [
        "tasks.1.kind: unknown, got kind='srot'; did you mean 'sort'?",
        "stepz: unknown key, got stepz=3; did you mean 'steps'?",
        "evaluation.every: must be >= 0 and <= 1000000000, got every=-1",
        "agents.alpha.learning_rte: unknown key, got learning_rte=1; did you mean 'learning_rate'?",
        "agents.beta.objective.loss_type: must be one of grpo, dr_grpo, dapo, bnpo, cispo, got loss_type='gpro'",
        "agents.beta.sampling.temperature: Expected float, got str, got temperature='hot'",
    ]


def test_a_range_is_reported_with_path_value_and_range(run_file: Path) -> None:
    assert problems(run_file, "agents.alpha.learning_rate=-1") == [
        "agents.alpha.learning_rate: must be > 0, got learning_rate=-1.0"
    ]
    assert problems(run_file, "agents.alpha.sharing.lambda=-1") == [
        "agents.alpha.sharing.lambda: must be >= 0, got lambda=-1.0"
    ]


@pytest.mark.parametrize(
    "override",
    [
        "seed=-1",
        "seed=9223372036854775808",
        "name=../up",
        "name=.hidden",
        'name=""',
        f"name={'x' * 101}",
        "steps=10000000000",
        "drain_s=-1",
        "exchange.heartbeat_s=0.001",
        "exchange.credit_messages=10000000000",
        "exchange.disk_bytes=1",
        "exchange.disk_bytes=-1",
        "agents.alpha.num_generations=10000000000",
        "agents.alpha.prompts_per_step=10000000000",
        "agents.alpha.threads=100000",
        "agents.alpha.device=gpu",
        "agents.alpha.device=cuda:x",
        'agents.alpha.sampling.stop=["x", ""]',
        "agents.alpha.sharing.max_age_s=1e12",
        "agents.beta.policy.max_context=7",
        "agents.alpha.policy.num_attention_heads=64",
    ],
)
def test_bounds(run_file: Path, override: str) -> None:
    key = override.partition("=")[0]
    (problem,) = problems(run_file, override)
    assert problem.startswith((f"{key}: must ", "defaults.policy.hidden_size: must "))
    assert "got " in problem


@pytest.mark.parametrize(
    "override",
    [
        "seed=9223372036854775807",
        "name=a.b_c-3",
        "exchange.disk_bytes=0",
        "agents.alpha.device=cuda:1",
        "agents.beta.policy.max_context=8",
    ],
)
def test_what_lies_just_inside_the_bounds(run_file: Path, override: str) -> None:
    load_run(run_file, [override])


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("evaluation.threshold=nan", "evaluation.threshold: must be finite, got threshold=nan"),
        ("step_timeout_s=inf", "step_timeout_s: must be finite, got step_timeout_s=inf"),
        ("defaults.reward_weights=[1.0, -inf]", "defaults.reward_weights: must be finite, got reward_weights=[1.0, -inf]"),
        ("agents.beta.warm_start.mix.sort=1e999", "agents.beta.warm_start.mix.sort: must be finite, got sort=inf"),
        ("seed=nan", "seed: must be finite, got seed=nan"),
    ],
)
def test_nothing_in_a_run_is_infinite_or_no_number(run_file: Path, override: str, path: str) -> None:
    assert problems(run_file, override) == [path]


def test_a_value_from_defaults_is_reported_there_and_once(run_file: Path) -> None:
    found = problems(run_file, "defaults.prompts_per_step=0", "defaults.sharing.lambda=-1")
    assert "defaults.sharing.lambda: must be >= 0, got lambda=-1.0" in found
    found = problems(run_file, "defaults.num_generations=1")
    assert found == ["defaults.num_generations: must be >= 2 and <= 1048576, got num_generations=1"]


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (
            '{ sandbox = "a:b", timeout = 3 }',
            "defaults.rewards.1.timeout: unknown key, got timeout=3; did you mean 'timeout_s'?",
        ),
        ('{ sandbox = "a:b", timeout_s = 0 }', "defaults.rewards.1.timeout_s: must be > 0 and <= 86400, got timeout_s=0.0"),
        ("{ timeout_s = 3 }", "defaults.rewards.1.sandbox: is missing and has no default"),
    ],
)
def test_rewards_are_names_and_tables(run_file: Path, table: str, problem: str) -> None:
    right = 'defaults.rewards=["exact_match", { sandbox = "a:b", timeout_s = 3 }]'
    run = load_run(run_file, [right])
    assert run.agents["alpha"].rewards == ("exact_match", SandboxedReward(sandbox="a:b", timeout_s=3))
    assert msgspec.json.decode(msgspec.json.encode(run), type=Run) == run
    assert problems(run_file, f'defaults.rewards=["exact_match", {table}]') == [problem]


def test_a_missing_choice_lists_the_choices(run_file: Path) -> None:
    run_file.write_text(RUN_FILE.replace('policy = { kind = "tiny", hidden_size', "policy = { hidden_size"))
    assert "agents.alpha.policy.kind: is missing; choose one of tiny, hf" in problems(run_file)


def test_no_agents_is_said_plainly(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[[tasks]]\nkind = "sort"\nname = "sort"\n')
    assert problems(path) == ["agents: a run needs at least one [agents.NAME] table, got none"]


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such run file.*absent\.toml"):
        load_run(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("steps = = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML.*line 1"):
        load_run(broken)


def test_errors_can_cross_processes(run_file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(run_file, ["stepz=1"])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_resolved_run_survives_its_own_json(run_file: Path) -> None:
    run = load_run(run_file)
    assert msgspec.json.decode(msgspec.json.encode(run), type=Run) == run


def test_rules_and_kinds_default_as_documented() -> None:
    assert AgentConfig(policy=TinyPolicy()).sharing == SGT()
    assert msgspec.convert({"rule": "isolated"}, Isolated) == Isolated()
