"""Settings reach the update: iterations on peer rows, temperature, norm clip, weight decay, lambda at a late rescue."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from agents.config import Objective
from agents.learner import Learner, LearnerSettings
from agents.objectives.choose import components
from agents.rows import Row, Stream
from agents.sharing.config import PRP, SGT, Isolated, SharingConfig
from agents.sharing.sgt import SGTRule
from agents.testing import BigramLM, ScriptedReceiver, make_group, make_prompt
from exchange.types import AgentName, VerifiedSuccesses, Version
from tokenalign import Encoder, Translator
from tokenalign.testing import EOS_ID, char_tokenizer

PLAIN = LearnerSettings(
    temperature=1.0,
    pad_id=0,
    micro_batch_size=8,
    num_iterations=1,
    learning_rate=0.1,
    weight_decay=0.0,
    max_grad_norm=100.0,
)


def row(ids: list[int], advantage: float, stream: Stream = Stream.OWN) -> Row:
    prompt = np.array([0], dtype=np.int32)
    return Row(stream=stream, prompt_ids=prompt, ids=np.array(ids, dtype=np.int32), advantage=advantage)


ROWS = [row([1, 2, 3], 1.0), row([2, 4], -0.5)]


def gradient_of(
    model: BigramLM, rows: list[Row], settings: LearnerSettings, sharing: SharingConfig | None = None
) -> torch.Tensor:
    """The table's gradient in the last update of one step, before it is clipped."""
    gradients: list[torch.Tensor] = []
    model.table.register_post_accumulate_grad_hook(lambda table: gradients.append(table.grad.clone()))  # type: ignore[no-untyped-call]
    learner_of(model, settings, sharing).step(rows, prompts=1)
    return gradients[-1]


def learner_of(model: BigramLM, settings: LearnerSettings, sharing: SharingConfig | None = None) -> Learner:
    return Learner(model, components(Objective(), sharing or Isolated(), max_completion_length=8), settings)


def test_peer_rows_without_spans_are_held_against_the_policy_at_the_start_of_the_step() -> None:
    rows = [row([1, 2], 1.0, Stream.PEER), row([3], 0.5, Stream.PEER)]
    sharing = PRP(denominator="receiver")
    once = learner_of(BigramLM(5, seed=0), PLAIN, sharing).step(rows, prompts=1)
    assert (once["peer/ratio_mean"], once["peer/log_ratio"]) == (1.0, 0.0)
    # What one update makes of the log-probs is what the ratio of the second iteration is, by the policy itself.
    model = BigramLM(5, seed=0)
    before = torch.log_softmax(model.table.detach(), dim=-1)
    learner_of(model, PLAIN, sharing).step(rows, prompts=1)
    change = torch.log_softmax(model.table.detach(), dim=-1) - before
    log_ratios = [float(change[0, 1]), float(change[1, 2]), float(change[0, 3])]
    twice = learner_of(BigramLM(5, seed=0), replace(PLAIN, num_iterations=2), sharing).step(rows, prompts=1)
    assert twice["peer/log_ratio"] == pytest.approx(np.mean(log_ratios), rel=1e-6)
    assert twice["peer/ratio_mean"] == pytest.approx(np.mean(np.exp(log_ratios)), rel=1e-6)
    assert abs(twice["peer/log_ratio"]) > 0.01


def test_logits_are_divided_by_the_sampling_temperature() -> None:
    # pi = softmax(table / T), so that the gradient on the table is that on table / T, divided by T once more.
    hot, scaled = BigramLM(5, seed=0), BigramLM(5, seed=0)
    with torch.no_grad():
        scaled.table.div_(0.5)
    got = gradient_of(hot, ROWS, replace(PLAIN, temperature=0.5))
    torch.testing.assert_close(got, gradient_of(scaled, ROWS, PLAIN) / 0.5, rtol=1e-9, atol=1e-12)


def test_a_gradient_beyond_the_greatest_norm_is_scaled_down_to_it() -> None:
    # Adam's first step hides the scale; its second tells how large the first gradient was beside it.
    model = BigramLM(5, seed=0)
    norm = float(gradient_of(model, ROWS, PLAIN).norm())
    tables = []
    for limit, factor in ((norm / 4, 4.0), (norm * 4, 1.0)):
        clipped, by_hand = BigramLM(5, seed=0), BigramLM(5, seed=0)
        metrics = learner_of(clipped, replace(PLAIN, max_grad_norm=limit)).step(ROWS, prompts=1)
        assert metrics["grad_norm"] == pytest.approx(norm)
        shrunk = [replace(each, advantage=each.advantage / factor) for each in ROWS]
        learner_of(by_hand, PLAIN).step(shrunk, prompts=1)
        torch.testing.assert_close(clipped.table, by_hand.table, rtol=0, atol=1e-9)
        tables.append(clipped.table.detach())
    assert not torch.equal(*tables)


def test_weights_decay_by_learning_rate_times_weight_decay() -> None:
    plain, decayed = BigramLM(5, seed=0), BigramLM(5, seed=0)
    before = plain.table.detach().clone()
    learner_of(plain, PLAIN).step(ROWS, prompts=1)
    learner_of(decayed, replace(PLAIN, weight_decay=0.3)).step(ROWS, prompts=1)
    # AdamW: decay is apart from the gradient, theta <- theta - lr * wd * theta - lr * step.
    torch.testing.assert_close(decayed.table, plain.table - 0.1 * 0.3 * before, rtol=1e-9, atol=1e-12)


async def test_a_late_rescue_has_the_lambda_of_the_step_in_which_it_happens() -> None:
    tokenizer = char_tokenizer()
    translator = Translator(Encoder(tokenizer), eos_id=EOS_ID)
    rule = SGTRule(SGT(lambda_=1.0, lambda_final=0.0), Objective(), ScriptedReceiver(lambda prompt, text: 1.0, translator))
    prompt = make_prompt()
    rng = np.random.default_rng(0)
    await rule.share([make_group(prompt, [0, 0])], {}, step=0, steps=5, rng=rng)
    late = VerifiedSuccesses(
        agent=AgentName("beta"),
        step=0,
        version=Version(0, 0),
        prompt_id=prompt.id,
        task=prompt.task,
        texts=np.frombuffer(b"ba", dtype=np.uint8),
        text_lengths=np.array([2], dtype=np.int32),
        token_ends=np.array([2], dtype=np.int32),
        token_counts=np.array([1], dtype=np.int32),
        rewards=np.ones(1, dtype=np.float32),
        tokenizer="source",
    )
    other = make_group(make_prompt("p1"), [1, 1], step=3)
    shared = await rule.share([other], {prompt.id: [late]}, step=3, steps=5, rng=rng)
    assert shared.counters["rescues/late"] == 1
    # From 1 at step 0 to 0 at step 4: a quarter is left at step 3.
    assert [each.weight for each in shared.rows if each.stream is Stream.RESCUE] == [0.25]
