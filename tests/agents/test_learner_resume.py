"""Policy and learner go on from what was saved as if they had never stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agents.config import HFPolicy, LoRA, Objective, TinyPolicy
from agents.errors import NonFiniteError, PolicyError
from agents.learner import MAX_NON_FINITE_STEPS, Learner, LearnerSettings
from agents.objectives.choose import components
from agents.policies.policy import Policy, build_policy
from agents.rows import Row, Stream
from agents.sharing.config import Isolated
from agents.testing import BigramLM

SETTINGS = LearnerSettings(
    temperature=1.0, pad_id=0, micro_batch_size=4, num_iterations=2, learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1.0
)
WITH_REFERENCE = Objective(beta=0.1, num_iterations=2)


def row(*ids: int, advantage: float) -> Row:
    return Row(stream=Stream.OWN, prompt_ids=np.array([5, 6]), ids=np.array(ids), advantage=advantage)


STEPS = [[row(7, 8, step, advantage=1.0), row(3, step, advantage=-0.5)] for step in range(1, 5)]


def make_learner(model: torch.nn.Module) -> Learner:
    return Learner(model, components(WITH_REFERENCE, Isolated(), max_completion_length=8), SETTINGS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("base")
    tiny = TinyPolicy(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    build_policy(tiny, seed=0, device="cpu", dtype="float32", threads=1).save(path)
    return str(path)


def build(base: str, lora: LoRA | None, dtype: str) -> Policy:
    return build_policy(HFPolicy(path=base, lora=lora), seed=0, device="cpu", dtype=dtype, threads=1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LoRA(r=4)], ids=["all weights", "lora"])
def test_four_steps_equal_two_and_two(base: str, lora: LoRA | None, dtype: str, tmp_path: Path) -> None:
    whole, first, second = (build(base, lora, dtype) for _ in range(3))
    uninterrupted, before = make_learner(whole.model), make_learner(first.model)
    expected = [uninterrupted.step(rows, prompts=1)["loss"] for rows in STEPS]
    found = [before.step(rows, prompts=1)["loss"] for rows in STEPS[:2]]
    first.save(tmp_path)
    state = before.state()
    second.load(tmp_path)
    after = make_learner(second.model)
    after.restore(state)
    found += [after.step(rows, prompts=1)["loss"] for rows in STEPS[2:]]
    assert found == expected
    assert after.steps == 4
    left, right = whole.trainable_tensors(), second.trainable_tensors()
    assert left.keys() == right.keys()
    assert all(torch.equal(value, right[name]) for name, value in left.items())


def test_weights_of_another_policy_are_refused(base: str, tmp_path: Path) -> None:
    policy = build(base, None, "float32")
    with pytest.raises(PolicyError, match="cannot load weights from"):
        policy.load(tmp_path)
    other = TinyPolicy(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    build_policy(other, seed=0, device="cpu", dtype="float32", threads=1).save(tmp_path)
    with pytest.raises(PolicyError, match="cannot load weights from"):
        policy.load(tmp_path)


def test_an_optimizer_of_other_parameters_is_refused(base: str) -> None:
    policy = build(base, None, "float32")
    learner = make_learner(policy.model)
    learner.step(STEPS[0], prompts=1)
    with pytest.raises(ValueError, match=r"an optimizer over 1 parameters has no .*: the policy is another one"):
        make_learner(BigramLM(5, seed=0)).restore(learner.state())


def test_a_step_that_fails_between_its_updates_leaves_weights_of_no_step() -> None:
    learner = make_learner(BigramLM(9, seed=0))
    bad = [row(1, 2, advantage=float("inf"))]
    for _ in range((MAX_NON_FINITE_STEPS - 1) // 2):
        learner.step(bad, prompts=1)
    assert learner.state().steps == 2 and learner.state().non_finite == 4
    with pytest.raises(NonFiniteError):
        learner.step(bad, prompts=1)
    assert learner.state().steps == 2, "nothing was updated"
    learner.steps = None
    with pytest.raises(ValueError, match="failed in the middle of its updates"):
        learner.state()
