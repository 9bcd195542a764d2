"""Advantages: numbers by hand, zero-variance groups, abstentions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.advantages import batch_spread, group_advantages, mean, spread
from agents.config import Objective

PLAIN = Objective(scale_rewards="none")


def rewards(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(values, dtype=np.float32)


def test_group_advantages_by_hand() -> None:
    # mean 0.25; squared differences 0.5625 + 3 * 0.0625 = 0.75; ddof 1: 0.75 / 3 = 0.25, std 0.5
    got = group_advantages(rewards(1, 0, 0, 0), Objective(), 0.0)
    np.testing.assert_allclose(got, np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-4))


def test_leave_one_out_by_hand() -> None:
    # others' means: 0, 1/3, 1/3, 1/3
    got = group_advantages(rewards(1, 0, 0, 0), Objective(baseline="leave_one_out", scale_rewards="none"), 0.0)
    np.testing.assert_allclose(got, [1, -1 / 3, -1 / 3, -1 / 3])


def test_batch_scaling_uses_the_given_spread() -> None:
    groups = [rewards(1, 0), rewards(3, 1)]
    # all four: mean 1.25; squares 0.0625 + 1.5625 + 3.0625 + 0.0625 = 4.75; / 3
    std = batch_spread(groups)
    assert std == pytest.approx(np.sqrt(4.75 / 3))
    got = group_advantages(groups[0], Objective(scale_rewards="batch"), std)
    np.testing.assert_allclose(got, np.array([0.5, -0.5]) / (std + 1e-4))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
@given(size=st.integers(1, 64), value=st.floats(-10, 10, width=32))
def test_equal_rewards_give_exactly_zero(scale: str, baseline: str, size: int, value: float) -> None:
    objective = Objective(scale_rewards=scale, baseline=baseline)  # type: ignore[arg-type]
    got = group_advantages(np.full(size, value, dtype=np.float32), objective, 0.0)
    assert (got == 0.0).all()


def test_every_group_size_of_rewards_of_a_tenth_gives_exactly_zero() -> None:
    for size in range(3, 65):
        assert (group_advantages(np.full(size, 0.1, dtype=np.float32), Objective(), 0.0) == 0.0).all()


def test_abstentions_have_no_part_in_the_baseline() -> None:
    got = group_advantages(rewards(1, float("nan"), 0), PLAIN, 0.0)
    assert np.isnan(got[1])
    np.testing.assert_allclose(got[[0, 2]], [0.5, -0.5])


def test_a_lone_reward_has_no_advantage_under_leave_one_out() -> None:
    got = group_advantages(rewards(1, float("nan")), Objective(baseline="leave_one_out"), 0.0)
    assert got[0] == 0.0


def test_no_rewards_at_all() -> None:
    assert np.isnan(mean(rewards(float("nan"))))
    assert spread(rewards(float("nan"))) == 0.0
    assert batch_spread([]) == 0.0


@given(st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=16))
def test_advantages_sum_to_zero(values: list[float]) -> None:
    assert abs(group_advantages(rewards(*values), PLAIN, 0.0).sum()) < 1e-9
