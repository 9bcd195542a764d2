"""Every loss type against TRL's own loss function, value and gradient, on one batch."""

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agents.config import Objective
from agents.microbatch import MicroBatch, collate, completion_logits, token_logprobs
from agents.objectives.component import Component, LogProbs
from agents.objectives.grpo import GRPOSurrogate
from agents.objectives.kl import KLToReference
from agents.rows import Row, Stream
from agents.testing import BigramLM

pytestmark = pytest.mark.soak
MAX_COMPLETION_LENGTH = 8
ROWS: list[tuple[list[int], float]] = [([1, 2, 3], 1.1), ([4], -0.6), ([2, 2, 1, 4, 3], 0.4), ([3, 1], -0.9)]


def rows(sampler: BigramLM | None) -> list[Row]:
    made = []
    for ids, advantage in ROWS:
        logprobs = np.zeros(len(ids), dtype=np.float64)
        if sampler is not None:
            table = torch.log_softmax(sampler.table.detach(), dim=-1)
            logprobs = np.array([float(table[a, b]) for a, b in zip([0, *ids[:-1]], ids, strict=True)])
        made.append(
            Row(
                stream=Stream.OWN,
                prompt_ids=np.array([0], dtype=np.int32),
                ids=np.array(ids, dtype=np.int32),
                advantage=advantage,
                sampled_logprobs=logprobs.astype(np.float32),
                off_policy=sampler is not None,
            )
        )
    return made


def ours(batch: MicroBatch, logprobs: LogProbs, objective: Objective, made: Sequence[Row]) -> torch.Tensor:
    parts: list[Component] = [GRPOSurrogate(objective, MAX_COMPLETION_LENGTH), KLToReference(objective, MAX_COMPLETION_LENGTH)]
    terms = [part.term(batch, logprobs).numerator / part.denominator(made, 2) for part in parts]
    return torch.stack(terms).sum()


def trls(batch: MicroBatch, logprobs: LogProbs, objective: Objective) -> torch.Tensor:
    """GRPOTrainer._compute_loss, given only what it reads."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    accelerator = SimpleNamespace(num_processes=1, reduce=lambda value, **_: value, gather=lambda value: value)
    instead = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs.current, torch.zeros_like(logprobs.old), None),
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=accelerator,
        args=SimpleNamespace(delta=objective.delta, use_bias_correction_kl=False, steps_per_generation=1),
        aux_loss_enabled=False,
        beta=objective.beta,
        current_gradient_accumulation_steps=1,
        epsilon_high=objective.upper_epsilon,
        epsilon_low=objective.epsilon,
        importance_sampling_level=objective.importance_sampling_level,
        loss_type=objective.loss_type,
        max_completion_length=MAX_COMPLETION_LENGTH,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=bool(batch.off_policy_mask.any()),
        vllm_importance_sampling_correction=True,
    )
    mask = batch.mask.to(torch.float64)
    inputs: dict[str, Any] = {
        "prompt_ids": batch.input_ids[:, :1],
        "prompt_mask": torch.ones(len(batch.rows), 1),
        "completion_ids": batch.completion_ids,
        "completion_mask": mask,
        "advantages": batch.advantages,
        "old_per_token_logps": logprobs.old,
        "ref_per_token_logps": logprobs.ref,
        "num_items_in_batch": mask.sum(),
    }
    if batch.sampled_logprobs is not None and instead.use_vllm:
        difference = (logprobs.old - batch.sampled_logprobs) * mask
        inputs["importance_sampling_ratio"] = difference.exp().clamp(max=objective.importance_sampling_clip_max)
    loss: torch.Tensor = trainer._compute_loss(instead, None, inputs)
    return loss


@pytest.mark.parametrize("sampler", [None, BigramLM(5, seed=5)], ids=["fresh", "stale"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo"])
def test_loss_and_gradient_are_trls(loss_type: Any, level: Any, sampler: BigramLM | None) -> None:
    objective = Objective(
        loss_type=loss_type, importance_sampling_level=level, epsilon=0.2, epsilon_high=0.4, delta=1.8, beta=0.3
    )
    made = rows(sampler)
    batch = collate(made, pad_id=0, device=torch.device("cpu"), dtype=torch.float64)
    old, ref = (
        token_logprobs(completion_logits(BigramLM(5, seed=seed), batch, temperature=1.0), batch).detach() for seed in (1, 2)
    )
    found = []
    for each in (ours, trls):
        model = BigramLM(5, seed=0)
        current = token_logprobs(completion_logits(model, batch, temperature=1.0), batch)
        logprobs = LogProbs(current=current, old=old, ref=ref)
        loss = ours(batch, logprobs, objective, made) if each is ours else trls(batch, logprobs, objective)
        (gradient,) = torch.autograd.grad(loss, model.table)
        found.append((loss.detach(), gradient))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-9)
