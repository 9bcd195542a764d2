"""What a program may give a trainer, and what it is told when that cannot be used. Nothing is trained here."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agents.config import AgentConfig, HFPolicy, TinyPolicy
from agents.policies.tiny import build_tiny
from agents.tasks.config import Reverse
from mutualrl import MutualConfig, MutualTrainer
from mutualrl.errors import ConfigError
from mutualrl.trainer_inputs import import_string, read_datasets, read_policies, read_rewards

ROWS = [{"prompt": f"reverse {word}:", "answer": word[::-1]} for word in ("ab", "ba", "ac", "ca")]


def same_length(completions: list[str], answer: list[str], **_: object) -> list[float]:
    return [float(len(text) == len(right)) for text, right in zip(completions, answer, strict=True)]


def make(**given: Any) -> MutualTrainer:
    body: dict[str, Any] = {"policies": {"alpha": TinyPolicy()}, "train_dataset": ROWS}
    return MutualTrainer(**{**body, "args": MutualConfig(prompts_per_step=2), **given})


def test_settings_go_where_a_run_file_has_them() -> None:
    config = MutualConfig(
        max_steps=7, run_name="r", eval_steps=3, save_steps=2, temperature=0.5, beta=0.1, learning_rate=1e-4, sharing="prp"
    )
    assert config.tables == {
        "steps": 7,
        "name": "r",
        "save_steps": 2,
        "evaluation": {"every": 3},
        "defaults": {
            "learning_rate": 1e-4,
            "sampling": {"temperature": 0.5},
            "objective": {"beta": 0.1},
            "sharing": {"rule": "prp"},
        },
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"learning_rat": 1.0}, "did you mean 'learning_rate'"),
        ({"agents": {}}, "give MutualTrainer its `policies`"),
        ({"device": object()}, "device: object is no setting"),
    ],
)
def test_an_unknown_setting_is_answered_with_the_nearest(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MutualConfig(**settings)


def test_a_policys_own_settings_win_and_a_whole_config_stands_as_it_is() -> None:
    whole = AgentConfig(policy=TinyPolicy(), num_generations=6, prompts_per_step=2)
    trainer = make(
        policies={
            "plain": TinyPolicy(),
            "own": {"policy": TinyPolicy(arch="gpt_neox"), "num_generations": 4, "max_completion_length": 3},
            "whole": whole,
        },
        args=MutualConfig(num_generations=8, max_completion_length=5, prompts_per_step=2, device="cpu"),
    )
    agents = trainer.run.agents
    assert [agents[name].num_generations for name in ("plain", "own", "whole")] == [8, 4, 6]
    assert [agents[name].sampling.max_completion_length for name in ("plain", "own", "whole")] == [5, 3, 16]
    assert msgspec.structs.replace(agents["whole"]) == whole


def test_policies_without_a_name_are_called_after_their_model() -> None:
    names, _ = read_policies(["org/Model-1.5B", Path("/models/Model-1.5B"), HFPolicy(path="x" * 40), TinyPolicy()])
    assert list(names) == ["Model-1-5B", "Model-1-5B-2", "x" * 28, "llama"]


def test_one_model_object_is_no_two_policies() -> None:
    model = build_tiny(TinyPolicy(hidden_size=8, num_attention_heads=2), seed=0, dtype=__import__("torch").float32)
    with pytest.raises(ConfigError, match="'b' is the same model object"):
        read_policies({"a": model, "b": {"policy": model}})


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ([3], r"policies\[0\]: a policy is a path"),
        ({"a": {"policy": "m", "num_generation": 3}}, "did you mean 'num_generations'"),
        ({"a": {"learning_rate": 1.0}}, "got NoneType"),
    ],
)
def test_a_policy_that_is_none_is_named(policies: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_policies(policies)


def test_rewards_keep_a_name_in_the_config() -> None:
    local = partial(same_length)
    names, given = read_rewards({"a": [same_length, "exact_match"], "b": local}, ["a", "b"])
    assert names == {"a": [f"{__name__}:same_length", "exact_match"], "b": ["partial"]}
    assert given == {"a": [same_length, "exact_match"], "b": [local]}
    assert import_string(lambda: None).endswith("<lambda>")


def test_rewards_by_policy_must_name_every_policy() -> None:
    with pytest.raises(ConfigError, match=r"one entry per policy \(a, b\), got a"):
        read_rewards({"a": same_length}, ["a", "b"])
    with pytest.raises(ConfigError, match="got int"):
        read_rewards(3, ["a"])  # type: ignore[arg-type]


def test_a_reward_without_its_column_is_found_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="same name"):
        make(reward_funcs=[same_length, same_length])


def test_held_out_rows_are_never_trained_on() -> None:
    tables, tasks = read_datasets(ROWS, ROWS[:1])
    assert [prompt.text for prompt in tasks["train"].heldout] == ["reverse ab:"]
    assert [prompt.text for prompt in tasks["train"].train] == ["reverse ba:", "reverse ac:", "reverse ca:"]
    assert tables == [{"kind": "data", "name": "train", "path": "(given to MutualTrainer) builtins.list, 4 rows", "heldout": 1}]


def test_without_eval_dataset_nothing_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(map(msgspec.json.encode, ROWS)))
    assert not read_datasets(ROWS, None)[1]["train"].heldout
    assert read_datasets(path, None) == ([{"kind": "data", "name": "train", "path": str(path), "heldout": 0}], {})
    from_file = read_datasets(path, ROWS[:1])[1]["train"]
    assert from_file.train == read_datasets(ROWS, ROWS[:1])[1]["train"].train


def test_names_that_only_eval_dataset_has_are_evaluated_alone() -> None:
    tables, tasks = read_datasets([Reverse(name="r", heldout=2)], {"other": ROWS})
    assert [table["name"] for table in tables] == ["r", "other"] and list(tasks) == ["other"]
    assert len(tasks["other"].heldout) == 4 and not tasks["other"].train


@pytest.mark.parametrize(
    ("train", "evaluation", "said"),
    [
        ({"a": ROWS, "b": ROWS}, ROWS, "give a dict of data sets by task; train_dataset has a, b"),
        ([{"question": "?"}], None, "no `prompt` column"),
        (3, None, "it is a path, a datasets.Dataset"),
        (Reverse(name="r"), {"r": ROWS}, "holds out prompts of its own"),
    ],
)
def test_data_that_cannot_be_used_are_named(train: Any, evaluation: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_datasets(train, evaluation)


def test_all_that_is_wrong_with_a_run_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as told:
        make(args=MutualConfig(max_steps=0, learning_rate=-1.0))
    assert "steps: must be >= 1" in str(told.value) and "defaults.learning_rate: must be > 0" in str(told.value)
