"""What the sharing rules compute in expectation, exact by enumeration.

A bigram policy over three tokens and at most two steps has seven completions. Every combination of own and peer groups is
enumerated with its probability, sent through the rules, and the expected gradient is compared with that of the expected
reward. Sequence-level unclipped ratios, `scale_rewards = "none"`, sums instead of means, full support, the end of sequence
within the ratio.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from agents.advantages import spread
from agents.config import Objective
from agents.microbatch import collate, completion_logits, token_logprobs
from agents.objectives.component import LogProbs
from agents.objectives.grpo import GRPOSurrogate
from agents.objectives.peer_surrogate import PeerSurrogate
from agents.rows import Row, Spans, Stream
from agents.sharing.config import PRP, SGT, XGRPO, Isolated
from agents.sharing.isolated import IsolatedRule
from agents.sharing.prp import PRPRule
from agents.sharing.sgt import SGTRule
from agents.sharing.xgrpo import shared_baseline_advantages
from agents.testing import BigramLM, ScriptedReceiver, make_group, make_prompt
from agents.types import Group
from exchange.types import AgentName, Message, RolloutGroup, VerifiedSuccesses, Version
from tokenalign import Encoder, Translator
from tokenalign.testing import EOS_ID, char_tokenizer

EOS = 0
OBJECTIVE = Objective(scale_rewards="none", loss_type="dr_grpo", epsilon=0.999, epsilon_high=1e6)
PROMPT = make_prompt()


def reward_of(ids: Sequence[int]) -> float:
    """Some completions succeed: those of two equal letters, and "b" alone."""
    return float(list(ids) in ([1, 1], [2, 2], [2, EOS]))


@dataclass(frozen=True)
class Policy:
    """A policy's completions with probabilities and rewards."""

    model: BigramLM
    ids: list[list[int]]
    probabilities: list[float]
    rewards: list[float]

    @classmethod
    def of(cls, model: BigramLM) -> "Policy":
        sequences = model.sequences(EOS, eos=EOS, max_length=2)
        ids = [each for each, _ in sequences]
        return cls(model, ids, [p for _, p in sequences], [reward_of(each) for each in ids])

    @property
    def success(self) -> float:
        return float(np.dot(self.probabilities, self.rewards))

    @property
    def variance(self) -> float:
        return self.success * (1 - self.success)


def near(model: BigramLM, amount: float, seed: int = 7) -> BigramLM:
    """A model moved from another by `amount` in a fixed direction."""
    moved = BigramLM(3, seed=0)
    moved.table.data = model.table.data + amount * BigramLM(3, seed=seed).table.data
    return moved


OWN = Policy.of(BigramLM(3, seed=1))
PEER = Policy.of(near(OWN.model, 0.7))


def on_policy_gradient(policy: Policy) -> torch.Tensor:
    """Gradient of the expected reward, by differentiating the enumeration."""
    table = policy.model.table.detach().clone().requires_grad_(True)
    logprobs = torch.log_softmax(table, dim=-1)
    expected = torch.zeros((), dtype=torch.float64)
    for ids, reward in zip(policy.ids, policy.rewards, strict=True):
        logprob = sum((logprobs[a, b] for a, b in zip([EOS, *ids], ids, strict=False)), torch.zeros((), dtype=torch.float64))
        expected = expected + reward * logprob.exp()
    (gradient,) = torch.autograd.grad(expected, table)
    return gradient


def gradient_of(rows: Sequence[Row]) -> torch.Tensor:
    """What a gradient ascent step on these rows follows: minus the gradient of the summed loss."""
    model = BigramLM(3, seed=1)
    stream = rows[0].stream
    component = GRPOSurrogate(OBJECTIVE, 2) if stream is Stream.OWN else PeerSurrogate(OBJECTIVE, 2)
    batch = collate(rows, pad_id=0, device=torch.device("cpu"), dtype=torch.float64)
    logprobs = token_logprobs(completion_logits(model, batch, temperature=1.0), batch)
    numerator = component.term(batch, LogProbs(current=logprobs, old=logprobs.detach())).numerator
    (gradient,) = torch.autograd.grad(numerator, model.table)
    return -gradient


def ratio_of(row: Row) -> float:
    """The importance ratio that the peer surrogate gives a row of one span."""
    batch = collate([row], pad_id=0, device=torch.device("cpu"), dtype=torch.float64)
    logprobs = token_logprobs(completion_logits(OWN.model, batch, temperature=1.0), batch).detach()
    return PeerSurrogate(OBJECTIVE, 2).term(batch, LogProbs(current=logprobs, old=logprobs)).stats["peer/ratio_mean"][0]


def draws(policy: Policy, size: int) -> list[tuple[tuple[int, ...], float]]:
    """Every group of `size` completions, by index, with its probability."""
    return [
        (indices, float(np.prod([policy.probabilities[index] for index in indices])))
        for indices in itertools.product(range(len(policy.ids)), repeat=size)
    ]


def own_group(indices: Sequence[int]) -> Group:
    return make_group(PROMPT, [OWN.rewards[index] for index in indices], ids=[OWN.ids[index] for index in indices])


def peer_record(peer: Policy, indices: Sequence[int]) -> RolloutGroup:
    """Peer completions in the receiver's own vocabulary; each spells its index, for the receiver's judge."""
    texts = [b"%d" % index for index in indices]
    ids = [peer.ids[index] for index in indices]
    logprobs = torch.log_softmax(peer.model.table.detach(), dim=-1)
    per_token = [[float(logprobs[a, b]) for a, b in zip([EOS, *each], each, strict=False)] for each in ids]
    return RolloutGroup(
        agent=AgentName("beta"),
        step=0,
        version=Version(0, 0),
        prompt_id=PROMPT.id,
        task=PROMPT.task,
        messages=(Message(role="user", content="x"),),
        texts=np.frombuffer(b"".join(texts), dtype=np.uint8),
        text_lengths=np.array([len(text) for text in texts], dtype=np.int32),
        token_ends=np.concatenate([np.full(len(each), len(text)) for each, text in zip(ids, texts, strict=True)]).astype(
            np.int32
        ),
        token_counts=np.array([len(each) for each in ids], dtype=np.int32),
        ids=np.concatenate([np.array(each, dtype=np.int32) for each in ids]),
        logprobs=np.concatenate([np.array(each, dtype=np.float32) for each in per_token]),
        finished=np.array([each[-1] == EOS for each in ids]),
        rewards=np.zeros(len(ids), dtype=np.float32),
        reward_fingerprint="reward",
        tokenizer="receiver",
        temperature=1.0,
    )


def as_one_span(row: Row) -> Row:
    """A row with one ratio for the whole sequence."""
    assert row.spans is not None
    whole = Spans(span=np.zeros(len(row.ids), dtype=np.int32), logprobs=row.spans.logprobs.sum(keepdims=True))
    return replace(row, spans=whole, weight=1.0)


async def pooled(peer: Policy, own: Sequence[int], theirs: Sequence[int]) -> list[Row]:
    judge = ScriptedReceiver(lambda prompt, text: peer.rewards[int(text)])
    rule = PRPRule(PRP(), OBJECTIVE, judge)
    peers = {PROMPT.id: [peer_record(peer, theirs)]}
    shared = await rule.share([own_group(own)], peers, step=0, steps=1, rng=np.random.default_rng(0))
    return [as_one_span(row) if row.stream is Stream.PEER else row for row in shared.rows]


async def expected_rows(peer: Policy, own_size: int, peer_size: int) -> dict[Stream, list[Row]]:
    """The rows of every combination, by stream; losses are linear in the advantage, so probabilities multiply it."""
    rows: dict[Stream, list[Row]] = {Stream.OWN: [], Stream.PEER: []}
    for own, own_probability in draws(OWN, own_size):
        for theirs, peer_probability in draws(peer, peer_size):
            for row in await pooled(peer, own, theirs):
                rows[row.stream].append(replace(row, advantage=row.advantage * own_probability * peer_probability))
    return rows


async def test_prp_with_exact_ratios_has_the_on_policy_gradient_up_to_self_inclusion() -> None:
    own_size, peer_size = 2, 1
    factor = 1 - 1 / (own_size + peer_size)
    rows = await expected_rows(PEER, own_size, peer_size)
    for stream, count in ((Stream.OWN, own_size), (Stream.PEER, peer_size)):
        torch.testing.assert_close(gradient_of(rows[stream]), count * factor * on_policy_gradient(OWN), rtol=1e-5, atol=1e-8)


async def test_the_variance_of_prp_grows_with_chi_square() -> None:
    chi_squares, variances = [], []
    for amount in (0.0, 1.0, 2.0, 3.0):
        peer = Policy.of(near(OWN.model, amount))
        squares = [p_n**2 / p_m for p_n, p_m in zip(OWN.probabilities, peer.probabilities, strict=True)]
        samples, second_moment = [], 0.0
        for theirs, probability in draws(peer, 1):
            (row,) = [row for row in await pooled(peer, (0, 3), theirs) if row.stream is Stream.PEER]
            samples.append((probability, gradient_of([row])))
            second_moment += probability * ratio_of(row) ** 2
        assert second_moment == pytest.approx(sum(squares), rel=1e-5)
        mean = sum((probability * gradient for probability, gradient in samples), torch.zeros(3, 3))
        chi_squares.append(sum(squares) - 1)
        variances.append(sum(probability * float(((gradient - mean) ** 2).sum()) for probability, gradient in samples))
    assert chi_squares[0] == pytest.approx(0, abs=1e-12)
    assert chi_squares == sorted(chi_squares)
    assert variances == sorted(variances)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0, None])
def test_the_expected_gradient_of_xgrpo(share: float | None) -> None:
    own_size, peer_size = 2, 2
    a = peer_size / (own_size + peer_size) if share is None else share
    coefficients = np.zeros(len(OWN.ids))
    baselines: list[tuple[float, float]] = []
    for own, own_probability in draws(OWN, own_size):
        own_rewards = np.array([OWN.rewards[index] for index in own], dtype=np.float32)
        for outcome in itertools.product([0.0, 1.0], repeat=peer_size):
            peer_rewards = np.array(outcome, dtype=np.float32)
            probability = own_probability * float(np.prod([PEER.success if each else 1 - PEER.success for each in outcome]))
            got = shared_baseline_advantages(own_rewards, peer_rewards, XGRPO(peer_share=share), OBJECTIVE, 0.0)
            np.add.at(coefficients, list(own), probability * got)
            baselines.append((probability, float(own_rewards[0] - got[0])))
    rows = [
        Row(stream=Stream.OWN, prompt_ids=np.array([EOS]), ids=np.array(ids), advantage=float(each))
        for ids, each in zip(OWN.ids, coefficients, strict=True)
    ]
    factor = 1 - (1 - a) / own_size
    torch.testing.assert_close(gradient_of(rows), own_size * factor * on_policy_gradient(OWN), rtol=1e-6, atol=1e-10)
    mean = sum(probability * each for probability, each in baselines)
    variance = sum(probability * (each - mean) ** 2 for probability, each in baselines)
    assert mean == pytest.approx((1 - a) * OWN.success + a * PEER.success)
    assert variance == pytest.approx((1 - a) ** 2 * OWN.variance / own_size + a**2 * PEER.variance / peer_size)


def test_the_reward_variance_of_the_pooled_mixture() -> None:
    own_size, peer_size = 3, 2
    total = own_size + peer_size
    a = peer_size / total
    within = means = squares = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=total):
        chances = [
            (policy.success if each else 1 - policy.success)
            for policy, each in zip([OWN] * own_size + [PEER] * peer_size, outcome, strict=True)
        ]
        probability = float(np.prod(chances))
        union = np.array(outcome, dtype=np.float32)
        within += probability * spread(union) ** 2 * (total - 1) / total
        means += probability * float(union.mean())
        squares += probability * float(union.mean()) ** 2
    mixture = (1 - a) * OWN.variance + a * PEER.variance + a * (1 - a) * (OWN.success - PEER.success) ** 2
    assert within + squares - means**2 == pytest.approx(mixture)


def successes(agent: str, count: int) -> VerifiedSuccesses:
    return VerifiedSuccesses(
        agent=AgentName(agent),
        step=0,
        version=Version(0, 0),
        prompt_id=PROMPT.id,
        task=PROMPT.task,
        texts=np.frombuffer(b"ba" * count, dtype=np.uint8),
        text_lengths=np.full(count, 2, dtype=np.int32),
        token_ends=np.full(count, 2, dtype=np.int32),
        token_counts=np.ones(count, dtype=np.int32),
        rewards=np.ones(count, dtype=np.float32),
        tokenizer="source",
    )


async def test_sgt_differs_from_grpo_on_the_rescue_set_only_and_that_set_has_its_stated_probability() -> None:
    tokenizer = char_tokenizer()
    translator = Translator(Encoder(tokenizer), eos_id=EOS_ID)
    receiver = ScriptedReceiver(lambda prompt, text: 1.0, translator)
    own_size, peer_sizes, p_n, p_m = 2, {"beta": 2, "gamma": 1}, 0.3, {"beta": 0.2, "gamma": 0.6}
    owners = ["own"] * own_size + [peer for peer, size in peer_sizes.items() for _ in range(size)]
    chances = {"own": p_n} | p_m
    rescued = 0.0
    for outcome in itertools.product([0, 1], repeat=len(owners)):
        drawn = list(zip(owners, outcome, strict=True))
        probability = float(np.prod([chances[owner] if each else 1 - chances[owner] for owner, each in drawn]))
        group = make_group(PROMPT, [each for owner, each in drawn if owner == "own"])
        counts = {peer: sum(each for owner, each in drawn if owner == peer) for peer in peer_sizes}
        records = [successes(peer, count) for peer, count in counts.items() if count]
        rng = np.random.default_rng(0)
        shared = await SGTRule(SGT(), OBJECTIVE, receiver).share([group], {PROMPT.id: records}, step=0, steps=1, rng=rng)
        alone = await IsolatedRule(Isolated(), OBJECTIVE, receiver).share([group], {}, step=0, steps=1, rng=rng)
        mine = [row for row in shared.rows if row.stream is Stream.OWN]
        assert [row.advantage for row in mine] == [row.advantage for row in alone.rows]
        rescued += probability * (len(shared.rows) - len(mine))
    stated = (1 - p_n) ** own_size * (1 - np.prod([(1 - p_m[peer]) ** size for peer, size in peer_sizes.items()]))
    assert rescued == pytest.approx(stated)
