"""Grafting: which groups are replaced, by what, and with which advantages."""

import numpy as np
import pytest

from agents.config import Objective
from agents.rows import Row, Stream
from agents.sharing.config import Graft
from agents.sharing.graft import GraftRule
from agents.sharing.rule import Shared
from agents.testing import ScriptedReceiver, make_group, make_prompt, make_rollouts
from agents.types import Group, Prompt
from exchange.types import RolloutGroup
from tokenalign import Encoder, Translator
from tokenalign.testing import EOS_ID, char_tokenizer

PLAIN = Objective(scale_rewards="none")


def judge(prompt: Prompt, text: bytes) -> float:
    return float(text == b"ba")


def make_rule(objective: Objective = PLAIN, max_tokens: int = 64) -> GraftRule:
    translator = Translator(Encoder(char_tokenizer()), eos_id=EOS_ID)
    return GraftRule(Graft(), objective, ScriptedReceiver(judge, translator, max_tokens=max_tokens))


async def share(rule: GraftRule, group: Group, *records: RolloutGroup, seed: int = 0) -> Shared:
    return await rule.share([group], {group.prompt.id: records}, step=0, steps=1, rng=np.random.default_rng(seed))


def of(shared: Shared, stream: Stream) -> list[Row]:
    return [row for row in shared.rows if row.stream is stream]


async def test_a_failed_group_gives_way_to_the_peers_mixed_one() -> None:
    shared = await share(make_rule(), make_group(make_prompt(), [0, 0]), make_rollouts([b"ba", b"ab", b"bb"]))
    assert not of(shared, Stream.OWN)
    np.testing.assert_allclose([row.advantage for row in of(shared, Stream.PEER)], [2 / 3, -1 / 3, -1 / 3])
    assert all(row.weight == 1.0 and row.spans is not None for row in shared.rows)
    assert shared.counters == {"graft/groups": 1, "graft/rows": 3}


@pytest.mark.parametrize("texts", [[b"ab", b"bb"], [b"ba", b"ba"]])
async def test_a_peers_group_of_one_outcome_teaches_no_difference(texts: list[bytes]) -> None:
    shared = await share(make_rule(), make_group(make_prompt(), [0, 0]), make_rollouts(texts))
    assert len(of(shared, Stream.OWN)) == 2 and not of(shared, Stream.PEER)


async def test_an_own_success_keeps_the_group() -> None:
    rule, group = make_rule(), make_group(make_prompt(), [0, 1])
    assert rule.wants([group]) == []
    shared = await share(rule, group, make_rollouts([b"ba", b"ab"]))
    assert [row.advantage for row in shared.rows] == [-0.5, 0.5]


async def test_a_group_that_nobody_judged_is_not_failed() -> None:
    rule, group = make_rule(), make_group(make_prompt(), [float("nan")] * 2)
    assert rule.wants([group]) == []
    assert not (await share(rule, group, make_rollouts([b"ba", b"ab"]))).rows


async def test_one_of_several_mixed_groups_is_drawn_uniformly() -> None:
    records = [
        make_rollouts([b"ba", b"ab"]),
        make_rollouts([b"bb"], agent="delta"),
        make_rollouts([b"ba", b"a", b"b"], agent="eta"),
    ]
    drawn = [
        len((await share(make_rule(), make_group(make_prompt(), [0, 0]), *records, seed=seed)).rows) for seed in range(200)
    ]
    assert set(drawn) == {2, 3}
    assert abs(drawn.count(2) - 100) < 4 * np.sqrt(200 * 0.25)


async def test_the_whole_peer_group_shapes_the_advantages_of_the_rows_that_can_be_held() -> None:
    shared = await share(make_rule(max_tokens=2), make_group(make_prompt(), [0, 0]), make_rollouts([b"ba", b"b", b"a"]))
    np.testing.assert_allclose([row.advantage for row in shared.rows], [-1 / 3, -1 / 3])


async def test_the_batchs_spread_is_that_of_what_is_trained() -> None:
    rule = make_rule(Objective(scale_rewards="batch"))
    groups = [make_group(make_prompt("p0"), [0, 0]), make_group(make_prompt("p1"), [1, 0])]
    peers = {groups[0].prompt.id: [make_rollouts([b"ba", b"ab", b"bb"])]}
    shared = await rule.share(groups, peers, step=0, steps=1, rng=np.random.default_rng(0))
    std = np.std([1, 0, 1, 0, 0], ddof=1)
    np.testing.assert_allclose([row.advantage for row in of(shared, Stream.OWN)], np.array([0.5, -0.5]) / (std + 1e-4))
    np.testing.assert_allclose([row.advantage for row in of(shared, Stream.PEER)], np.array([2, -1, -1]) / 3 / (std + 1e-4))
