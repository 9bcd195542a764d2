"""SGT: the gate, the draw, verification, late rescues, refusals, lambda, the coin; its placebo."""

from dataclasses import replace

import numpy as np
import pytest

from agents.config import Objective
from agents.evaluate import TaskScore
from agents.rows import Stream
from agents.sharing.config import SGT, SGTPlacebo
from agents.sharing.rule import Shared
from agents.sharing.sgt import SGTRule, draw_order, is_withheld
from agents.sharing.sgt_placebo import SGTPlaceboRule
from agents.sharing.texts import unpack
from agents.testing import ScriptedReceiver, make_group, make_prompt
from agents.trial import CoinTrial
from agents.types import Group, Prompt
from exchange.types import AgentName, PromptId, RolloutGroup, VerifiedSuccesses, Version
from tokenalign import Encoder, Translator
from tokenalign.testing import EOS_ID, char_tokenizer, id_of


def translator() -> Translator:
    tokenizer = char_tokenizer()
    return Translator(Encoder(tokenizer), eos_id=EOS_ID)


def successes(*texts: bytes, agent: str = "beta", key: str = "p0", step: int = 0) -> VerifiedSuccesses:
    return VerifiedSuccesses(
        agent=AgentName(agent),
        step=step,
        version=Version(0, step),
        prompt_id=PromptId(key),
        task="reverse",
        texts=np.frombuffer(b"".join(texts), dtype=np.uint8),
        text_lengths=np.array([len(text) for text in texts], dtype=np.int32),
        token_ends=np.array([len(text) for text in texts], dtype=np.int32),
        token_counts=np.ones(len(texts), dtype=np.int32),
        rewards=np.ones(len(texts), dtype=np.float32),
        tokenizer="source",
    )


def accept(prompt: Prompt, text: bytes) -> float:
    return float(text.decode() == prompt.columns["answer"])


async def share(
    rule: SGTRule, groups: list[Group], *records: VerifiedSuccesses, step: int = 0, steps: int = 10, seed: int = 0
) -> Shared:
    peers: dict[PromptId, list[VerifiedSuccesses]] = {}
    for record in records:
        peers.setdefault(record.prompt_id, []).append(record)
    return await rule.share(groups, peers, step=step, steps=steps, rng=np.random.default_rng(seed))


def make_rule(config: SGT | None = None, **receiver: object) -> tuple[SGTRule, ScriptedReceiver]:
    scripted = ScriptedReceiver(accept, translator(), **receiver)  # type: ignore[arg-type]
    return SGTRule(config or SGT(), Objective(), scripted), scripted


def rescued(shared: Shared) -> list[bytes]:
    return [rescue.source.text for rescue in shared.rescues]


async def test_a_failed_group_is_rescued_and_ends_in_the_receivers_eos() -> None:
    rule, _ = make_rule(SGT(lambda_=0.3))
    shared = await share(rule, [make_group(make_prompt(), [0, 0])], successes(b"ba"))
    (row,) = [row for row in shared.rows if row.stream is Stream.RESCUE]
    tokenizer = char_tokenizer()
    assert row.ids.tolist() == [id_of(tokenizer, "b"), id_of(tokenizer, "a"), EOS_ID]
    assert row.weight == 0.3
    assert shared.counters["rescues"] == 1


@pytest.mark.parametrize("rewards", [[1, 0], [1, 1], [float("nan"), float("nan")], [float("nan"), 1]])
async def test_a_group_with_a_success_or_without_any_judgement_is_not_rescued(rewards: list[float]) -> None:
    rule, _ = make_rule()
    shared = await share(rule, [make_group(make_prompt(), rewards)], successes(b"ba"))
    assert not shared.rescues


async def test_without_peers_the_rows_are_grpos() -> None:
    rule, _ = make_rule()
    shared = await share(rule, [make_group(make_prompt(), [1, 0])])
    assert [row.stream for row in shared.rows] == [Stream.OWN, Stream.OWN]


async def test_a_success_that_the_receivers_reward_denies_is_not_learned_and_another_is_drawn() -> None:
    rule, receiver = make_rule()
    shared = await share(rule, [make_group(make_prompt(), [0, 0])], successes(b"xx", b"yy", b"ba"), seed=3)
    assert rescued(shared) == [b"ba"]
    assert shared.counters.get("rescues/unverified", 0) == len(receiver.verified) - 1


async def test_a_success_beyond_the_receivers_length_is_refused() -> None:
    rule, _ = make_rule(max_tokens=2)
    shared = await share(rule, [make_group(make_prompt(), [0, 0])], successes(b"ba"))
    assert not shared.rescues
    assert [*rule.waiting] == ["p0"]


async def test_a_text_that_the_receiver_cannot_read_costs_nothing() -> None:
    rule = SGTRule(SGT(), Objective(), ScriptedReceiver(lambda prompt, text: 1.0, translator()))
    shared = await share(rule, [make_group(make_prompt(), [0, 0])], successes(b"\xff\xfe"))
    assert not shared.rescues


async def test_a_failure_waits_for_a_late_success() -> None:
    rule, _ = make_rule(SGT(window=3))
    await share(rule, [make_group(make_prompt(), [0, 0])], step=0)
    other = make_group(make_prompt("p1"), [1, 0])
    for step in (1, 2):
        assert not (await share(rule, [other], step=step)).rescues
        assert [*rule.waiting] == ["p0"]
    shared = await share(rule, [other], successes(b"ba"), step=3)
    assert shared.counters["rescues/late"] == 1
    assert [*rule.waiting] == []


async def test_a_failure_waits_no_longer_than_its_window() -> None:
    rule, _ = make_rule(SGT(window=3))
    await share(rule, [make_group(make_prompt(), [0, 0])], step=0)
    shared = await share(rule, [make_group(make_prompt("p1"), [1, 0])], successes(b"ba"), step=4)
    assert not shared.rescues
    assert shared.counters["rescues/expired"] == 1


async def test_an_own_success_closes_an_open_failure() -> None:
    rule, _ = make_rule()
    await share(rule, [make_group(make_prompt(), [0, 0])], step=0)
    shared = await share(rule, [make_group(make_prompt(), [1, 0])], successes(b"ba"), step=1)
    assert not shared.rescues


async def test_a_rescue_happens_once() -> None:
    rule, _ = make_rule()
    await share(rule, [make_group(make_prompt(), [0, 0])], successes(b"ba"), step=0)
    shared = await share(rule, [make_group(make_prompt("p1"), [1, 0])], successes(b"ba"), step=1)
    assert not shared.rescues


async def test_the_open_gate_learns_from_successes_on_solved_prompts_too() -> None:
    rule, _ = make_rule(SGT(gate="off"))
    shared = await share(rule, [make_group(make_prompt(), [1, 1])], successes(b"ba"))
    assert rescued(shared) == [b"ba"]


def test_lambda_goes_linearly_to_its_final_value() -> None:
    rule, _ = make_rule(SGT(lambda_=1.0, lambda_final=0.5))
    assert [rule.weight(step, 11) for step in (0, 5, 10)] == [1.0, 0.75, 0.5]
    constant, _ = make_rule(SGT(lambda_=0.1))
    assert constant.weight(7, 10) == 0.1


def test_the_draw_is_uniform_over_peers_first() -> None:
    # beta has one success, gamma nine: each peer is drawn first half of the time.
    texts = {AgentName("beta"): unpack(successes(b"ba"))}
    texts[AgentName("gamma")] = unpack(successes(*[b"g%d" % index for index in range(9)]))
    first = [draw_order(texts, np.random.default_rng(seed))[0] for seed in range(2000)]
    from_beta = sum(peer == "beta" for peer, _ in first)
    assert abs(from_beta - 1000) < 4 * np.sqrt(2000 * 0.25)
    within = [text.text for peer, text in first if peer == "gamma"]
    counts = [within.count(b"g%d" % index) for index in range(9)]
    assert max(counts) < 3 * min(counts)


def test_the_draw_offers_every_success_once() -> None:
    order = draw_order(
        {AgentName("beta"): unpack(successes(b"a", b"b")), AgentName("gamma"): unpack(successes(b"c"))},
        np.random.default_rng(1),
    )
    assert sorted(text.text for _, text in order) == [b"a", b"b", b"c"]


def test_only_failures_want_experience_unless_the_gate_is_open() -> None:
    groups = [make_group(make_prompt("p0"), [0, 0]), make_group(make_prompt("p1"), [1, 0])]
    assert make_rule()[0].wants(groups) == ["p0"]
    assert make_rule(SGT(gate="off"))[0].wants(groups) == ["p0", "p1"]


def truncated(group: Group) -> Group:
    return replace(group, completions=tuple(replace(each, finished=False) for each in group.completions))


async def test_an_own_hit_that_was_cut_off_is_no_success() -> None:
    rule, _ = make_rule()
    shared = await share(rule, [truncated(make_group(make_prompt(), [1, 0]))], successes(b"ba"))
    assert rescued(shared) == [b"ba"]


async def test_a_group_without_any_judgement_leaves_an_open_failure_open() -> None:
    rule, _ = make_rule()
    await share(rule, [make_group(make_prompt(), [0, 0])], step=0)
    await share(rule, [make_group(make_prompt(), [float("nan"), float("nan")])], step=1)
    assert [*rule.waiting] == ["p0"]


async def test_a_newest_success_that_does_not_fit_hides_no_older_one() -> None:
    rule, _ = make_rule(max_tokens=3)
    records = [successes(b"ba", step=0), successes(b"babababa", step=1)]
    shared = await share(rule, [make_group(make_prompt(), [0, 0])], *records)
    assert rescued(shared) == [b"ba"]
    assert not rule.latest_only


def rule_with(coin: float, *, salt: str = "0/alpha") -> SGTRule:
    return SGTRule(SGT(coin=coin), Objective(), ScriptedReceiver(accept, translator()), salt=salt)


async def rescue_all(rule: SGTRule, count: int) -> Shared:
    keys = [f"p{index}" for index in range(count)]
    groups = [make_group(make_prompt(key), [0, 0]) for key in keys]
    return await share(rule, groups, *[successes(b"ba", key=key) for key in keys])


async def test_the_coin_keeps_its_share_of_rescues_out_of_the_rows() -> None:
    shared = await rescue_all(rule_with(0.5), 200)
    delivered = {rescue.prompt.id for rescue in shared.rescues}
    withheld = {rescue.prompt.id for rescue in shared.withheld}
    assert len(delivered) + len(withheld) == 200 and not delivered & withheld
    assert abs(len(withheld) - 100) < 4 * np.sqrt(200 * 0.25)
    assert sum(row.stream is Stream.RESCUE for row in shared.rows) == len(delivered) == shared.counters["rescues"]
    assert shared.counters["rescues/withheld"] == len(withheld)


async def test_a_prompt_stays_in_its_arm_however_often_it_comes() -> None:
    rule = rule_with(0.5)
    first, again = await rescue_all(rule, 40), await rescue_all(rule, 40)
    assert [each.prompt.id for each in first.withheld] == [each.prompt.id for each in again.withheld]


async def test_without_a_coin_everything_is_delivered() -> None:
    assert not (await rescue_all(rule_with(0.0), 40)).withheld


def test_agents_and_seeds_throw_coins_of_their_own() -> None:
    keys = [PromptId(f"p{index}") for index in range(64)]
    sides = {salt: tuple(is_withheld(key, coin=0.5, salt=salt) for key in keys) for salt in ("0/alpha", "0/beta", "1/alpha")}
    assert len(set(sides.values())) == 3


def rollouts(*texts_and_rewards: tuple[bytes, float], finished: bool = True) -> RolloutGroup:
    texts = [text for text, _ in texts_and_rewards]
    lengths = np.array([len(text) for text in texts], dtype=np.int32)
    count = len(texts)
    return RolloutGroup(
        agent=AgentName("beta"),
        step=0,
        version=Version(0, 0),
        prompt_id=PromptId("p0"),
        task="reverse",
        messages=(),
        texts=np.frombuffer(b"".join(texts), dtype=np.uint8),
        text_lengths=lengths,
        token_ends=lengths,
        token_counts=np.ones(count, dtype=np.int32),
        ids=np.zeros(count, dtype=np.int32),
        logprobs=np.zeros(count, dtype=np.float32),
        finished=np.full(count, finished),
        rewards=np.array([reward for _, reward in texts_and_rewards], dtype=np.float32),
        reward_fingerprint="r",
        tokenizer="source",
        temperature=1.0,
    )


async def placebo(record: RolloutGroup) -> list[bytes]:
    rule = SGTPlaceboRule(SGTPlacebo(), Objective(), ScriptedReceiver(accept, translator()))
    group = make_group(make_prompt(), [0, 0])
    shared = await rule.share([group], {group.prompt.id: [record]}, step=0, steps=1, rng=np.random.default_rng(0))
    return [rescue.source.text for rescue in shared.rescues]


async def test_the_placebo_imitates_what_the_peer_got_wrong() -> None:
    assert await placebo(rollouts((b"ba", 1.0), (b"ab", 0.0), (b"ba", 1.0))) == [b"ab"]


@pytest.mark.parametrize(
    "record",
    [
        rollouts((b"ab", 0.0), (b"bb", 0.0)),
        rollouts((b"ba", 1.0), (b"ba", 1.0)),
        rollouts((b"ba", 1.0), (b"ab", 0.0), finished=False),
        rollouts((b"ba", 1.0), (b"ab", float("nan"))),
        rollouts((b"ab", 1.0), (b"ba", 0.0)),
    ],
    ids=["no success", "no failure", "cut off", "not judged", "right by the receiver's reward"],
)
async def test_the_placebo_needs_a_success_and_a_finished_failure_beside_it(record: RolloutGroup) -> None:
    assert await placebo(record) == []


async def test_the_trial_tells_of_both_arms_with_the_final_answers() -> None:
    trial = CoinTrial()
    shared = await rescue_all(rule_with(0.5), 20)
    trial.take(shared)
    (task,) = trial.tasks()
    score = TaskScore(
        task=task.name,
        accuracy=0.5,
        correct=np.arange(20) % 2 == 0,
        prompt_ids=tuple(prompt.id for prompt in task.heldout),
        mean_length=1.0,
        eos_rate=1.0,
    )
    lines = list(trial.lines([score]))
    withheld = {rescue.prompt.id for rescue in shared.withheld}
    assert [line["delivered"] for line in lines] == [line["prompt_id"] not in withheld for line in lines]
    assert [line["correct"] for line in lines] == [True, False] * 10
