"""HACPO: capabilities, joint advantages by hand, cross rows, and its limits."""

import msgspec
import numpy as np
import pytest

from agents.config import Objective
from agents.rows import Row, Stream
from agents.sharing.config import HACPO, Isolated
from agents.sharing.hacpo import RECEIVER, Capabilities, HACPORule, joint_advantages
from agents.sharing.isolated import IsolatedRule
from agents.sharing.rule import Shared
from agents.testing import ScriptedReceiver, make_group, make_prompt, make_rollouts
from agents.types import Group, Prompt
from exchange.types import AgentName, RolloutGroup
from tokenalign import Encoder, Translator
from tokenalign.testing import EOS_ID, char_tokenizer

PLAIN = Objective(scale_rewards="none")
BETA = AgentName("beta")


def judge(prompt: Prompt, text: bytes) -> float:
    return float(text == b"ba")


def make_rule(config: HACPO | None = None, objective: Objective = PLAIN, max_tokens: int = 64) -> HACPORule:
    translator = Translator(Encoder(char_tokenizer()), eos_id=EOS_ID)
    return HACPORule(config or HACPO(), objective, ScriptedReceiver(judge, translator, max_tokens=max_tokens))


async def share(rule: HACPORule, group: Group, *records: RolloutGroup) -> Shared:
    return await rule.share([group], {group.prompt.id: records}, step=0, steps=1, rng=np.random.default_rng(0))


def of(shared: Shared, stream: Stream) -> list[Row]:
    return [row for row in shared.rows if row.stream is stream]


def rewards(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(values, dtype=np.float32)


def test_capability_is_the_mean_reward_of_the_last_batches() -> None:
    capabilities = Capabilities(window=2, max_ratio=4.0)
    for batch in (rewards(1, 1), rewards(0, 1), rewards(0, 0, 0, 1), rewards(float("nan"))):
        capabilities.note(BETA, batch)
    # The first batch has left the window, and one of abstentions is none: 2 of 6.
    assert capabilities.of(BETA) == pytest.approx(2 / 6)


@pytest.mark.parametrize(("mine", "theirs", "expected"), [(0.5, 0.25, 0.5), (0.5, 1, 2), (0, 1, 4), (1, 0, 0.25), (0, 0, 1)])
def test_the_quotient_of_capabilities_is_bounded(mine: float, theirs: float, expected: float) -> None:
    capabilities = Capabilities(window=5, max_ratio=4.0)
    capabilities.note(RECEIVER, rewards(mine))
    capabilities.note(BETA, rewards(theirs, -theirs if theirs == 0 else theirs))
    assert capabilities.ratio(BETA, RECEIVER) == pytest.approx(expected)


def test_joint_advantages_by_hand() -> None:
    capabilities = Capabilities(window=5, max_ratio=4.0)
    capabilities.note(RECEIVER, rewards(1, 0, 0, 0))
    capabilities.note(BETA, rewards(1, 0))
    groups = {RECEIVER: rewards(1, 0), BETA: rewards(1, 1, 0)}
    got = joint_advantages(groups, capabilities, PLAIN, 0.0)
    # P_k / P_j = 1/2 and P_j / P_k = 2: mu_k = (1 + 0 + 1/2 + 1/2 + 0) / 5, mu_j = (2 + 0 + 1 + 1 + 0) / 5
    np.testing.assert_allclose(got[RECEIVER], [1 - 0.4, -0.4])
    np.testing.assert_allclose(got[BETA], [1 - 0.8, 1 - 0.8, -0.8])
    joint_std = np.std([1, 0, 1, 1, 0], ddof=1)
    scaled = joint_advantages(groups, capabilities, Objective(), 0.0)
    np.testing.assert_allclose(scaled[RECEIVER], np.array([0.6, -0.4]) / (joint_std + 1e-4))


def test_equal_rewards_give_no_advantage_whatever_the_capabilities() -> None:
    capabilities = Capabilities(window=5, max_ratio=4.0)
    capabilities.note(RECEIVER, rewards(1, 0, 0, 0))
    capabilities.note(BETA, rewards(1, 0))
    got = joint_advantages({RECEIVER: rewards(1, 1), BETA: rewards(1, 1)}, capabilities, Objective(), 0.0)
    assert not got[RECEIVER].any() and not got[BETA].any()


async def test_cross_rows_carry_the_quotient_and_the_peers_sums() -> None:
    # Receiver: 1 of 4, peer: "ba" and "ab", by the receiver's judge 1 of 2. P_j / P_k = 2.
    shared = await share(make_rule(), make_group(make_prompt(), [1, 0, 0, 0]), make_rollouts([b"ba", b"ab"]))
    # mu_k = (1 + 1/2) / 6, mu_j = (2 + 1) / 6
    np.testing.assert_allclose([row.advantage for row in of(shared, Stream.OWN)], [0.75, -0.25, -0.25, -0.25])
    good, bad = of(shared, Stream.PEER)
    np.testing.assert_allclose([good.advantage, bad.advantage], [2 * 0.5, 2 * -0.5])
    assert good.spans is not None and good.spans.span.tolist() == [0, 0, 1]
    np.testing.assert_allclose(good.spans.logprobs, [-1.0, -0.5])
    assert shared.counters["peer/beta/capability"] == pytest.approx(2)


async def test_equal_capabilities_give_the_unions_mean() -> None:
    shared = await share(make_rule(), make_group(make_prompt(), [1, 0]), make_rollouts([b"ba", b"ab"]))
    assert [row.advantage for row in shared.rows] == [0.5, -0.5, 0.5, -0.5]


async def test_capabilities_reach_over_steps() -> None:
    rule = make_rule(HACPO(capability_window=2))
    for own, texts in (([1.0, 0.0], [b"ba"]), ([0.0, 0.0], [b"ab"]), ([0.0, 0.0], [b"ba"])):
        shared = await share(rule, make_group(make_prompt(), own), make_rollouts(texts))
    # The last two steps: the peer 1 of 2, the receiver 0 of 4.
    assert shared.counters["peer/beta/capability"] == 4


async def test_rows_that_the_receiver_cannot_hold_still_shape_the_baseline() -> None:
    shared = await share(make_rule(max_tokens=2), make_group(make_prompt(), [1, 0]), make_rollouts([b"ba", b"b"]))
    (row,) = of(shared, Stream.PEER)
    assert len(row.ids) == 2 and row.advantage == -0.5


async def test_truncated_peer_rows_can_be_masked() -> None:
    objective = Objective(scale_rewards="none", mask_truncated_completions=True)
    record = make_rollouts([b"ba"], finished=False)
    shared = await share(make_rule(objective=objective), make_group(make_prompt(), [1, 0]), record)
    assert not of(shared, Stream.PEER)


async def test_without_peers_the_rows_are_grpos() -> None:
    group = make_group(make_prompt(), [1, 0, 0])
    for objective in (PLAIN, Objective(), Objective(scale_rewards="batch"), Objective(baseline="leave_one_out")):
        shared = await share(make_rule(objective=objective), group)
        alone = await IsolatedRule(Isolated(), objective, ScriptedReceiver(judge)).share(
            [group], {}, step=0, steps=1, rng=np.random.default_rng(0)
        )
        assert [row.advantage for row in shared.rows] == [row.advantage for row in alone.rows]


def test_what_was_noted_is_remembered_over_an_interruption() -> None:
    before, after = (Capabilities(window=2, max_ratio=4.0) for _ in range(2))
    for rewards in ([0.0, 1.0], [1.0, 1.0], [0.0, 0.0]):
        before.note(AgentName("beta"), np.array(rewards, np.float32))
    after.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(before.state())))
    for each in (before, after):
        each.note(AgentName("beta"), np.array([1.0, 0.0], np.float32))
    assert after.of(AgentName("beta")) == before.of(AgentName("beta")) == 0.25
