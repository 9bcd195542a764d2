"""PRP: union advantages, guards, spans, both denominators."""

from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np
import pytest

from agents.config import Objective
from agents.rows import Row, Stream
from agents.sharing.config import PRP, Isolated
from agents.sharing.isolated import IsolatedRule
from agents.sharing.prp import PRPRule
from agents.sharing.rule import Shared
from agents.testing import ScriptedReceiver, make_group, make_prompt, make_rollouts
from agents.types import Group, Prompt
from exchange.types import Message, RolloutGroup
from tokenalign import Encoder, Translator
from tokenalign.testing import EOS_ID, char_tokenizer

PLAIN = Objective(scale_rewards="none")


def judge(prompt: Prompt, text: bytes) -> float:
    return float(text == b"ba")


def make_rule(config: PRP | None = None, objective: Objective = PLAIN, max_tokens: int = 64) -> PRPRule:
    tokenizer = char_tokenizer()
    translator = Translator(Encoder(tokenizer), eos_id=EOS_ID)
    return PRPRule(config or PRP(), objective, ScriptedReceiver(judge, translator, max_tokens=max_tokens))


async def share(rule: PRPRule, group: Group, *records: RolloutGroup, seed: int = 0) -> Shared:
    return await rule.share([group], {group.prompt.id: records}, step=0, steps=1, rng=np.random.default_rng(seed))


def of(shared: Shared, stream: Stream) -> list[Row]:
    return [row for row in shared.rows if row.stream is stream]


async def test_advantages_are_over_the_union_with_the_receivers_own_rewards() -> None:
    # own 1, 0; peers "ba" -> 1 and "ab" -> 0 by the receiver's judge (the record says 0 and 0): mean 0.5
    shared = await share(make_rule(), make_group(make_prompt(), [0, 0]), make_rollouts([b"ba", b"ab"]))
    assert [row.advantage for row in of(shared, Stream.OWN)] == [-0.25, -0.25]
    assert sorted(row.advantage for row in of(shared, Stream.PEER)) == [-0.25, 0.75]


@pytest.mark.slow
async def test_peer_rows_are_at_most_half_and_drawn_without_a_look_at_rewards() -> None:
    group = make_group(make_prompt(), [0, 0])
    records = [make_rollouts([b"ba", b"ab", b"bb"]), make_rollouts([b"aa"], agent="gamma")]
    good = 0
    for seed in range(200):
        shared = await share(make_rule(), group, *records, seed=seed)
        assert len(of(shared, Stream.PEER)) == 2
        good += any(row.advantage > 0 for row in of(shared, Stream.PEER))
    # "ba" is one of four rows, two are kept: half of the draws, give or take four standard deviations.
    assert abs(good - 100) < 4 * np.sqrt(200 * 0.25)


async def test_a_smaller_share_keeps_fewer() -> None:
    group = make_group(make_prompt(), [0, 0, 0, 1])
    shared = await share(make_rule(PRP(max_peer_share=0.2)), group, make_rollouts([b"ba", b"ab", b"bb"]))
    assert len(of(shared, Stream.PEER)) == 1


async def test_behaviour_spans_carry_the_peers_sums() -> None:
    shared = await share(make_rule(PRP(weight=0.25)), make_group(make_prompt(), [0, 0]), make_rollouts([b"ba"]))
    (row,) = of(shared, Stream.PEER)
    assert row.spans is not None
    # receiver: b, a, <eos>; the peer's one token of log-prob -1 covers "ba", its end of sequence -0.5 covers <eos>
    assert row.spans.span.tolist() == [0, 0, 1]
    np.testing.assert_allclose(row.spans.logprobs, [-1.0, -0.5])
    assert row.weight == 0.25


@pytest.mark.parametrize("tokenizer", ["source", "receiver"])
async def test_every_row_of_a_group_carries_its_own_sums(tokenizer: str) -> None:
    record = make_rollouts([b"b", b"ba", b"bab", b"baba"], tokenizer=tokenizer)
    shared = await share(make_rule(), make_group(make_prompt(), [0, 0, 0, 0]), record)
    sums = [row.spans.logprobs.tolist() for row in of(shared, Stream.PEER) if row.spans is not None]
    assert sorted(sums, reverse=True) == [[-1, -0.5], [-2, -0.5], [-3, -0.5], [-4, -0.5]]


@pytest.mark.parametrize("tokenizer", ["source", "receiver"])
@pytest.mark.parametrize("denominator", ["behaviour", "receiver"])
async def test_a_peers_completion_is_conditioned_on_the_receivers_own_prompt(
    denominator: Literal["behaviour", "receiver"], tokenizer: str
) -> None:
    group = replace(make_group(make_prompt(), [0, 0]), prompt_ids=np.array([3, 1, 4, 1], dtype=np.int32))
    asked_otherwise = (Message(role="system", content="a hint"), Message(role="user", content="reverse ab:"))
    record = msgspec.structs.replace(make_rollouts([b"ba"], tokenizer=tokenizer), messages=asked_otherwise)
    shared = await share(make_rule(PRP(denominator=denominator)), group, record)
    (row,) = of(shared, Stream.PEER)
    assert row.prompt_ids.tolist() == [3, 1, 4, 1]


async def test_the_receiver_denominator_has_no_spans() -> None:
    shared = await share(make_rule(PRP(denominator="receiver")), make_group(make_prompt(), [0, 0]), make_rollouts([b"ba"]))
    (row,) = of(shared, Stream.PEER)
    assert row.spans is None


async def test_an_equal_tokenizer_keeps_the_sampled_ids() -> None:
    record = make_rollouts([b"ba"], tokenizer="receiver")
    shared = await share(make_rule(), make_group(make_prompt(), [0, 0]), record)
    (row,) = of(shared, Stream.PEER)
    assert row.ids.tolist() == record.ids.tolist()
    assert row.spans is not None and row.spans.span.tolist() == [0, 1]


async def test_a_truncated_peer_row_gets_no_eos_and_can_be_masked() -> None:
    record = make_rollouts([b"ba"], finished=False)
    (row,) = of(await share(make_rule(), make_group(make_prompt(), [0, 0]), record), Stream.PEER)
    assert EOS_ID not in row.ids
    masked = make_rule(objective=Objective(mask_truncated_completions=True))
    assert not of(await share(masked, make_group(make_prompt(), [0, 0]), record), Stream.PEER)


async def test_rows_that_the_receiver_cannot_hold_are_left_out() -> None:
    shared = await share(make_rule(max_tokens=2), make_group(make_prompt(), [0, 1]), make_rollouts([b"ba", b"b"]))
    assert [len(row.ids) for row in of(shared, Stream.PEER)] == [2]


async def test_the_newest_group_of_each_peer_counts() -> None:
    records = [make_rollouts([b"ab"], step=1), make_rollouts([b"ba"], step=2)]
    shared = await share(make_rule(), make_group(make_prompt(), [0, 0]), *records)
    assert [row.advantage for row in of(shared, Stream.PEER)] == [pytest.approx(2 / 3)]


async def test_without_peers_the_rows_are_grpos() -> None:
    group = make_group(make_prompt(), [1, 0, 0])
    for objective in (PLAIN, Objective(), Objective(scale_rewards="batch")):
        shared = await share(make_rule(objective=objective), group)

        alone = await IsolatedRule(Isolated(), objective, ScriptedReceiver(judge)).share(
            [group], {}, step=0, steps=1, rng=np.random.default_rng(0)
        )
        assert [row.advantage for row in shared.rows] == [row.advantage for row in alone.rows]


async def test_abstaining_and_masked_own_rows_make_no_room_for_peers() -> None:
    nan = float("nan")
    record = make_rollouts([b"ba", b"ab", b"bb", b"aa"])
    shared = await share(make_rule(), make_group(make_prompt(), [1, nan, nan, nan]), record)
    assert (len(of(shared, Stream.OWN)), len(of(shared, Stream.PEER))) == (1, 1)
    group = make_group(make_prompt(), [1, 0, 0, 0])
    cut = replace(group, completions=tuple(replace(each, finished=False) for each in group.completions))
    shared = await share(make_rule(objective=Objective(mask_truncated_completions=True)), cut, record)
    assert not shared.rows


@pytest.mark.parametrize(("own", "share_of_peers", "expected"), [(22, 0.12, 3), (4, 0.5, 4), (3, 0.25, 1), (2, 0.2, 0)])
async def test_the_share_is_exact(own: int, share_of_peers: float, expected: int) -> None:
    rule = make_rule(PRP(max_peer_share=share_of_peers))
    shared = await share(rule, make_group(make_prompt(), [1] + [0] * (own - 1)), make_rollouts([b"ba"] * 8))
    assert len(of(shared, Stream.PEER)) == expected
