"""What every sampler can do, and what all of them share: checks before the first prompt, and groups from sampled ids.

Shape legend: P prompts · G completions per prompt · B = P·G sequences · T sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from agents.errors import PolicyError
from agents.policies.policy import Policy
from agents.policies.spelling import check_spelling
from agents.policies.tokenizer import PolicyTokenizer
from agents.samplers.config import Sampling
from agents.types import Completion, Group, Prompt
from exchange.types import Version


class Sampler(Protocol):
    """A policy's completions. One call at a time; every call but `close` blocks, so make it on a thread for torch."""

    def preflight(self, prompts: Sequence[Prompt]) -> None:
        """Raise PolicyError, naming the prompt, when the policy cannot hold or cannot spell it (see `check_prompts`).

        Begins what takes long to be ready, and does not wait for it.
        """

    def update(self, version: Version) -> Mapping[str, float]:
        """Draw from the policy's weights as they are now, called `version`; returns metrics.

        To be called before the first draw and after each learner step. Raises SamplerError when they do not arrive.
        """

    def sample(self, prompts: Sequence[Prompt], *, num_generations: int, step: int, version: Version, seed: int) -> list[Group]:
        """G sampled completions for each prompt, in order, drawn from the weights called `version`.

        The draws are fixed by (seed, step), the prompts' order and the weights; agents that shall not share their noise
        take different seeds. Log-probs are under the sampling distribution (see `sampling_log_probs`).
        """

    def greedy(self, prompts: Sequence[Prompt], batch_size: int) -> list[Completion]:
        """The likeliest token at each place, one completion per prompt, `batch_size` prompts at a time.

        Log-probs are the model's own, at temperature 1.
        """

    def close(self) -> None:
        """Let go of what is not this process's memory. May be called twice, and from another thread to end a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """ids: int32 [B, T]; logprobs: float32 [B, T]; lengths: int64 [B], the end token included; what lies behind a row's
    length means nothing. stopped: bool [B], ended by an end token or a stop string."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    lengths: npt.NDArray[np.int64]
    stopped: npt.NDArray[np.bool_]


def check_prompts(policy: Policy, sampling: Sampling, prompts: Sequence[Prompt]) -> int:
    """The length in tokens of the longest prompt with a longest completion.

    Raises PolicyError, naming the prompt, when these two do not fit the context together, or when a prompt or its answer
    cannot be spelled whole.
    """
    check_spelling(policy.tokenizer, prompts)
    limit = policy.max_context - sampling.max_completion_length
    longest = 0
    for prompt in prompts:
        length = len(policy.tokenizer.render(prompt.messages))
        longest = max(longest, length)
        if not 0 < length <= limit:
            raise PolicyError(
                f"prompt {prompt.id} of task {prompt.task!r} has {length} tokens, allowed are 1 to {limit}: "
                f"max_context={policy.max_context} less sampling.max_completion_length="
                f"{sampling.max_completion_length}; the prompt begins {prompt.text[:60]!r}"
            )
    return longest + sampling.max_completion_length


def completions_of(decoded: Decoded, tokenizer: PolicyTokenizer) -> list[Completion]:
    """One per row; all rows are looked up in the token table at once."""
    rows = [decoded.ids[row, :length] for row, length in enumerate(decoded.lengths)]
    all_ids = np.concatenate(rows)
    all_ends = tokenizer.ends(all_ids)
    all_text = tokenizer.decode_bytes(all_ids)
    completions = []
    token, byte = 0, 0
    for row, ids in enumerate(rows):
        ends = all_ends[token : token + len(ids)] - byte
        completions.append(
            Completion(
                ids=ids.copy(),
                logprobs=decoded.logprobs[row, : len(ids)].copy(),
                ends=ends,
                text=all_text[byte : byte + int(ends[-1])],
                finished=bool(decoded.stopped[row]),
                has_eos=int(ids[-1]) in tokenizer.eos_ids,
            )
        )
        token += len(ids)
        byte += int(ends[-1])
    return completions


def groups_of(
    prompts: Sequence[Prompt], completions: Sequence[Completion], tokenizer: PolicyTokenizer, *, step: int, version: Version
) -> list[Group]:
    """The completions by prompt; those of prompt p lie together."""
    size = len(completions) // max(len(prompts), 1)
    return [
        Group(
            prompt=prompt,
            prompt_ids=tokenizer.render(prompt.messages),
            completions=tuple(completions[index * size : (index + 1) * size]),
            step=step,
            version=version,
        )
        for index, prompt in enumerate(prompts)
    ]
