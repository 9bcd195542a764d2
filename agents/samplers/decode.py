"""The decode loop: left-padded prompts in, sampled ids with log-probs out.

One prefill serves all completions of a prompt; its cache is repeated. Finished rows leave the batch. Which positions are
real is known from lengths alone, never from token values, so that a pad id may equal an end id.

Shape legend: P prompts · G completions per prompt · B = P·G sequences · Tp padded prompt · T sampled tokens · V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel

from agents.policies.policy import Policy, attention_limit
from agents.samplers.roomy import make_room
from agents.samplers.sampler import Decoded

Choose = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""(logits [b, V], rows [b], position) -> (token ids [b], log-probs [b])."""

Stop = Callable[[int, int], bool]
"""(row, token id) -> has this row met a stop string with this token? Called for each token in order."""

COMPACT_BELOW = 0.75
"""Share of unfinished rows below which a batch is rebuilt from them: copying the cache costs about one forward pass."""

WORTH_A_PASS_TOKENS = 128
"""Prompt tokens that a common prefix must save before it gets a forward pass of its own."""


@torch.inference_mode()
def decode(
    policy: Policy,
    prompts: Sequence[npt.NDArray[np.int32]],
    *,
    num_generations: int,
    max_tokens: int,
    choose: Choose,
    stop: Stop | None = None,
) -> Decoded:
    """`num_generations` completions of at most `max_tokens` tokens for each prompt; row p·G + g is prompt p's g-th."""
    device = policy.device
    ends_mask_V = torch.zeros(len(policy.tokenizer.table), dtype=torch.bool, device=device)
    ends_mask_V[list(policy.tokenizer.eos_ids)] = True
    logits_BV, cache, mask_BT, next_position_B = _prefill(policy, prompts, num_generations, max_tokens)
    count = len(next_position_B)
    cache_argument = _cache_argument(policy.model)
    width = mask_BT.shape[1] - max_tokens
    ids_BT = torch.zeros((count, max_tokens), dtype=torch.int64, device=device)
    logprobs_BT = torch.zeros((count, max_tokens), dtype=torch.float32, device=device)
    lengths_B = torch.full((count,), max_tokens, dtype=torch.int64, device=device)
    stopped_B = torch.zeros(count, dtype=torch.bool, device=device)
    rows_b = torch.arange(count, device=device)

    for position in range(max_tokens):
        tokens_b, logprobs_b = choose(logits_BV, rows_b, position)
        live_mask_b = ~stopped_B[rows_b]
        live_rows, live_tokens = rows_b[live_mask_b], tokens_b[live_mask_b]
        ids_BT[live_rows, position] = live_tokens
        logprobs_BT[live_rows, position] = logprobs_b[live_mask_b]
        ended_mask = ends_mask_V[live_tokens]
        if stop is not None:
            pairs = zip(live_rows.tolist(), live_tokens.tolist(), strict=True)
            ended_mask |= torch.tensor([stop(row, token) for row, token in pairs], dtype=torch.bool, device=device)
        stopped_B[live_rows[ended_mask]] = True
        lengths_B[live_rows[ended_mask]] = position + 1
        keep_b = (~stopped_B[rows_b]).nonzero().squeeze(-1)
        if len(keep_b) == 0 or position + 1 == max_tokens:
            break
        if len(keep_b) < COMPACT_BELOW * len(rows_b):
            cache.batch_select_indices(keep_b)
            rows_b, tokens_b = rows_b[keep_b], tokens_b[keep_b]
            mask_BT, next_position_B = mask_BT[keep_b], next_position_B[keep_b]
        logits_BV = policy.model(
            input_ids=tokens_b[:, None],
            attention_mask=mask_BT[:, : width + position + 1],
            position_ids=(next_position_B + position)[:, None],
            use_cache=True,
            **{cache_argument: cache},
        ).logits[:, -1]

    return Decoded(
        ids=ids_BT.cpu().numpy().astype(np.int32),
        logprobs=logprobs_BT.cpu().numpy(),
        lengths=lengths_B.cpu().numpy(),
        stopped=stopped_B.cpu().numpy(),
    )


def _prefill(
    policy: Policy, prompts: Sequence[npt.NDArray[np.int32]], num_generations: int, max_tokens: int
) -> tuple[torch.Tensor, DynamicCache, torch.Tensor, torch.Tensor]:
    """Next-token logits [B, V], cache of B rows, mask bool [B, Tp + T] (sampled positions true), next position ids [B].

    What all prompts begin with (few-shot examples, a system prompt) is computed once; padding then lies behind it.
    """
    device = policy.device
    lengths_P = np.array([len(prompt) for prompt in prompts])
    width = int(lengths_P.max())
    common = _common_prefix(prompts) if width + max_tokens <= attention_limit(policy.model) else 0
    ids_PT = np.full((len(prompts), width - common), policy.tokenizer.pad_id, dtype=np.int64)
    mask_PT = np.ones((len(prompts), width + max_tokens), dtype=np.bool_)
    for row, prompt in enumerate(prompts):
        padding = width - len(prompt)
        ids_PT[row, padding:] = prompt[common:]
        mask_PT[row, common : common + padding] = False
    positions_PT = np.maximum(np.arange(common, width) - (width - lengths_P)[:, None], 0)
    mask = torch.from_numpy(mask_PT).to(device)
    cache = DynamicCache(config=policy.model.config)
    argument = _cache_argument(policy.model)
    if common:
        prefix = torch.from_numpy(prompts[0][:common].astype(np.int64)).to(device)[None]
        policy.model(input_ids=prefix, use_cache=True, logits_to_keep=1, **{argument: cache})
        cache.batch_repeat_interleave(len(prompts))
    logits_PV = policy.model(
        input_ids=torch.from_numpy(ids_PT).to(device),
        attention_mask=mask[:, :width],
        position_ids=torch.from_numpy(positions_PT).to(device),
        use_cache=True,
        logits_to_keep=1,
        **{argument: cache},
    ).logits[:, -1]
    if num_generations > 1:
        cache.batch_repeat_interleave(num_generations)
    make_room(cache, max_tokens)
    return (
        logits_PV.repeat_interleave(num_generations, dim=0),
        cache,
        mask.repeat_interleave(num_generations, dim=0),
        torch.from_numpy(lengths_P).to(device).repeat_interleave(num_generations),
    )


def _common_prefix(prompts: Sequence[npt.NDArray[np.int32]]) -> int:
    """Tokens that all prompts begin with, one of each left over; 0 where so few are not worth a pass of their own."""
    shortest = min(len(prompt) for prompt in prompts) - 1
    differs = np.zeros(shortest, dtype=np.bool_)
    for prompt in prompts[1:]:
        differs |= prompt[:shortest] != prompts[0][:shortest]
    common = int(differs.argmax()) if differs.any() else shortest
    return common if common * (len(prompts) - 1) >= WORTH_A_PASS_TOKENS else 0


def _cache_argument(model: PreTrainedModel) -> str:
    """transformers 5 renamed the argument between its minor versions."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
