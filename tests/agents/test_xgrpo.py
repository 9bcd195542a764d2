"""XGRPO: the shared baseline by hand, its limits, and what is pooled."""

import numpy as np
import pytest

from agents.advantages import group_advantages
from agents.config import Objective
from agents.sharing.config import XGRPO
from agents.sharing.xgrpo import XGRPORule, shared_baseline_advantages
from agents.testing import ScriptedReceiver, make_group, make_prompt
from exchange.types import AgentName, GroupRewards, Version

PLAIN = Objective(scale_rewards="none")


def rewards(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(values, dtype=np.float32)


def record(*values: float, agent: str = "beta", fingerprint: str = "reward", step: int = 0) -> GroupRewards:
    return GroupRewards(
        agent=AgentName(agent),
        step=step,
        version=Version(0, step),
        prompt_id=make_prompt().id,
        task="reverse",
        rewards=rewards(*values),
        reward_fingerprint=fingerprint,
    )


def test_the_default_baseline_is_the_unions_mean() -> None:
    # union 1,0 and 1,1,0,1: mean 4/6
    got = shared_baseline_advantages(rewards(1, 0), rewards(1, 1, 0, 1), XGRPO(), PLAIN, 0.0)
    np.testing.assert_allclose(got, [1 - 4 / 6, -4 / 6])


def test_a_given_share_weights_the_two_means() -> None:
    # b = 0.75 * 0.5 + 0.25 * 1
    got = shared_baseline_advantages(rewards(1, 0), rewards(1, 1), XGRPO(peer_share=0.25), PLAIN, 0.0)
    np.testing.assert_allclose(got, [1 - 0.625, -0.625])


def test_union_and_own_std() -> None:
    own, peers = rewards(1, 0), rewards(1, 1)
    union_std = np.std([1, 0, 1, 1], ddof=1)
    own_std = np.std([1, 0], ddof=1)
    objective = Objective()
    union = shared_baseline_advantages(own, peers, XGRPO(), objective, 0.0)
    np.testing.assert_allclose(union, np.array([0.25, -0.75]) / (union_std + 1e-4))
    lone = shared_baseline_advantages(own, peers, XGRPO(std="own"), objective, 0.0)
    np.testing.assert_allclose(lone, np.array([0.25, -0.75]) / (own_std + 1e-4))


def test_own_std_of_equal_rewards_does_not_divide_by_epsilon() -> None:
    got = shared_baseline_advantages(rewards(0, 0), rewards(1, 1), XGRPO(std="own"), Objective(), 0.0)
    assert (got == 0.0).all()


@pytest.mark.parametrize("peers", [rewards(), rewards(float("nan"))])
def test_no_peer_rewards_give_grpo_bit_for_bit(peers: np.ndarray[tuple[int], np.dtype[np.float32]]) -> None:
    own = rewards(0.1, 0.7, 0.3, 0.1)
    for objective in (Objective(), Objective(baseline="leave_one_out"), PLAIN):
        got = shared_baseline_advantages(own, peers, XGRPO(), objective, 0.3)
        assert (got == group_advantages(own, objective, 0.3)).all()


async def test_only_equal_reward_fingerprints_and_the_newest_group_are_pooled() -> None:
    rule = XGRPORule(XGRPO(), PLAIN, ScriptedReceiver(lambda prompt, text: 0.0))
    group = make_group(make_prompt(), [1, 0])
    peers = {
        group.prompt.id: [
            record(1, 1, step=4),
            record(0, 0, step=3),
            record(1, 1, 1, 1, agent="gamma", fingerprint="another"),
        ]
    }
    shared = await rule.share([group], peers, step=0, steps=1, rng=np.random.default_rng(0))
    np.testing.assert_allclose([row.advantage for row in shared.rows], [0.25, -0.75])
    assert shared.counters["xgrpo/pooled_groups"] == 1


async def test_the_degenerate_case_is_counted() -> None:
    rule = XGRPORule(XGRPO(), PLAIN, ScriptedReceiver(lambda prompt, text: 0.0))
    group = make_group(make_prompt(), [0, 0])
    shared = await rule.share([group], {group.prompt.id: [record(1, 0)]}, step=0, steps=1, rng=np.random.default_rng(0))
    assert shared.counters["xgrpo/all_fail_peer_success"] == 1
    np.testing.assert_allclose([row.advantage for row in shared.rows], [-0.25, -0.25])


@pytest.mark.parametrize("share", [None, 0.1, 0.3, 0.7])
def test_equal_rewards_on_both_sides_give_exactly_zero(share: float | None) -> None:
    own, peers = np.full(3, 0.1, dtype=np.float32), np.full(5, 0.1, dtype=np.float32)
    for objective in (Objective(), PLAIN):
        assert (shared_baseline_advantages(own, peers, XGRPO(peer_share=share), objective, 0.0) == 0.0).all()


@pytest.mark.filterwarnings("error")
async def test_a_group_without_any_judgement_is_no_trouble() -> None:
    rule = XGRPORule(XGRPO(), PLAIN, ScriptedReceiver(lambda prompt, text: 0.0))
    group = make_group(make_prompt(), [float("nan"), float("nan")])
    shared = await rule.share([group], {group.prompt.id: [record(1, 0)]}, step=0, steps=1, rng=np.random.default_rng(0))
    assert not shared.rows
