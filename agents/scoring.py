"""Log-probs of completion tokens under a causal LM, in little memory and without repeated work.

The backbone runs on sequences that share their prompts (agents/layout.py). The head then runs on those hidden states alone
that predict a completion token, some at a time, so that logits [B, T, V] are never held; where there are several parts,
each is computed again in the backward pass. Whatever a model does behind its backbone (tied head, bias, soft cap, scaling,
closed holes in the vocabulary) its own `forward` does here too: it is called with the backbone answering the chosen hidden
states. Whether a model can be taken apart so is found out once, by comparing both ways on a probe, never by its name.

Shape legend: B rows · T completion tokens · N completion tokens of all rows · n of one part · H hidden · V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agents.layout import Layout, lay_out
from agents.microbatch import MicroBatch, collate, completion_logits, token_logprobs
from agents.policies.policy import attention_limit
from agents.rows import Row, Stream

logger = logging.getLogger("mutualrl.agent")

PART_BYTES = 64 << 20
"""Float32 logits of one part of the head's work; about four times as much is held while it is differentiated."""

TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
"""How far log-probs of the two ways may lie apart on the probe; half precision rounds each hidden state by 2^-8."""
HALF_TOLERANCE = 0.3


def plain_logprobs(model: nn.Module, batch: MicroBatch, *, temperature: float) -> Tensor:
    """Log-probs [B, T] of the completion tokens by one forward pass over one sequence per row."""
    return token_logprobs(completion_logits(model, batch, temperature=temperature), batch)


class Scorer:
    """The log-probs of a model's completions at one sampling temperature, with gradients where they are enabled."""

    def __init__(self, model: nn.Module, *, temperature: float, in_parts: bool = True) -> None:
        """Runs the model a few times on a dozen tokens. in_parts: False leaves it whole without a try."""
        self._model = model
        self._temperature = temperature
        self._backbone: nn.Module | None = None
        self._hidden_size: int | None = None
        self._limit = float("inf")
        if in_parts and isinstance(model, PreTrainedModel) and model.base_model is not model:
            self._take_apart(model)

    def __call__(self, batch: MicroBatch) -> Tensor:
        """Log-probs [B, T] of the completion tokens, 0 where padded, in the batch's dtype."""
        if self._backbone is None:
            return plain_logprobs(self._model, batch, temperature=self._temperature)
        longest = max(len(row.prompt_ids) + len(row.ids) for row in batch.rows)
        layout = lay_out(
            batch.rows,
            hidden_size=self._hidden_size if longest <= self._limit else None,
            pad_id=0,
            device=batch.input_ids.device,
        )
        logprobs_N = self._packed(self._backbone, layout, batch.weights.dtype)
        return torch.zeros_like(batch.mask, dtype=batch.weights.dtype).masked_scatter(batch.mask, logprobs_N)

    def _packed(self, backbone: nn.Module, layout: Layout, dtype: torch.dtype) -> Tensor:
        output = backbone(
            input_ids=layout.input_ids,
            attention_mask=layout.attention_mask(next(backbone.parameters()).dtype),
            position_ids=layout.position_ids,
            use_cache=False,
        )
        hidden_NH = output.last_hidden_state.flatten(0, 1)
        hidden_NH = hidden_NH.index_select(0, layout.sources.to(hidden_NH.device))
        targets_N = layout.targets.to(hidden_NH.device)

        def part(hidden_nH: Tensor, targets_n: Tensor) -> Tensor:
            with _answers(backbone, type(output)(last_hidden_state=hidden_nH[None])):
                logits_nV = self._model(input_ids=targets_n[None], use_cache=False).logits[0].to(dtype)
            logits_nV = logits_nV if self._temperature == 1.0 else logits_nV / self._temperature
            return -nn.functional.cross_entropy(logits_nV, targets_n.to(logits_nV.device), reduction="none")

        size = max(1, PART_BYTES // (4 * self._vocab_size))
        if len(targets_N) <= size:
            logprobs_N = part(hidden_NH, targets_N)
        else:
            parts = zip(torch.split(hidden_NH, size), torch.split(targets_N, size), strict=True)
            logprobs_N = torch.cat([checkpoint(part, *each, use_reentrant=False, preserve_rng_state=False) for each in parts])
        return logprobs_N.to(layout.targets.device)

    def _take_apart(self, model: PreTrainedModel) -> None:
        """Turn on what gives the same log-probs as the model's own forward pass on a probe."""
        config = model.config.get_text_config()
        self._vocab_size = model.get_output_embeddings().weight.shape[0]  # type: ignore[no-untyped-call]
        self._limit = attention_limit(model)
        for hidden_size in (config.hidden_size, None):
            self._backbone, self._hidden_size = model.base_model, hidden_size
            if self._probe(model):
                return
        self._backbone = None
        logger.info("%s is scored by its own forward pass: its backbone and head do not come apart", type(model).__name__)

    @torch.no_grad()
    def _probe(self, model: PreTrainedModel) -> bool:
        """Whether this way gives the log-probs of the plain one, and no completion sees the one laid before it."""
        dtype = next(model.parameters()).dtype
        tolerance = TOLERANCES.get(dtype, HALF_TOLERANCE)
        ids = np.random.default_rng(0).integers(self._vocab_size, size=16, dtype=np.int32)
        first, other, second, alone = ids[4:7], ids[7:10], ids[10:12], ids[12:16]
        device = next(model.parameters()).device

        def batch(*completions: npt.NDArray[np.int32]) -> MicroBatch:
            rows = [Row(stream=Stream.OWN, prompt_ids=ids[:4], ids=each) for each in completions]
            rows.append(Row(stream=Stream.OWN, prompt_ids=ids[:3], ids=alone))
            return collate(rows, pad_id=0, device=device, dtype=torch.promote_types(dtype, torch.float32))

        try:
            got_BT, plain_BT = (
                self(batch(first, second)),
                plain_logprobs(model, batch(first, second), temperature=self._temperature),
            )
            apart_T = self(batch(other, second))[1] - got_BT[1]
            return bool((got_BT - plain_BT).abs().max() <= tolerance and apart_T.abs().max() <= tolerance / 100)
        except Exception as error:  # a model's code is foreign: what it cannot do may raise anything
            logger.debug("%s does not come apart: %r", type(model).__name__, error)
            return False


@contextmanager
def _answers(backbone: nn.Module, output: object) -> Iterator[None]:
    """The backbone gives `output`, whatever it is asked."""
    own = vars(backbone).get("forward")  # accelerate puts one there where layers lie on several devices
    backbone.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del backbone.forward
        if own is not None:
            backbone.forward = own
