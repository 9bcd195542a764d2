"""Loss components: values by hand, gradients by finite differences in float64, limits, masks, microbatches."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch

from agents.config import Objective
from agents.microbatch import collate, completion_logits, token_logprobs
from agents.objectives.choose import components
from agents.objectives.component import Component, LogProbs
from agents.objectives.grpo import GRPOSurrogate
from agents.objectives.kl import KLToReference, k3
from agents.objectives.nll import SuccessNLL
from agents.objectives.peer_surrogate import PeerSurrogate
from agents.rows import Row, Spans, Stream
from agents.sharing.config import HACPO, PRP, SGT, XGRPO, Graft, Isolated, SharingConfig
from agents.testing import BigramLM

CPU = torch.device("cpu")
LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo")


def row(
    ids: Sequence[int],
    *,
    stream: Stream = Stream.OWN,
    advantage: float = 0.0,
    weight: float = 1.0,
    spans: Spans | None = None,
    prompt: Sequence[int] = (0,),
) -> Row:
    return Row(
        stream=stream,
        prompt_ids=np.array(prompt, dtype=np.int32),
        ids=np.array(ids, dtype=np.int32),
        advantage=advantage,
        weight=weight,
        spans=spans,
    )


def spans(span: Sequence[int], logprobs: Sequence[float]) -> Spans:
    return Spans(span=np.array(span, dtype=np.int32), logprobs=np.array(logprobs, dtype=np.float64))


def loss_of(
    component: Component, model: BigramLM, rows: Sequence[Row], *, old: BigramLM | None = None, prompts: int = 1
) -> torch.Tensor:
    """The component's loss over the rows in one microbatch, with `old` as the policy at the start of the step."""
    batch = collate(rows, pad_id=0, device=CPU, dtype=torch.float64)
    current = token_logprobs(completion_logits(model, batch, temperature=1.0), batch)
    with torch.no_grad():
        before = token_logprobs(completion_logits(old or model, batch, temperature=1.0), batch)
    term = component.term(batch, LogProbs(current=current, old=before, ref=before))
    return term.numerator / component.denominator(rows, prompts)


def value_of(
    component: Component, model: BigramLM, rows: Sequence[Row], *, old: BigramLM | None = None, prompts: int = 1
) -> float:
    return float(loss_of(component, model, rows, old=old, prompts=prompts).detach())


def lone_logprobs(model: BigramLM, ids: Sequence[int], start: int = 0) -> list[float]:
    """Log-probs of a completion by a plain loop."""
    table = torch.log_softmax(model.table.detach(), dim=-1)
    return [float(table[before, token]) for before, token in zip([start, *ids], ids, strict=False)]


OWN = [row([1, 2, 3], advantage=0.7), row([2], advantage=-1.3), row([3, 3], advantage=0.0, prompt=(1, 2))]


def test_logprobs_match_a_plain_loop_whatever_the_padding() -> None:
    model = BigramLM(5, seed=0)
    batch = collate([row([1, 2, 3]), row([4], prompt=(2, 2, 1))], pad_id=0, device=CPU, dtype=torch.float64)
    got = token_logprobs(completion_logits(model, batch, temperature=1.0), batch).detach().numpy()
    np.testing.assert_allclose(got[0], lone_logprobs(model, [1, 2, 3]))
    np.testing.assert_allclose(got[1], [lone_logprobs(model, [4], start=1)[0], 0, 0])


def test_temperature_divides_the_logits() -> None:
    model = BigramLM(5, seed=0)
    cooled = BigramLM(5, seed=0)
    cooled.table.data /= 0.5
    batch = collate([row([1, 2])], pad_id=0, device=CPU, dtype=torch.float64)
    half = token_logprobs(completion_logits(model, batch, temperature=0.5), batch)
    torch.testing.assert_close(half, token_logprobs(completion_logits(cooled, batch, temperature=1.0), batch))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_grpo_by_hand(loss_type: str) -> None:
    objective = Objective(loss_type=loss_type, epsilon=0.2)  # type: ignore[arg-type]
    model, old = BigramLM(5, seed=0), BigramLM(5, seed=1)
    rows = OWN[:2]
    terms = []
    for each in rows:
        ratios = np.exp(np.subtract(lone_logprobs(model, each.ids.tolist()), lone_logprobs(old, each.ids.tolist())))
        clipped = np.clip(ratios, 0.8, 1.2)
        terms.append(-np.minimum(ratios * each.advantage, clipped * each.advantage))
    expected = {
        "grpo": (terms[0].mean() + terms[1].mean()) / 2,
        "dr_grpo": (terms[0].sum() + terms[1].sum()) / (2 * 10),
        "dapo": (terms[0].sum() + terms[1].sum()) / 4,
        "bnpo": (terms[0].sum() + terms[1].sum()) / 4,
    }[loss_type]
    got = value_of(GRPOSurrogate(objective, 10), model, rows, old=old)
    assert got == pytest.approx(expected)


def test_cispo_by_hand() -> None:
    objective = Objective(loss_type="cispo", epsilon_high=1.1)
    model, old = BigramLM(5, seed=0), BigramLM(5, seed=1)
    loss_of(GRPOSurrogate(objective, 10), model, OWN[:2], old=old).backward()  # type: ignore[no-untyped-call]
    expected = torch.zeros(5, 5, dtype=torch.float64)
    now = torch.log_softmax(model.table.detach(), dim=-1).exp()
    for each in OWN[:2]:
        ids = each.ids.tolist()
        ratios = np.exp(np.subtract(lone_logprobs(model, ids), lone_logprobs(old, ids)))
        for before, token, ratio in zip([0, *ids[:-1]], ids, ratios, strict=True):
            score = torch.eye(5, dtype=torch.float64)[token] - now[before]
            expected[before] -= min(ratio, 1.1) * each.advantage * score / 4
    assert model.table.grad is not None
    torch.testing.assert_close(model.table.grad, expected)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"loss_type": "cispo"}, "epsilon_high"),
        ({"sync_ref_model": True}, "beta > 0"),
        ({"importance_sampling_clip_max": 0.5}, "importance_sampling_clip_max"),
        ({"ref_model_mixup_alpha": 0.0}, "ref_model_mixup_alpha"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "meant"), [(True, "group"), (False, "none"), ("batch", "batch")])
def test_reward_scaling_may_be_a_bool_as_in_trl(given: bool, meant: str) -> None:
    text = msgspec.json.encode({"scale_rewards": given})
    assert msgspec.json.decode(text, type=Objective).scaling == meant


def test_the_two_sided_clip_bounds_a_large_ratio_of_a_bad_row() -> None:
    model, old = BigramLM(5, seed=0), BigramLM(5, seed=0)
    old.table.data[0, 1] -= 8.0
    bad = [row([1], advantage=-1.0)]
    ratio = np.exp(lone_logprobs(model, [1])[0] - lone_logprobs(old, [1])[0])
    assert ratio > 4
    assert (value_of(GRPOSurrogate(Objective(), 1), model, bad, old=old)) == pytest.approx(ratio)
    assert (value_of(GRPOSurrogate(Objective(delta=3.0), 1), model, bad, old=old)) == pytest.approx(3.0)


def test_a_sequence_ratio_is_the_exponential_of_a_mean() -> None:
    # A constant log-difference d at each of 1,000 tokens gives exp(d), not exp(1000 d).
    difference = 0.01
    batch = collate([row([1] * 1000, advantage=1.0)], pad_id=0, device=CPU, dtype=torch.float64)
    old = torch.full((1, 1000), -2.0, dtype=torch.float64)
    objective = Objective(importance_sampling_level="sequence", loss_type="grpo")
    term = GRPOSurrogate(objective, 1000).term(batch, LogProbs(current=old + difference, old=old))
    assert float(term.numerator) == pytest.approx(-np.exp(difference))


def test_at_ratio_one_the_gradient_is_the_policy_gradient() -> None:
    model = BigramLM(5, seed=0)
    loss_of(GRPOSurrogate(Objective(loss_type="dapo"), 10), model, OWN).backward()  # type: ignore[no-untyped-call]
    assert model.table.grad is not None
    got = model.table.grad.clone()
    model.table.grad = None
    batch = collate(OWN, pad_id=0, device=CPU, dtype=torch.float64)
    logprobs = token_logprobs(completion_logits(model, batch, temperature=1.0), batch)
    (-(logprobs * batch.advantages.unsqueeze(-1) * batch.mask).sum() / 6).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(got, model.table.grad)


SPANNED = [
    row([1, 2, 3], stream=Stream.PEER, advantage=0.7, weight=0.5, spans=spans([0, 0, 1], [-2.5, -1.0])),
    row([2, 4], stream=Stream.PEER, advantage=-1.3, weight=0.5, spans=spans([0, -1], [-1.4])),
]
UNSPANNED = [row(each.ids.tolist(), stream=Stream.PEER, advantage=each.advantage, weight=0.5) for each in SPANNED]
RESCUES = [row([1, 2, 0], stream=Stream.RESCUE, weight=0.3), row([4], stream=Stream.RESCUE, weight=0.3)]
WIDE = 0.999
"""A clip that the finite differences do not step across."""
EVERY: list[tuple[Component, list[Row]]] = [
    *((GRPOSurrogate(Objective(loss_type=kind, epsilon=WIDE, epsilon_high=1e3), 10), OWN) for kind in LOSS_TYPES),  # type: ignore[arg-type]
    (GRPOSurrogate(Objective(importance_sampling_level="sequence"), 10), OWN),
    (KLToReference(Objective(beta=0.5), 10), OWN),
    *((PeerSurrogate(Objective(loss_type=kind, epsilon=WIDE, epsilon_high=1e3), 10), SPANNED) for kind in LOSS_TYPES),  # type: ignore[arg-type]
    (PeerSurrogate(Objective(epsilon=WIDE, epsilon_high=1e3), 10), UNSPANNED),
    (SuccessNLL(SGT()), RESCUES),
    (SuccessNLL(SGT(normalise="rescued")), RESCUES),
]


@pytest.mark.parametrize(("component", "rows"), EVERY)
def test_gradients_match_finite_differences(component: Component, rows: list[Row]) -> None:
    model, old = BigramLM(5, seed=0), BigramLM(5, seed=0)
    old.table.data += 0.05 * BigramLM(5, seed=2).table.data
    loss_of(component, model, rows, old=old, prompts=3).backward()  # type: ignore[no-untyped-call]
    assert model.table.grad is not None
    step = 1e-6
    for index in [(0, 1), (1, 2), (2, 3), (3, 3), (2, 4)]:
        values = []
        for sign in (1, -1):
            model.table.data[index] += sign * step
            values.append(value_of(component, model, rows, old=old, prompts=3))
            model.table.data[index] -= sign * step
        numeric = (values[0] - values[1]) / (2 * step)
        assert float(model.table.grad[index]) == pytest.approx(numeric, abs=1e-8, rel=1e-5)


@pytest.mark.parametrize(("component", "rows"), EVERY)
@pytest.mark.parametrize("size", [1, 2])
def test_any_split_into_microbatches_is_the_whole(component: Component, rows: list[Row], size: int) -> None:
    model, old = BigramLM(5, seed=0), BigramLM(5, seed=1)
    whole = value_of(component, model, rows, old=old, prompts=3)
    denominator = component.denominator(rows, 3)
    parts = 0.0
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        parts += value_of(component, model, some, old=old, prompts=3) * component.denominator(some, 3) / denominator
    assert parts == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(("component", "rows"), EVERY)
def test_padding_does_not_count(component: Component, rows: list[Row]) -> None:
    # A long row of weight and advantage 0 widens the batch; only its share of the denominator may show.
    model, old = BigramLM(5, seed=0), BigramLM(5, seed=1)
    stream = rows[0].stream
    span = spans(list(range(9)), [-1.0] * 9) if rows is SPANNED else None
    filler = row([1] * 9, stream=stream, weight=0.0, spans=span, prompt=(1, 1, 1))
    wide = value_of(component, model, [*rows, filler], old=old, prompts=3) * component.denominator([*rows, filler], 3)
    assert wide == pytest.approx(value_of(component, model, rows, old=old, prompts=3) * component.denominator(rows, 3))


def test_peer_spans_by_hand() -> None:
    model = BigramLM(5, seed=0)
    first, second = (lone_logprobs(model, each.ids.tolist()) for each in SPANNED)
    ratios = np.exp([first[0] + first[1] + 2.5, first[2] + 1.0, second[0] + 1.4])
    advantages = np.array([0.7, 0.7, -1.3])
    expected = -np.minimum(ratios * advantages, np.clip(ratios, 0.8, 1.2) * advantages) * 0.5
    got = value_of(PeerSurrogate(Objective(loss_type="dapo"), 10), model, SPANNED)
    assert got == pytest.approx(expected.sum() / 3)


def test_a_ratio_beyond_float_range_stays_finite() -> None:
    model = BigramLM(5, seed=0)
    far = [row([1], stream=Stream.PEER, advantage=-1.0, spans=spans([0], [-500.0]))]
    loss = loss_of(PeerSurrogate(Objective(), 10), model, far)
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(loss)
    assert model.table.grad is not None and torch.isfinite(model.table.grad).all()


def test_nll_by_hand() -> None:
    model = BigramLM(5, seed=0)
    means = [-np.mean(lone_logprobs(model, each.ids.tolist())) for each in RESCUES]
    assert (value_of(SuccessNLL(SGT()), model, RESCUES, prompts=8)) == pytest.approx(0.3 * sum(means) / 8)
    rescued = SuccessNLL(SGT(normalise="rescued"))
    assert value_of(rescued, model, RESCUES, prompts=8) == pytest.approx(0.3 * sum(means) / 2)


def test_k3_against_the_exact_kl_value_and_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(5, generator=generator, dtype=torch.float64), dim=-1)
    logprobs = torch.log_softmax(logits, dim=-1)
    exact = (logprobs.exp() * (logprobs - ref)).sum()
    estimate = (logprobs.exp() * k3(logprobs, ref)).sum()
    assert estimate.item() == pytest.approx(exact.item())
    # With samples held fixed, the expected gradient of k3 is that of the forward KL(ref || pi): -ref + pi.
    sampled = (logprobs.detach().exp() * k3(logprobs, ref)).sum()
    (gradient,) = torch.autograd.grad(sampled, logits)
    torch.testing.assert_close(gradient, logprobs.detach().exp() - ref.exp())


@pytest.mark.parametrize("difference", [50.0, -50.0])
def test_k3_stays_finite(difference: float) -> None:
    current = torch.tensor([0.0], requires_grad=True)
    value = k3(current, current.detach() + difference).sum()
    value.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(value) and current.grad is not None and torch.isfinite(current.grad).all()


def test_which_components_a_rule_brings() -> None:
    def names(sharing: SharingConfig, beta: float = 0.0) -> list[str]:
        return [each.name for each in components(Objective(beta=beta), sharing, max_completion_length=4)]

    assert names(Isolated()) == names(XGRPO()) == ["policy"]
    assert names(PRP()) == names(HACPO()) == names(Graft()) == ["policy", "peer"]
    assert names(SGT(), beta=0.1) == ["policy", "kl", "rescue"]
