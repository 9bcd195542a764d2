"""What one step's groups and rescues look like to people; metric names are TRL's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agents.advantages import mean, spread
from agents.sharing.isolated import rewards_of
from agents.sharing.rule import Rescue
from agents.types import Group
from tokenalign import spans


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, lengths and endings over a step's own completions."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = np.array([len(completion.ids) for completion in completions])
    finished = np.array([completion.finished for completion in completions])
    rewards = np.concatenate([rewards_of(group) for group in groups])
    metrics = {
        "reward": mean(rewards),
        "reward_std": float(np.mean([spread(rewards_of(group)) for group in groups])),
        "frac_reward_zero_std": float(np.mean([spread(rewards_of(group)) == 0.0 for group in groups])),
        "rewards/abstained": float(np.isnan(rewards).sum()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float((~finished).mean()),
        "num_tokens": float(lengths.sum()),
        # At its own samples a policy's mean -log p is an unbiased estimate of its entropy, and costs nothing.
        "entropy": float(-np.concatenate([completion.logprobs for completion in completions]).mean()),
    }
    if finished.any():
        metrics["completions/mean_terminated_length"] = float(lengths[finished].mean())
    for task in sorted({group.prompt.task for group in groups}):
        metrics[f"reward/{task}"] = mean(np.concatenate([rewards_of(each) for each in groups if each.prompt.task == task]))
    return metrics


def rescue_line(rescue: Rescue) -> dict[str, object]:
    """One rescued prompt, with the peer's success in both tokenizations."""
    source, translation = rescue.source, rescue.translation
    shown = [] if translation.alignment is None else spans(source.text, translation.alignment)
    return {
        "peer": rescue.peer,
        "task": rescue.prompt.task,
        "prompt_id": rescue.prompt.id,
        "prompt": rescue.prompt.text,
        "text": source.text.decode("utf-8", errors="replace"),
        "source_tokens": [piece for span in shown for piece in span.pieces_a],
        "receiver_tokens": [piece for span in shown for piece in span.pieces_b],
        "spans": [
            {"text": span.text, "source": list(span.pieces_a), "receiver": list(span.pieces_b), "exact": span.exact}
            for span in shown
        ],
        "residual": translation.residual.struct,
    }
