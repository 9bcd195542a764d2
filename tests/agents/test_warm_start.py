"""Warm start and evaluation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from agents.config import Sampling, TinyPolicy, WarmStart
from agents.errors import PolicyError, TaskError
from agents.evaluate import evaluate
from agents.policies.policy import Policy, build_policy
from agents.rewards.rewards import Rewards
from agents.samplers.hf import HFSampler
from agents.tasks.config import Reverse, Sort
from agents.tasks.load import TaskData, load_task
from agents.types import Prompt
from agents.warm_start import _example, _loss, warm_start

TASKS = [
    load_task(Reverse(name="reverse", alphabet="ab", length=2, heldout=1), seed=0),
    load_task(Sort(name="sort", alphabet="ab", length=2, heldout=1), seed=0),
]


def build() -> Policy:
    config = TinyPolicy(tokenizer="char", hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    return build_policy(config, seed=0, device="cpu", dtype="float32", threads=1)


def parameters(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.model.parameters()])


@pytest.mark.slow
async def test_it_masters_what_the_mix_names() -> None:
    policy = build()
    config = WarmStart(steps=60, mix={"reverse": 1.0}, learning_rate=1e-2, batch_size=16)
    loss = warm_start(policy, config, TASKS, seed=0)
    assert loss < 0.1
    known = TaskData(name="known", train=[], heldout=TASKS[0].train)
    (score,) = await evaluate(HFSampler(policy, Sampling(max_completion_length=4)), [known], Rewards(["exact_match"]))
    assert score.accuracy == 1.0
    assert score.eos_rate == 1.0
    assert score.mean_length == 3.0


def test_equal_seeds_give_equal_weights() -> None:
    config = WarmStart(steps=3, mix={"reverse": 3.0, "sort": 1.0}, batch_size=8)
    trained = []
    for seed in (0, 0, 1):
        policy = build()
        warm_start(policy, config, TASKS, seed=seed)
        trained.append(parameters(policy))
    assert torch.equal(trained[0], trained[1])
    assert not torch.equal(trained[0], trained[2])


def test_no_steps_change_nothing() -> None:
    policy = build()
    assert warm_start(policy, WarmStart(), TASKS, seed=0) == 0.0
    assert torch.equal(parameters(policy), parameters(build()))


def test_the_loss_is_the_mean_over_answer_and_end_tokens() -> None:
    policy = build()
    prompts = [TASKS[0].train[0], TASKS[1].train[0]]
    total, count = 0.0, 0
    for prompt in prompts:
        head = policy.tokenizer.render(prompt.messages).tolist()
        answer = [*policy.tokenizer.encode(str(prompt.columns["answer"]).encode()).tolist(), policy.tokenizer.eos_id]
        log_probs = torch.log_softmax(policy.model(input_ids=torch.tensor([head + answer])).logits[0], -1).detach()
        total -= sum(float(log_probs[len(head) - 1 + place, token]) for place, token in enumerate(answer))
        count += len(answer)
    assert len(policy.tokenizer.render(prompts[0].messages)) != len(policy.tokenizer.render(prompts[1].messages))
    loss = _loss(policy, [_example(policy, prompt) for prompt in prompts])
    assert float(loss.detach()) == pytest.approx(total / count, rel=1e-5)


def test_errors() -> None:
    with pytest.raises(TaskError, match=r"`warm_start\.mix` names unknown task 'sotr'; known are reverse, sort"):
        warm_start(build(), WarmStart(steps=1, mix={"sotr": 1.0}), TASKS, seed=0)
    prompt = TASKS[0].train[0]
    blank = Prompt(id=prompt.id, task="t", messages=prompt.messages, columns={})
    task = TaskData(name="t", train=[blank], heldout=[])
    with pytest.raises(
        TaskError,
        match=r"needs a text in column 'answer', got answer=None in prompt .*, which begins 'reverse ",
    ):
        warm_start(build(), WarmStart(steps=1, mix={"t": 1.0}), [task], seed=0)


def test_an_answer_that_cannot_be_spelled_is_not_trained_on() -> None:
    prompt = TASKS[0].train[0]
    task = TaskData(name="t", train=[replace(prompt, columns={"answer": "a東"})], heldout=[])
    with pytest.raises(PolicyError, match="cannot spell '東' in the answer"):
        warm_start(build(), WarmStart(steps=1, mix={"t": 1.0}), [task], seed=0)
