"""Dynamic sampling: rounds until enough groups are live, never more than allowed; what a dead group still counts for."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.advantages import group_advantages
from agents.config import AgentConfig, Objective, TinyPolicy
from agents.dynamic_sampling import fill
from agents.rows import Stream, own_rows
from agents.sharing.config import SGT, XGRPO
from agents.sharing.sgt import SGTRule
from agents.sharing.xgrpo import XGRPORule
from agents.testing import ScriptedReceiver, make_group, make_prompt
from agents.types import Group
from exchange.types import AgentName, GroupRewards, Version

NAN = float("nan")
LIVE, PARTLY_JUDGED, FAILED, SOLVED, ABSTAINED = [1.0, 0.0], [1.0, NAN, 0.0], [0.1] * 3, [1.0, 1.0], [NAN, NAN]


def groups(rewards: Sequence[Sequence[float]], *, round_number: int = 0) -> list[Group]:
    return [make_group(make_prompt(f"{round_number}.{index}"), each) for index, each in enumerate(rewards)]


class Rounds:
    """Gives the scripted groups of each further round, and none behind the last."""

    def __init__(self, *rewards: Sequence[Sequence[float]]) -> None:
        self._rewards = rewards
        self.asked: list[tuple[int, int]] = []

    async def more(self, round_number: int, so_far: Sequence[Group]) -> list[Group]:
        self.asked.append((round_number, len(so_far)))
        present = round_number <= len(self._rewards)
        return groups(self._rewards[round_number - 1], round_number=round_number) if present else []


async def test_rounds_go_on_until_as_many_groups_are_live_as_the_step_has_prompts() -> None:
    rounds = Rounds([FAILED, SOLVED], [LIVE, LIVE], [LIVE, LIVE])
    found, metrics = await fill(groups([LIVE, FAILED]), rounds.more, rounds=5)
    assert rounds.asked == [(1, 2), (2, 4)]
    assert [group.prompt.id for group in found] == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
    assert [group.dead for group in found] == [False, True, True, True, False, False]
    assert metrics == {"dynamic_sampling/rounds": 2.0, "dynamic_sampling/kept": 3.0}


async def test_off_it_marks_nothing_and_tells_nothing() -> None:
    first = groups([FAILED, LIVE])
    found, metrics = await fill(first, Rounds().more, rounds=0)
    assert (found, metrics) == (first, {})
    assert not found[0].dead


async def test_no_further_prompts_end_the_rounds() -> None:
    rounds = Rounds([FAILED])
    found, metrics = await fill(groups([ABSTAINED]), rounds.more, rounds=9)
    assert len(rounds.asked) == 2 and all(group.dead for group in found)
    assert metrics == {"dynamic_sampling/rounds": 1.0, "dynamic_sampling/kept": 0.0}


KINDS = st.sampled_from([LIVE, PARTLY_JUDGED, FAILED, SOLVED, ABSTAINED])


@settings(max_examples=25)
@given(rounds=st.integers(1, 4), script=st.lists(KINDS, min_size=15, max_size=15))
async def test_rounds_are_bounded_and_rewards_stay_with_their_groups(rounds: int, script: list[list[float]]) -> None:
    scripted = Rounds(*(script[start : start + 3] for start in range(3, 15, 3)))
    found, metrics = await fill(groups(script[:3]), scripted.more, rounds=rounds)
    assert len(scripted.asked) <= rounds
    live = [each is LIVE or each is PARTLY_JUDGED for each in script[: len(found)]]
    assert [not group.dead for group in found] == live
    assert metrics["dynamic_sampling/kept"] == sum(live)
    assert sum(live) >= 3 or len(scripted.asked) == rounds
    assert sum(live[:-3]) < 3 or len(found) == 3, "a round that was not needed"


async def test_dead_groups_leave_the_denominators_of_live_ones() -> None:
    found, _ = await fill(groups([LIVE, FAILED, SOLVED]), Rounds().more, rounds=1)
    advantages = [group_advantages(group.rewards, Objective(), 1.0) for group in found if group.rewards is not None]
    assert len(own_rows(found, advantages, Objective())) == 2
    unmarked = groups([LIVE, FAILED, SOLVED])
    assert len(own_rows(unmarked, advantages, Objective())) == 7


async def test_a_row_of_average_reward_in_a_live_group_counts() -> None:
    found, _ = await fill(groups([[0.0, 0.5, 1.0]]), Rounds().more, rounds=1)
    rows = own_rows(found, [np.array([-1.0, 0.0, 1.0])], Objective())
    assert [row.advantage for row in rows] == [-1.0, 0.0, 1.0]


async def test_a_dead_failure_still_waits_for_a_peer_under_sgt() -> None:
    found, _ = await fill(groups([FAILED, SOLVED]), Rounds().more, rounds=1)
    rule = SGTRule(SGT(), Objective(), ScriptedReceiver(lambda *_: 1.0))
    assert rule.wants(found) == ["0.0"]
    shared = await rule.share(found, {}, step=0, steps=2, rng=np.random.default_rng(0))
    assert not shared.rows and list(rule.waiting) == ["0.0"]


async def test_a_dead_group_that_peers_give_an_advantage_is_trained_on() -> None:
    found, _ = await fill(groups([FAILED, FAILED]), Rounds().more, rounds=1)
    record = GroupRewards(
        agent=AgentName("beta"),
        step=0,
        version=Version(0, 0),
        prompt_id=found[0].prompt.id,
        task="reverse",
        rewards=np.array([1.0, 0.0], dtype=np.float32),
        reward_fingerprint="reward",
    )
    rule = XGRPORule(XGRPO(), Objective(), ScriptedReceiver(lambda *_: 1.0))
    shared = await rule.share(found, {record.prompt_id: [record]}, step=0, steps=2, rng=np.random.default_rng(0))
    assert [row.stream for row in shared.rows] == [Stream.OWN] * 3
    assert all(row.advantage < 0 for row in shared.rows)


def test_it_is_refused_where_a_batch_is_not_known_before_it_is_judged() -> None:
    with pytest.raises(ValueError, match="must stay 0 with samples ahead, got dynamic_sampling_rounds=2, max_staleness=1"):
        AgentConfig(policy=TinyPolicy(), dynamic_sampling_rounds=2, max_staleness=1)
    with pytest.raises(ValueError, match=r'beside objective\.scale_rewards="batch", got dynamic_sampling_rounds=1'):
        AgentConfig(policy=TinyPolicy(), dynamic_sampling_rounds=1, objective=Objective(scale_rewards="batch"))
    with pytest.raises(ValueError, match="dynamic_sampling_rounds"):
        AgentConfig(policy=TinyPolicy(), dynamic_sampling_rounds=-1)
