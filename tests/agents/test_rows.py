"""Own rows: completions without a reward, and truncated ones, leave no trace in the loss."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from agents.advantages import group_advantages
from agents.config import Objective
from agents.learner import Learner, LearnerSettings
from agents.objectives.choose import components
from agents.rows import Row, own_rows
from agents.sharing.config import Isolated
from agents.testing import BigramLM, make_group, make_prompt
from agents.types import Group

NAN = float("nan")
IDS = [[1, 2, 0], [3, 0], [2, 2, 2, 0], [4, 0]]
MASKED = Objective(mask_truncated_completions=True)


def make(rewards: Sequence[float], *, truncated: Sequence[int] = ()) -> Group:
    group = make_group(make_prompt(), rewards, ids=IDS[: len(rewards)])
    completions = [replace(each, finished=index not in truncated) for index, each in enumerate(group.completions)]
    return replace(group, completions=tuple(completions))


def rows_of(group: Group, objective: Objective) -> list[Row]:
    assert group.rewards is not None
    return own_rows([group], [group_advantages(group.rewards, objective, 1.0)], objective)


def loss_and_gradient(rows: Sequence[Row], loss_type: str) -> tuple[float, torch.Tensor]:
    """Of one step, at ratio 1."""
    objective = Objective(loss_type=loss_type)  # type: ignore[arg-type]
    model = BigramLM(5, seed=0)
    gradients: list[torch.Tensor] = []
    model.table.register_post_accumulate_grad_hook(lambda table: gradients.append(table.grad.clone()))  # type: ignore[no-untyped-call]
    settings = LearnerSettings(
        temperature=1.0,
        pad_id=0,
        micro_batch_size=8,
        num_iterations=1,
        learning_rate=1e-2,
        weight_decay=0.0,
        max_grad_norm=1.0,
    )
    learner = Learner(model, components(objective, Isolated(), max_completion_length=8), settings)
    loss = learner.step(rows, prompts=1)["loss"]
    return loss, gradients[-1]


def test_a_row_is_its_completion_with_what_the_sampler_said_of_it() -> None:
    group = make([1, 0])
    first, second = rows_of(group, Objective(scale_rewards="none"))
    assert (first.ids.tolist(), second.ids.tolist()) == (IDS[0], IDS[1])
    assert (first.advantage, second.advantage) == (0.5, -0.5)
    for row, completion in zip((first, second), group.completions, strict=True):
        assert row.sampled_logprobs is completion.logprobs
        assert row.prompt_ids is group.prompt_ids


def test_a_completion_without_a_reward_is_no_row() -> None:
    rows = rows_of(make([1, NAN, 0, NAN]), Objective(scale_rewards="none"))
    assert [row.ids.tolist() for row in rows] == [IDS[0], IDS[2]]
    assert [row.advantage for row in rows] == [0.5, -0.5]


@pytest.mark.parametrize("objective", [Objective(), MASKED])
def test_truncated_completions_are_rows_unless_masked(objective: Objective) -> None:
    rows = rows_of(make([1, 0, 0, 1], truncated=[0, 1]), objective)
    assert len(rows) == (2 if objective is MASKED else 4)
    kept = IDS[2:] if objective is MASKED else IDS
    assert [row.ids.tolist() for row in rows] == kept


def test_a_masked_completions_reward_still_shapes_the_baseline() -> None:
    objective = Objective(mask_truncated_completions=True, scale_rewards="none")
    assert [row.advantage for row in rows_of(make([1, 0, 0, 0], truncated=[0]), objective)] == [-0.25, -0.25, -0.25]


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "bnpo"])
def test_loss_and_denominator_are_as_if_masked_and_unjudged_completions_had_never_been(loss_type: str) -> None:
    group = make([1, 0, NAN, 1], truncated=[1])
    got, gradient = loss_and_gradient(rows_of(group, MASKED), loss_type)
    everything = rows_of(make([1, 0, 0, 1]), Objective())
    advantage = rows_of(group, MASKED)[0].advantage
    left = [replace(everything[index], advantage=advantage) for index in (0, 3)]
    loss, expected = loss_and_gradient(left, loss_type)
    assert got == pytest.approx(loss)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
    # At ratio 1 a token's loss is -A. Two rows of 3 and 2 tokens: grpo 2 / 2 rows, dr_grpo 5 / (2 * 8), dapo 5 / 5.
    assert got == pytest.approx(-advantage * {"dr_grpo": 5 / 16}.get(loss_type, 1.0))
    # Rewards 1, 0 and 1 are the baseline, the masked one's too: mean 2/3, and ddof 1 makes the deviation sqrt(1/3).
    assert advantage == pytest.approx((1 / 3) / (np.sqrt(1 / 3) + 1e-4))
