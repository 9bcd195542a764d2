"""A step's metrics, by hand."""

from dataclasses import replace

import numpy as np
import pytest
from tokenizers import normalizers

from agents.metrics import completion_lines, group_metrics, rescue_line
from agents.sharing.rule import Rescue
from agents.testing import make_group, make_prompt
from agents.types import Group
from exchange.types import AgentName
from tokenalign import Encoder, Trace, Translator
from tokenalign.testing import EOS_ID, byte_bpe_tokenizer

NAN = float("nan")


def make_groups() -> list[Group]:
    """Two groups of task "reverse", with one completion that is cut off, and one of "sort", with two that are not judged."""
    mixed = make_group(make_prompt("a"), [1, 0, 0], ids=[[1, 2, 3, 0], [1, 0], [1, 2, 3, 4, 5, 6]])
    cut = replace(mixed.completions[2], finished=False, logprobs=np.full(6, -0.5, dtype=np.float32))
    equal = make_group(make_prompt("b"), [0.5, 0.5, 0.5], ids=[[1, 0], [2, 0], [3, 0]])
    unjudged = make_group(make_prompt("c", task="sort"), [NAN, NAN, 0.25], ids=[[1, 0], [2, 0], [1, 2, 3, 0]])
    return [replace(mixed, completions=(*mixed.completions[:2], cut)), equal, unjudged]


def test_a_steps_metrics_by_hand() -> None:
    metrics = group_metrics(make_groups())
    # Rewards 1, 0, 0, 0.5, 0.5, 0.5, 0.25 of 7 judged ones; deviation sqrt(1/3) in one group of three, 0 in two.
    assert metrics.pop("reward") == pytest.approx(2.75 / 7)
    assert metrics.pop("reward_std") == pytest.approx(np.sqrt(1 / 3) / 3)
    # Lengths 4, 2, 6 | 2, 2, 2 | 2, 2, 4: 26 tokens, 20 of them in the 8 that ended.
    # -log p is 1 for 20 tokens and 0.5 for the 6 of the one that was cut off.
    assert metrics == pytest.approx(
        {
            "frac_reward_zero_std": 2 / 3,
            "rewards/abstained": 2,
            "completions/mean_length": 26 / 9,
            "completions/min_length": 2,
            "completions/max_length": 6,
            "completions/clipped_ratio": 1 / 9,
            "completions/mean_terminated_length": 20 / 8,
            "num_tokens": 26,
            "entropy": (20 * 1 + 6 * 0.5) / 26,
            "reward/reverse": 2.5 / 6,
            "reward/sort": 0.25,
        }
    )


def test_each_functions_own_verdicts_have_a_mean_and_a_deviation() -> None:
    group = make_group(make_prompt("a"), [1, 0, 0])
    by_function = {"f": np.array([1, 0, NAN], dtype=np.float32), "never": np.full(3, NAN, dtype=np.float32)}
    assert group.rewards is not None
    metrics = group_metrics([group.scored(group.rewards, by_function)] * 2)
    # 1, 0, 1, 0: mean 0.5, squared deviations 4 * 0.25 over 3.
    assert metrics["rewards/f/mean"] == 0.5
    assert metrics["rewards/f/std"] == pytest.approx(np.sqrt(1 / 3))
    assert not any(name.startswith("rewards/never") for name in metrics)


def test_what_judges_log_stands_beside_each_completion() -> None:
    group = make_group(make_prompt("a"), [1, 0])
    assert group.rewards is not None
    scored = group.scored(group.rewards, {"f": np.array([1, NAN], dtype=np.float32)})
    lines = list(completion_lines([scored, scored], {"gold": [10, 11, 12, 13]}))
    assert [(line["rewards"], line["extra"]) for line in lines] == [
        ({"f": 1.0}, {"gold": 10}),
        ({"f": None}, {"gold": 11}),
        ({"f": 1.0}, {"gold": 12}),
        ({"f": None}, {"gold": 13}),
    ]
    assert lines[0]["text"] == "x" and lines[0]["prompt_id"] == "a"


def test_where_nothing_ended_there_is_no_length_of_those_that_ended() -> None:
    group = make_group(make_prompt(), [0, 1])
    cut = replace(group, completions=tuple(replace(each, finished=False) for each in group.completions))
    metrics = group_metrics([cut])
    assert metrics["completions/clipped_ratio"] == 1
    assert "completions/mean_terminated_length" not in metrics


def test_a_task_that_was_not_judged_has_no_reward_and_not_the_reward_zero() -> None:
    groups = [make_group(make_prompt("a"), [1, 1]), make_group(make_prompt("b", task="sort"), [NAN, NAN])]
    metrics = group_metrics(groups)
    assert (metrics["reward"], metrics["reward/reverse"], metrics["rewards/abstained"]) == (1, 1, 2)
    assert np.isnan(metrics["reward/sort"])


def test_a_rescue_line_shows_both_tokenizations_with_the_translations_own_exactness() -> None:
    composing = byte_bpe_tokenizer(["é"])
    composing.normalizer = normalizers.NFC()
    source = Trace(text="ae\u0301".encode(), ends=[1, 2, 4], finished=True, has_eos=False)
    translation = Translator(Encoder(composing), eos_id=EOS_ID).translate(source, max_tokens=9)
    line = rescue_line(Rescue(peer=AgentName("beta"), prompt=make_prompt("a"), source=source, translation=translation))
    assert line["spans"] == [
        {"text": "a", "source": ["a"], "receiver": ["a"], "exact": True},
        {"text": "e\u0301", "source": ["e", "\u0301"], "receiver": ["e\u0301"], "exact": False},
    ]
    assert (line["source_tokens"], line["receiver_tokens"]) == (["a", "e", "\u0301"], ["a", "e\u0301"])
    assert line["residual"] == 0.5


def test_a_rewritten_token_of_a_rescue_is_not_exact() -> None:
    small = byte_bpe_tokenizer()
    small.normalizer = normalizers.Lowercase()
    source = Trace(text=b"aB", ends=[1, 2], finished=True, has_eos=False)
    translation = Translator(Encoder(small), eos_id=EOS_ID).translate(source, max_tokens=9)
    line = rescue_line(Rescue(peer=AgentName("beta"), prompt=make_prompt("a"), source=source, translation=translation))
    assert [span["exact"] for span in line["spans"]] == [True, False]  # type: ignore[attr-defined]
