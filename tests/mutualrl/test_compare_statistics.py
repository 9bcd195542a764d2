"""Numbers by hand, and the bootstrap's coverage."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from mutualrl.statistics import difference_standard_error, is_harmed, paired_bootstrap, paired_differences


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def array(*values: int, agents: int = 1) -> npt.NDArray[np.int8]:
    """The same differences for each agent, [A, N]."""
    return np.tile(np.array(values, dtype=np.int8), (agents, 1))


def test_differences_pair_by_prompt_id_whatever_the_order() -> None:
    treated = {"b": 1, "a": 0, "c": 1, "only treated": 1}
    control = {"a": 1, "b": 0, "c": 1, "only control": 0}
    assert paired_differences([(treated, control)]).tolist() == [[-1, 1, 0]]


def test_differences_of_several_agents_are_on_the_prompts_that_all_answered() -> None:
    first = ({"c": 0, "a": 0, "b": 1}, {"a": 1, "b": 0, "c": 0})
    second = ({"b": 1, "a": 1, "d": 1}, {"d": 1, "a": 0, "b": 1})
    assert paired_differences([first, second]).tolist() == [[-1, 1], [1, 0]]
    assert paired_differences([first, ({}, {})]).shape == (2, 0)


def test_standard_error_of_a_difference_by_hand() -> None:
    # sqrt(0.8*0.2/100 + 0.5*0.5/100) = sqrt(0.0016 + 0.0025) = sqrt(0.0041) = 0.06403...
    assert difference_standard_error(0.8, 100, 0.5, 100) == pytest.approx(0.0640312, abs=1e-6)


@pytest.mark.parametrize(
    ("accuracy", "harmed"),
    [
        (0.365, False),  # 0.5 - 0.365 = 0.135; 2 * sqrt(0.2318/100 + 0.25/100) = 2 * 0.06941 = 0.1388
        (0.36, True),  # 0.14 against 2 * sqrt(0.2304/100 + 0.25/100) = 2 * 0.06931 = 0.1386
        (0.62, False),
    ],
)
def test_harm_begins_past_two_standard_errors(accuracy: float, harmed: bool) -> None:
    assert is_harmed(accuracy, 100, 0.5, 100) is harmed


def test_equal_accuracies_are_no_harm_even_where_the_error_is_zero() -> None:
    assert not is_harmed(1.0, 72, 1.0, 72)
    assert not is_harmed(0.1 + 0.2, 10, 0.3, 10)
    assert is_harmed(0.0, 72, 1.0, 72)
    assert not is_harmed(0.0, 0, 1.0, 72)


def test_gain_is_the_mean_over_cells_of_the_mean_over_seeds() -> None:
    # Cell one: seeds 2/4 and 0/2 -> mean 0.25. Cell two: seeds 1 and -1 -> mean 0. Over cells: 0.125.
    gain = paired_bootstrap(
        [[array(1, 1, 0, 0), array(1, -1)], [array(1), array(-1)]],
        rng=rng(),
    )
    assert gain is not None
    assert gain.mean == pytest.approx(0.125)
    assert gain.low < gain.mean < gain.high


def test_every_agent_of_a_task_is_a_cell() -> None:
    # Three agents on one task, 1/2, -1/2 and 1/2 over its two prompts, and one on another, 1: mean (0.5 + 1) / 4.
    three = np.array([[1, 0], [0, -1], [0, 1]], dtype=np.int8)
    gain = paired_bootstrap([[three], [array(1, 1)]], rng=rng())
    assert gain is not None
    assert gain.mean == pytest.approx(0.375)
    # Sums over the three by prompt, 1 and 0: replicates reach from (0 + 1) / 4 to (1 + 1) / 4.
    assert (gain.low, gain.high) == (0.25, 0.5)


def test_equal_differences_give_an_interval_of_no_width() -> None:
    gain = paired_bootstrap([[array(1, 1, 1), array(1, 1)]], rng=rng())
    assert gain is not None
    assert (gain.mean, gain.low, gain.high) == (1.0, 1.0, 1.0)
    assert gain.is_clear


def test_nothing_to_compare_is_none_and_not_zero() -> None:
    assert paired_bootstrap([], rng=rng()) is None
    assert paired_bootstrap([[array()]], rng=rng()) is None


def test_tasks_must_share_their_seeds() -> None:
    with pytest.raises(ValueError, match=r"seeds per task=\[2, 1\]"):
        paired_bootstrap([[array(1), array(0)], [array(1)]], rng=rng())


def test_same_rng_gives_the_same_interval_and_seeds_widen_it() -> None:
    alike = [array(*([1] * 5 + [0] * 5)), array(*([1] * 5 + [0] * 5))]
    apart = [array(*([1] * 9 + [0])), array(*([1] + [0] * 9))]
    first, again = paired_bootstrap([alike], rng=rng()), paired_bootstrap([alike], rng=rng())
    wider = paired_bootstrap([apart], rng=rng())
    assert first == again
    assert first is not None and wider is not None
    assert first.mean == pytest.approx(wider.mean)
    assert wider.high - wider.low > 1.3 * (first.high - first.low)


def test_single_seed_spread_is_that_of_resampled_prompts() -> None:
    # 100 prompts, half +1 and half 0: the standard error of the mean is sqrt(0.25/100) = 0.05, so 0.5 -+ 1.96 * 0.05.
    gain = paired_bootstrap([[array(*([1, 0] * 50))]], rng=rng())
    assert gain is not None
    assert gain.low == pytest.approx(0.402, abs=0.011)
    assert gain.high == pytest.approx(0.598, abs=0.011)


@pytest.mark.parametrize("agents", [1, 3])
def test_interval_covers_the_true_gain_about_as_often_as_it_says(agents: int) -> None:
    """Three agents that answer alike are no more evidence than one; taken as independent they are covered 73 times in 100."""
    draw = np.random.default_rng(1)
    true_gain, covered, trials = 0.3, 0, 300
    for _ in range(trials):
        sample = draw.choice([-1, 0, 1], size=72, p=[0.1, 0.5, 0.4])
        gain = paired_bootstrap([[array(*sample, agents=agents)]], rng=draw, replicates=400)
        assert gain is not None
        covered += gain.low <= true_gain <= gain.high
    assert 0.91 <= covered / trials <= 0.98
