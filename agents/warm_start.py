"""Supervised steps on the tasks' own answers before RL begins.

Shape legend: B sequences · T tokens · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from agents.config import WarmStart
from agents.errors import TaskError
from agents.policies.lora import adapter_dropout
from agents.policies.policy import Policy
from agents.policies.spelling import check_spelling
from agents.tasks.load import TaskData
from agents.types import Prompt

WARM_UP_SHARE = 0.1
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Example:
    """ids [T]: prompt, answer, end token. answer_start: place of the answer's first token."""

    ids: npt.NDArray[np.int64]
    answer_start: int


def warm_start(policy: Policy, config: WarmStart, tasks: Sequence[TaskData], *, seed: int) -> float:
    """Train the policy in place on training prompts and their answers; returns the last step's loss.

    An answer stands in `answer`, `solution` or `ground_truth`. Each row's task is drawn by its share in `mix`, its prompt
    evenly. The loss is the mean over answer and end tokens.
    AdamW without weight decay, the rate rising over a tenth of the steps and falling to 0 along a half cosine. Equal seeds
    give equal weights on one machine. Raises TaskError when `mix` names a task that is not there or has no
    answers, PolicyError when the policy cannot spell a prompt or an answer.
    """
    by_name = {task.name: task for task in tasks}
    missing = [name for name in config.mix if name not in by_name]
    if missing:
        raise TaskError(f"`warm_start.mix` names unknown task {missing[0]!r}; known are {', '.join(by_name)}")
    check_spelling(policy.tokenizer, (prompt for name in config.mix for prompt in by_name[name].train))
    examples = [[_example(policy, prompt) for prompt in by_name[name].train] for name in config.mix]
    shares = np.array(list(config.mix.values()))
    rng = np.random.default_rng([seed, len(config.mix)])
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, config.steps))
    loss = torch.zeros(())
    for _ in range(config.steps):
        which = rng.choice(len(examples), size=config.batch_size, p=shares / shares.sum())
        batch = [examples[task][rng.integers(len(examples[task]))] for task in which]
        with adapter_dropout(policy.model):  # around the backward pass too, which recomputes where gradients are checkpointed
            loss = _loss(policy, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return float(loss.detach())


def _rate(step: int, steps: int) -> float:
    rise = max(1, round(WARM_UP_SHARE * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + float(np.cos(np.pi * (step - rise) / max(1, steps - rise))))


def _example(policy: Policy, prompt: Prompt) -> Example:
    answer = prompt.columns.get(prompt.column_for("answer") or "answer")
    if not isinstance(answer, str):
        raise TaskError(
            f"a warm start needs a text in column 'answer', got answer={answer!r} in prompt {prompt.id} of task "
            f"{prompt.task!r}, which begins {prompt.text[:60]!r}"
        )
    prompt_ids = policy.tokenizer.render(prompt.messages)
    ids = np.concatenate([prompt_ids, policy.tokenizer.encode(answer.encode()), [policy.tokenizer.eos_id]])
    if len(ids) > policy.max_context:
        raise TaskError(
            f"prompt {prompt.id} of task {prompt.task!r} has {len(ids)} tokens with its answer, more than "
            f"max_context={policy.max_context}; the prompt begins {prompt.text[:60]!r}"
        )
    return Example(ids=ids.astype(np.int64), answer_start=len(prompt_ids))


def _loss(policy: Policy, batch: Sequence[Example]) -> torch.Tensor:
    width = max(len(example.ids) for example in batch)
    ids_BT = np.full((len(batch), width), policy.tokenizer.pad_id, dtype=np.int64)
    targets_BT = np.full((len(batch), width), IGNORED, dtype=np.int64)
    for row, example in enumerate(batch):
        length = len(example.ids)
        ids_BT[row, :length] = example.ids
        targets_BT[row, example.answer_start - 1 : length - 1] = example.ids[example.answer_start :]
    ids, targets = (torch.from_numpy(array).to(policy.device) for array in (ids_BT, targets_BT))
    # Padding is on the right, where causal attention keeps it from every real token without a mask.
    logits_BTV = policy.model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
