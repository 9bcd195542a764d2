"""One optimization step from training rows. Knows no algorithm: forward, sum the components, one optimizer step.

Shape legend: B rows of a microbatch · T completion tokens.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agents.errors import NonFiniteError, ObjectiveError
from agents.microbatch import MicroBatch, collate
from agents.objectives.component import Component, LogProbs
from agents.optimizer import MasterAdamW
from agents.policies.lora import adapter_off, has_adapter
from agents.ranks import Ranks, part_of
from agents.rows import Row, Stream
from agents.scoring import Scorer

MAX_NON_FINITE_STEPS = 5

OPTIMIZER, REFERENCE = "optimizer.", "reference."
"""What the names of a learner's saved tensors begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """What the learner takes from an agent's config.

    ref_model_sync_steps: after how many steps the reference moves towards the policy, None for never; not with an adapter.
    """

    temperature: float
    pad_id: int
    micro_batch_size: int
    num_iterations: int
    learning_rate: float
    weight_decay: float
    max_grad_norm: float
    ref_model_sync_steps: int | None = None
    ref_model_mixup_alpha: float = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """tensors: the optimizer's and, where there is one, the reference policy's. steps: made. non_finite: updates in a row."""

    tensors: Mapping[str, Tensor]
    steps: int
    non_finite: int


@dataclass(frozen=True, slots=True)
class _Planned:
    """A microbatch with the log-probs that were fixed before the step's first update; None where they are not needed.

    counts: False for rows of another rank, computed so that all ranks compute equally often.
    """

    batch: MicroBatch
    counts: bool
    old: Tensor | None
    ref: Tensor | None


class Learner:
    """Owns the optimizer. Not thread-safe: one thread at a time calls `step`."""

    def __init__(
        self,
        model: torch.nn.Module,
        components: Sequence[Component],
        settings: LearnerSettings,
        ranks: Ranks | None = None,
    ) -> None:
        """ranks: that train the model together, each with such a learner; this one alone when None."""
        self._ranks = ranks or Ranks()
        self.model = model
        self._components = components
        self._settings = settings
        self._needs_ref = any(component.needs_ref for component in components)
        # Under LoRA the base weights do not move: the reference is the model with its adapter off.
        copied = self._needs_ref and not has_adapter(model)
        self._reference = copy.deepcopy(model).requires_grad_(False) if copied else None
        for each in (model, self._reference):
            if each is not None:
                self._ranks.shard(each)
        parameter = next(model.parameters())
        self._device = parameter.device
        self._dtype = torch.promote_types(parameter.dtype, torch.float32)
        self._optimizer = MasterAdamW(
            model.parameters(),
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
        )
        self._score, self._score_reference = (
            # The parts of a sharded model gather their weights inside its own forward pass only.
            Scorer(each, temperature=settings.temperature, in_parts=self._ranks.size == 1)
            for each in (model, self._reference or model)
        )
        self._non_finite = 0
        self.steps: int | None = 0
        """Completed calls of `step`; None when one ended in the middle of its updates, so that the weights are of no step."""

    def state(self) -> LearnerState:
        """All that the learner holds beside the policy's weights. ValueError when a step ended in its middle."""
        if self.steps is None:
            raise ValueError("a step that failed in the middle of its updates cannot be resumed")
        tensors = {f"{OPTIMIZER}{name}": value for name, value in self._optimizer.state().items()}
        if self._reference is not None:
            tensors |= {f"{REFERENCE}{name}": value for name, value in self._reference.named_parameters()}
        return LearnerState(tensors=tensors, steps=self.steps, non_finite=self._non_finite)

    def restore(self, state: LearnerState) -> None:
        """Go on from what `state` gave, with a policy that has the weights of that moment."""
        prefix = len(OPTIMIZER)
        self._optimizer.restore({key[prefix:]: value for key, value in state.tensors.items() if key.startswith(OPTIMIZER)})
        if self._reference is not None:
            with torch.no_grad():
                for name, parameter in self._reference.named_parameters():
                    parameter.copy_(part_of(state.tensors[f"{REFERENCE}{name}"], parameter))
        self.steps, self._non_finite = state.steps, state.non_finite

    def step(self, rows: Sequence[Row], *, prompts: int) -> dict[str, float]:
        """Train on `rows` of a step of `prompts` prompts; returns metrics under TRL's names.

        Every stream must have a component that reads it. No row that a component reads (every group of equal rewards,
        say): nothing is changed, and `skipped_steps` is 1. A non-finite loss or gradient: the update is left out, counted as
        `non_finite`, and NonFiniteError ends the run after MAX_NON_FINITE_STEPS in a row.
        """
        metrics = self._learn(rows, prompts)
        every = self._settings.ref_model_sync_steps
        if self._reference is not None and every and self.steps is not None and self.steps % every == 0:
            self._sync(self._reference)
        return metrics

    @torch.no_grad()
    def _sync(self, reference_model: torch.nn.Module) -> None:
        """reference = alpha * policy + (1 - alpha) * reference (TR-DPO, arXiv 2404.09656), as in TRL."""
        for reference, parameter in zip(reference_model.parameters(), self.model.parameters(), strict=True):
            reference.lerp_(parameter, self._settings.ref_model_mixup_alpha)

    def _learn(self, rows: Sequence[Row], prompts: int) -> dict[str, float]:
        started = time.perf_counter()
        done = (self.steps or 0) + 1
        by_stream = {stream: [row for row in rows if row.stream is stream] for stream in Stream}
        orphans = {stream for stream, present in by_stream.items() if present} - {each.stream for each in self._components}
        if orphans:
            raise ObjectiveError(f"no loss component reads the rows of stream {', '.join(sorted(orphans))}")
        live = {stream: self._live(stream, present) for stream, present in by_stream.items()}
        if not any(live.values()):
            self.steps = done
            return {"skipped_steps": 1.0, "learn_time": time.perf_counter() - started}
        planned = {stream: self._plan(present) for stream, present in live.items() if present}
        stats: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        metrics: dict[str, float] = {"non_finite": 0.0}
        for _ in range(self._settings.num_iterations):
            stats.clear()
            part = self._accumulate(planned, by_stream, prompts, stats)
            loss, totals = self._ranks.add(part, {name: (value, count) for name, (value, count) in stats.items()})
            norm, stepped = self._optimizer.step(loss)
            self.steps = None if stepped else self.steps
            metrics["loss"], metrics["grad_norm"] = loss, norm
            self._count_non_finite(stepped, loss, metrics)
        self.steps = done
        metrics.update({name: total / count for name, (total, count) in totals.items() if count})
        metrics["learning_rate"] = self._settings.learning_rate
        metrics["learn_time"] = time.perf_counter() - started
        return metrics

    def _count_non_finite(self, stepped: bool, loss: float, metrics: dict[str, float]) -> None:
        self._non_finite = 0 if stepped else self._non_finite + 1
        metrics["non_finite"] += not stepped
        if self._non_finite >= MAX_NON_FINITE_STEPS:
            raise NonFiniteError(
                f"gradients were not finite in {self._non_finite} updates in a row (last loss {loss}); "
                "lower learning_rate, or look for a reward that is not finite"
            )

    def _live(self, stream: Stream, rows: Sequence[Row]) -> list[Row]:
        """The rows of a stream that some component reads; the others count in denominators only."""
        active = [each for each in self._components if each.stream is stream]
        return [row for row in rows if any(each.reads(row) for each in active)]

    def _plan(self, rows: Sequence[Row]) -> list[_Planned]:
        """Microbatches of one stream, with old log-probs only where more than one update will be made on them."""
        planned = []
        for indices, counts in self._ranks.microbatches(rows, self._settings.micro_batch_size):
            chosen = [rows[index] for index in indices]
            batch = collate(chosen, pad_id=self._settings.pad_id, device=self._device, dtype=self._dtype)
            old = self._frozen(batch) if self._settings.num_iterations > 1 else None
            wants_ref = self._needs_ref and rows[0].stream is Stream.OWN
            planned.append(_Planned(batch, counts, old, self._under_reference(batch) if wants_ref else None))
        return planned

    @torch.no_grad()
    def _frozen(self, batch: MicroBatch) -> Tensor:
        return self._score(batch)

    @torch.no_grad()
    def _under_reference(self, batch: MicroBatch) -> Tensor:
        with adapter_off(self.model):
            return self._score_reference(batch)

    def _accumulate(
        self,
        planned: dict[Stream, list[_Planned]],
        by_stream: dict[Stream, list[Row]],
        prompts: int,
        stats: defaultdict[str, list[float]],
    ) -> float:
        """Add up gradients of all components over all microbatches; returns the loss."""
        total = 0.0
        for stream, batches in planned.items():
            active = [each for each in self._components if each.stream is stream]
            denominators = [each.denominator(by_stream[stream], prompts) for each in active]
            for item in batches:
                current = self._score(item.batch)
                if not item.counts:
                    (0.0 * current.sum()).backward()  # type: ignore[no-untyped-call]
                    continue
                logprobs = LogProbs(current=current, old=current.detach() if item.old is None else item.old, ref=item.ref)
                _compare_with_sampler(logprobs.old, item.batch, stats)
                loss = torch.zeros((), device=self._device, dtype=self._dtype)
                for component, denominator in zip(active, denominators, strict=True):
                    term = component.term(item.batch, logprobs)
                    loss = loss + term.numerator / denominator
                    for name, (value, count) in term.stats.items():
                        stats[name][0] += value
                        stats[name][1] += count
                    for name, value in term.extremes.items():
                        _take_extreme(stats, name, value)
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
        return total


@torch.no_grad()
def _compare_with_sampler(old: Tensor, batch: MicroBatch, stats: defaultdict[str, list[float]]) -> None:
    """How far the sampler's log-probs lie from the learner's at the start of the step; a fault in either shows here."""
    if batch.sampled_logprobs is None:
        return
    difference = (old - batch.sampled_logprobs).abs()[batch.mask]
    mean = stats["sampling/sampling_logp_difference/mean"]
    mean[0] += float(difference.sum())
    mean[1] += len(difference)
    _take_extreme(stats, "sampling/sampling_logp_difference/max", float(difference.max()))


def _take_extreme(stats: defaultdict[str, list[float]], name: str, value: float) -> None:
    """Keep the least value of a metric named "…/min", the greatest of one named "…/max"."""
    extreme = min if name.endswith("/min") else max
    stats[name] = [extreme(stats[name][0], value) if name in stats else value, 1.0]
