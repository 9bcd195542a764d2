"""The learner: one step whatever the split, dead rows, several iterations, non-finite gradients, half precision."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from agents.config import Objective
from agents.errors import NonFiniteError, ObjectiveError
from agents.learner import MAX_NON_FINITE_STEPS, Learner, LearnerSettings
from agents.objectives.choose import components
from agents.optimizer import MasterAdamW
from agents.rows import Row, Spans, Stream
from agents.sharing.config import PRP, SGT, Isolated, SharingConfig
from agents.testing import BigramLM


def make_learner(
    model: torch.nn.Module,
    sharing: SharingConfig | None = None,
    objective: Objective | None = None,
    *,
    micro_batch_size: int = 64,
    learning_rate: float = 1e-2,
) -> Learner:
    objective = objective or Objective()
    parts = components(objective, sharing or Isolated(), max_completion_length=8)
    settings = LearnerSettings(
        temperature=1.0,
        pad_id=0,
        micro_batch_size=micro_batch_size,
        num_iterations=objective.num_iterations,
        learning_rate=learning_rate,
        weight_decay=0.0,
        max_grad_norm=1.0,
        ref_model_sync_steps=objective.ref_model_sync_steps if objective.sync_ref_model else None,
        ref_model_mixup_alpha=objective.ref_model_mixup_alpha,
    )
    return Learner(model, parts, settings)


def own(ids: list[int], advantage: float, prompt: tuple[int, ...] = (0,)) -> Row:
    return Row(
        stream=Stream.OWN,
        prompt_ids=np.array(prompt, dtype=np.int32),
        ids=np.array(ids, dtype=np.int32),
        advantage=advantage,
    )


def peer(ids: list[int], advantage: float) -> Row:
    spans = Spans(span=np.zeros(len(ids), dtype=np.int32), logprobs=np.array([-2.0]))
    prompt = np.array([0], dtype=np.int32)
    return Row(stream=Stream.PEER, prompt_ids=prompt, ids=np.array(ids), advantage=advantage, weight=0.5, spans=spans)


def rescue(ids: list[int]) -> Row:
    return Row(stream=Stream.RESCUE, prompt_ids=np.array([0], dtype=np.int32), ids=np.array(ids), weight=0.7)


EIGHT = [
    own([1 + index % 3, 2, 3][: 1 + index % 3], advantage, (0, 1)[: 1 + index % 2])
    for index, advantage in enumerate([1.0, -0.5, 0.3, -1.2, 0.8, 0.1, -0.7, 0.4])
]


def gradient_of(
    rows: list[Row],
    sharing: SharingConfig | None = None,
    objective: Objective | None = None,
    *,
    micro_batch_size: int = 64,
    drift: float = 0.0,
) -> torch.Tensor:
    """The table's gradient as the optimizer meets it. drift: distance of the policy from the reference, in logits."""
    model = BigramLM(5, seed=0)
    learner = make_learner(model, sharing, objective, micro_batch_size=micro_batch_size)
    with torch.no_grad():
        model.table.add_(drift * BigramLM(5, seed=1).table)
    gradients: list[torch.Tensor] = []

    def note(table: torch.Tensor) -> None:
        assert table.grad is not None
        gradients.append(table.grad.clone())

    model.table.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    learner.step(rows, prompts=4)
    return gradients[-1]


def gradient_by_hand(rows: list[Row], loss_type: str, *, beta: float = 0.0, drift: float = 0.0) -> npt.NDArray[np.float64]:
    """-A d log pi + beta d k3 of own rows, at ratio 1; d k3 = (1 - pi_ref / pi) d log pi, d log pi(y|x) = e_y - pi(.|x)."""
    ref_VV = BigramLM(5, seed=0).table.detach().numpy()
    now_VV = ref_VV + drift * BigramLM(5, seed=1).table.detach().numpy()
    ref_VV, now_VV = (np.exp(table) / np.exp(table).sum(axis=1, keepdims=True) for table in (ref_VV, now_VV))
    tokens = sum(len(row.ids) for row in rows)
    gradient_VV = np.zeros((5, 5))
    for row in rows:
        divisor = {"grpo": len(rows) * len(row.ids), "dr_grpo": len(rows) * 8}.get(loss_type, tokens)
        for before, token in zip([row.prompt_ids[-1], *row.ids[:-1]], row.ids, strict=True):
            factor = -row.advantage + beta * (1 - ref_VV[before, token] / now_VV[before, token])
            gradient_VV[before] += factor / divisor * (np.eye(5)[token] - now_VV[before])
    return gradient_VV


LOSS_TYPES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo"]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("sharing", [PRP(), SGT()])
def test_eight_rows_are_two_by_four_are_eight_by_one(loss_type: str, sharing: SharingConfig) -> None:
    objective = Objective(loss_type=loss_type, epsilon_high=5.0, beta=0.1)  # type: ignore[arg-type]
    more = [peer([1, 2], 0.9), peer([3], -0.4)] if isinstance(sharing, PRP) else [rescue([1, 2]), rescue([3])]
    whole = gradient_of([*EIGHT, *more], sharing, objective, micro_batch_size=16, drift=0.3)
    for size in (4, 1):
        part = gradient_of([*EIGHT, *more], sharing, objective, micro_batch_size=size, drift=0.3)
        torch.testing.assert_close(part, whole, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("size", [16, 3])
def test_the_gradient_is_that_of_the_loss_by_hand(loss_type: str, size: int) -> None:
    objective = Objective(loss_type=loss_type, epsilon_high=5.0, beta=0.1)  # type: ignore[arg-type]
    got = gradient_of(EIGHT, objective=objective, micro_batch_size=size, drift=0.3)
    np.testing.assert_allclose(got.numpy(), gradient_by_hand(EIGHT, loss_type, beta=0.1, drift=0.3), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("size", [16, 1])
def test_a_rescue_adds_its_weighted_mean_nll_over_the_steps_prompts(size: int) -> None:
    # 0.7 / 4 prompts / T tokens for each token: the gradient of own rows of "grpo" with advantage 0.7 * 2 rows / 4 prompts.
    got = gradient_of([rescue([1, 2]), rescue([3])], SGT(), micro_batch_size=size)
    as_own = [own([1, 2], 0.35), own([3], 0.35)]
    np.testing.assert_allclose(got.numpy(), gradient_by_hand(as_own, "grpo"), rtol=1e-6, atol=1e-12)


def test_dead_rows_are_never_forwarded_and_still_count_in_the_denominator() -> None:
    forwarded: list[int] = []
    model = BigramLM(5, seed=0)
    model.register_forward_pre_hook(lambda module, args, kwargs: forwarded.append(len(kwargs["input_ids"])), with_kwargs=True)
    metrics = make_learner(model).step([own([1, 2], 1.0), own([3, 4], 0.0)], prompts=2)
    assert forwarded == [1]
    assert metrics["loss"] == pytest.approx(-1.0 * 2 / 4)


@pytest.mark.parametrize("rows", [[], [own([1, 2], 0.0)]])
def test_nothing_to_learn_changes_nothing(rows: list[Row]) -> None:
    model = BigramLM(5, seed=0)
    before = model.table.detach().clone()
    metrics = make_learner(model).step(rows, prompts=1)
    assert metrics["skipped_steps"] == 1
    assert torch.equal(model.table, before)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_with_a_kl_term_a_dead_group_still_has_the_kl_gradient_and_only_that(loss_type: str) -> None:
    dead = [own([1, 2], 0.0), own([3, 4, 1], 0.0)]
    objective = Objective(loss_type=loss_type, epsilon_high=5.0, beta=0.5)  # type: ignore[arg-type]
    got = gradient_of(dead, objective=objective, drift=0.3)
    expected = gradient_by_hand(dead, loss_type, beta=0.5, drift=0.3)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_tokens_that_cannot_be_drawn_leave_padded_rows_finite(loss_type: str) -> None:
    # Token 0 also fills the padding of ragged rows, where its log-prob is -inf under policy and reference alike.
    objective = Objective(loss_type=loss_type, epsilon_high=5.0, beta=0.5)  # type: ignore[arg-type]
    model = BigramLM(5, seed=0)
    with torch.no_grad():
        model.table[:, 0] = -torch.inf
    learner = make_learner(model, objective=objective, micro_batch_size=8)
    with torch.no_grad():
        model.table[:, 1:] += 0.3 * BigramLM(5, seed=1).table[:, 1:]
    metrics = learner.step(EIGHT, prompts=4)
    assert metrics["non_finite"] == 0
    assert np.isfinite(metrics["loss"]) and np.isfinite(metrics["kl"]) and metrics["grad_norm"] > 0
    assert model.table.grad is None or torch.isfinite(model.table.grad).all()
    assert torch.isfinite(model.table[:, 1:]).all()


def test_one_iteration_has_ratio_one_and_more_iterations_clip() -> None:
    model = BigramLM(5, seed=0)
    once = make_learner(model, learning_rate=1.0).step(EIGHT, prompts=4)
    assert once["clip_ratio/region_mean"] == 0
    model = BigramLM(5, seed=0)
    thrice = make_learner(model, objective=Objective(num_iterations=3), learning_rate=1.0).step(EIGHT, prompts=4)
    assert thrice["clip_ratio/region_mean"] > 0


def test_a_stream_that_no_component_reads_is_an_error() -> None:
    with pytest.raises(ObjectiveError, match="stream rescue"):
        make_learner(BigramLM(5, seed=0)).step([rescue([1])], prompts=1)


def test_non_finite_gradients_change_nothing_and_end_the_run_after_some() -> None:
    model = BigramLM(5, seed=0)
    before = model.table.detach().clone()
    learner = make_learner(model)
    bad = [own([1, 2], float("inf"))]
    for _ in range(MAX_NON_FINITE_STEPS - 1):
        assert learner.step(bad, prompts=1)["non_finite"] == 1
    assert torch.equal(model.table, before)
    with pytest.raises(NonFiniteError, match="5 updates in a row"):
        learner.step(bad, prompts=1)


def test_a_good_step_between_bad_ones_starts_the_count_again() -> None:
    learner = make_learner(BigramLM(5, seed=0))
    for _ in range(3):
        for _ in range(MAX_NON_FINITE_STEPS - 1):
            learner.step([own([1, 2], float("inf"))], prompts=1)
        assert learner.step(EIGHT, prompts=4)["non_finite"] == 0


def test_small_updates_are_not_lost_in_bfloat16() -> None:
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], learning_rate=1e-4, weight_decay=0.0, max_grad_norm=10.0)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step(0.0)
    # 100 steps of 1e-4 make 0.01; each alone is far below bfloat16's spacing of 2^-8 at 1.
    torch.testing.assert_close(weight.detach().float(), torch.full((4,), 0.99), rtol=0, atol=2**-8)
    assert weight[0] < 1


def test_the_samplers_logprobs_are_compared_with_the_learners() -> None:
    model = BigramLM(5, seed=0)
    table = torch.log_softmax(model.table.detach(), dim=-1)
    exact = np.array([table[0, 1], table[1, 2]], dtype=np.float32)
    rows = [
        replace(own([1, 2], 1.0), sampled_logprobs=exact),
        replace(own([1, 2], -0.5), sampled_logprobs=exact + np.array([0.0, 0.4], dtype=np.float32)),
    ]
    metrics = make_learner(model).step(rows, prompts=1)
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(0.1, abs=1e-6)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(0.4, abs=1e-6)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 4, (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)])
def test_weights_stepped_in_portions_get_one_step_each(
    dtypes: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def updated(portion_bytes: int) -> list[torch.Tensor]:
        monkeypatch.setattr("agents.optimizer.PORTION_BYTES", portion_bytes)
        generator = torch.Generator().manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(6, generator=generator).to(dtype)) for dtype in dtypes]
        optimizer = MasterAdamW(weights, learning_rate=0.1, weight_decay=0.1, max_grad_norm=1.0)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(6, generator=generator).to(weight.dtype)
            assert optimizer.step(0.0)[1]
            assert all(weight.grad is None for weight in weights)
        return [weight.detach() for weight in weights]

    generator = torch.Generator().manual_seed(0)
    for one, whole in zip(updated(1), updated(1 << 20), strict=True):
        assert torch.equal(one, whole)
        start = torch.randn(6, generator=generator)
        assert float((one.float() - start).abs().max()) < 0.4, "three steps of 0.1 and no more"


def test_the_reference_moves_towards_the_policy_every_so_many_steps() -> None:
    model, start = BigramLM(5, seed=0), BigramLM(5, seed=0).table.detach()
    objective = Objective(beta=0.1, sync_ref_model=True, ref_model_mixup_alpha=0.25, ref_model_sync_steps=2)
    learner = make_learner(model, objective=objective)
    kls = [learner.step(EIGHT, prompts=4)["kl"] for _ in range(2)]
    assert kls[0] == 0.0 and kls[1] > 0.0
    # A policy that is now what the reference should be has no KL to it.
    expected = 0.25 * model.table.detach() + 0.75 * start
    with torch.no_grad():
        model.table.copy_(expected)
    assert learner.step(EIGHT, prompts=4)["kl"] == pytest.approx(0.0, abs=1e-12)


OLDER = BigramLM(5, seed=3)
"""Weights that sampled some rows before the learner's came to be."""


def stale(row: Row, sampler: BigramLM = OLDER) -> Row:
    table = torch.log_softmax(sampler.table.detach(), dim=-1)
    steps = zip([row.prompt_ids[-1], *row.ids[:-1]], row.ids, strict=True)
    logprobs = np.array([float(table[before, token]) for before, token in steps], dtype=np.float32)
    return replace(row, sampled_logprobs=logprobs, off_policy=True)


def corrected_by_hand(rows: list[Row], limit: float) -> npt.NDArray[np.float64]:
    """-min(pi / pi_older, C) A d log pi over all tokens of the rows that are stale, -A d log pi over the others'."""
    now_VV, older_VV = (np.exp(each.table.detach().numpy()) for each in (BigramLM(5, seed=0), OLDER))
    now_VV, older_VV = (table / table.sum(axis=1, keepdims=True) for table in (now_VV, older_VV))
    gradient_VV = np.zeros((5, 5))
    for row in rows:
        for before, token in zip([row.prompt_ids[-1], *row.ids[:-1]], row.ids, strict=True):
            weight = min(now_VV[before, token] / older_VV[before, token], limit) if row.off_policy else 1.0
            gradient_VV[before] += -row.advantage * weight * (np.eye(5)[token] - now_VV[before])
    return gradient_VV / sum(len(row.ids) for row in rows)


@pytest.mark.parametrize("size", [16, 3])
def test_rows_of_older_weights_are_weighted_by_a_truncated_ratio(size: int) -> None:
    rows = [row if index % 2 else replace(row, off_policy=False) for index, row in enumerate(map(stale, EIGHT))]
    got = gradient_of(rows, objective=Objective(importance_sampling_clip_max=1.1), micro_batch_size=size)
    np.testing.assert_allclose(got.numpy(), corrected_by_hand(rows, 1.1), rtol=1e-6)
    off = gradient_of(rows, objective=Objective(importance_sampling_correction=False), micro_batch_size=size)
    np.testing.assert_allclose(off.numpy(), gradient_by_hand(rows, "dapo"), rtol=1e-6)


def test_the_ratios_of_older_rows_are_logged_and_no_others() -> None:
    rows = [stale(row) for row in EIGHT]
    for size in (16, 1):
        metrics = make_learner(BigramLM(5, seed=0), objective=Objective(), micro_batch_size=size).step(rows, prompts=4)
        least, mean, most = (metrics[f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "mean", "max"))
        assert 0 < least < mean < most == pytest.approx(2.0)
    fresh = make_learner(BigramLM(5, seed=0)).step([replace(row, off_policy=False) for row in rows], prompts=4)
    assert not [name for name in fresh if name.startswith("sampling/importance")]


def test_rows_of_the_very_weights_are_not_changed_by_the_correction() -> None:
    rows = [stale(row, BigramLM(5, seed=0)) for row in EIGHT]
    torch.testing.assert_close(gradient_of(rows), gradient_of(EIGHT), rtol=1e-6, atol=1e-9)
