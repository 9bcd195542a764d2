"""`HFSampler`: groups of completions from a Hugging Face causal LM, in the process that trains it.

Shape legend: P prompts · G completions per prompt · B = P·G sequences · T sampled tokens · V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from agents.config import Sampling
from agents.policies.policy import Policy
from agents.samplers.decode import Choose, Stop, decode
from agents.samplers.distribution import draw_tokens, finest_dtype, sampling_log_probs
from agents.samplers.sampler import check_prompts, completions_of, groups_of
from agents.types import Completion, Group, Prompt
from exchange.types import Version

BEGINNING = 16
"""Prompt tokens by which prompts that begin alike are recognised."""
ENOUGH_ALIKE = 8
"""Prompts that must begin alike to be put together whatever their lengths."""


class HFSampler:
    """Draws from the policy as it is at the call; holds no weights of its own. Not for concurrent calls."""

    def __init__(self, policy: Policy, sampling: Sampling) -> None:
        self._policy = policy
        self._sampling = sampling
        self._stop_strings = tuple(text.encode() for text in sampling.stop)

    def preflight(self, prompts: Sequence[Prompt]) -> None:
        """Raise PolicyError for a prompt that the policy cannot hold or spell; see `check_prompts`."""
        check_prompts(self._policy, self._sampling, prompts)

    def update(self, version: Version) -> Mapping[str, float]:
        """Nothing to do: these are the weights that the learner has changed."""
        return {}

    def close(self) -> None:
        """Nothing to let go."""

    def sample(self, prompts: Sequence[Prompt], *, num_generations: int, step: int, version: Version, seed: int) -> list[Group]:
        """See `Sampler.sample`; `version` is only written into the groups."""
        uniforms_BT = _uniforms(seed, step, len(prompts) * num_generations, self._sampling.max_completion_length)
        uniforms_BT = uniforms_BT.to(finest_dtype(self._policy.device)).to(self._policy.device)

        def choose(logits_bV: torch.Tensor, rows_b: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
            log_probs_bV = sampling_log_probs(logits_bV, self._sampling)
            tokens_b = draw_tokens(log_probs_bV, uniforms_BT[rows_b, position])
            return tokens_b, log_probs_bV.gather(-1, tokens_b[:, None]).squeeze(-1)

        completions = self._decode(prompts, num_generations, choose)
        return groups_of(prompts, completions, self._policy.tokenizer, step=step, version=version)

    def greedy(self, prompts: Sequence[Prompt], batch_size: int) -> list[Completion]:
        """See `Sampler.greedy`."""
        rendered = [self._policy.tokenizer.render(prompt.messages) for prompt in prompts]
        # Those that begin alike together, so that it is computed once; all others by length, so that little is padded.
        beginnings = [ids[:BEGINNING].tobytes() for ids in rendered]
        alike = {beginning for beginning, count in Counter(beginnings).items() if count >= ENOUGH_ALIKE}

        def place(row: int) -> tuple[bytes, int]:
            return beginnings[row] if beginnings[row] in alike else b"", len(rendered[row])

        order = sorted(range(len(prompts)), key=place)
        completions: dict[int, Completion] = {}
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            completions.update(zip(rows, self._decode([prompts[row] for row in rows], 1, _likeliest), strict=True))
        return [completions[row] for row in range(len(prompts))]

    def _decode(self, prompts: Sequence[Prompt], num_generations: int, choose: Choose) -> list[Completion]:
        if not prompts:
            return []
        with _evaluating(self._policy.model):
            decoded = decode(
                self._policy,
                [self._policy.tokenizer.render(prompt.messages) for prompt in prompts],
                num_generations=num_generations,
                max_tokens=self._sampling.max_completion_length,
                choose=choose,
                stop=self._watch_for_stop() if self._stop_strings else None,
            )
        return completions_of(decoded, self._policy.tokenizer)

    def _watch_for_stop(self) -> Stop:
        """A stop string counts wherever it lies in the text, across tokens too; it stays part of the text."""
        tails: dict[int, bytes] = {}
        longest = max(len(text) for text in self._stop_strings)

        def stop(row: int, token: int) -> bool:
            piece = self._policy.tokenizer.decode_bytes([token])
            tail = tails.get(row, b"") + piece
            tails[row] = tail[-longest:]
            return any(text in tail for text in self._stop_strings)

        return stop


def _likeliest(logits_bV: torch.Tensor, _rows_b: torch.Tensor, _position: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits_bV = logits_bV.float()
    best_b, tokens_b = logits_bV.max(dim=-1)
    return tokens_b, best_b - logits_bV.logsumexp(dim=-1)


def _uniforms(seed: int, step: int, rows: int, width: int) -> torch.Tensor:
    """Numbers in [0, 1), float64 [rows, width], drawn on the CPU so that every device gets the same."""
    state = int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0] >> np.uint64(1))
    return torch.rand((rows, width), generator=torch.Generator().manual_seed(state), dtype=torch.float64)


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode, in which the cache works, for models that train with gradient checkpoints."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
