"""What one step's groups and rescues look like to people; metric names are TRL's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from agents.advantages import mean, spread
from agents.rows import Row, Stream
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
    for name in groups[0].by_function:
        judged = np.concatenate([group.by_function[name] for group in groups])
        if not np.isnan(judged).all():
            metrics[f"rewards/{name}/mean"], metrics[f"rewards/{name}/std"] = mean(judged), spread(judged)
    for task in sorted({group.prompt.task for group in groups}):
        metrics[f"reward/{task}"] = mean(np.concatenate([rewards_of(each) for each in groups if each.prompt.task == task]))
    return metrics


def row_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """How many of a step's training rows came from where, and the share that did not come from the agent itself."""
    counts = {stream: sum(row.stream is stream for row in rows) for stream in Stream}
    return {f"rows/{stream}": float(count) for stream, count in counts.items()} | {
        "peer/share": (len(rows) - counts[Stream.OWN]) / len(rows) if rows else 0.0
    }


def completion_lines(groups: Sequence[Group], extra: Mapping[str, Sequence[object]]) -> Iterator[dict[str, object]]:
    """Each completion of a step with what its judges logged about it. extra: column -> one value per completion in order."""
    completions = [(group, row) for group in groups for row in range(len(group.completions))]
    for index, (group, row) in enumerate(completions):
        yield {
            "task": group.prompt.task,
            "prompt_id": group.prompt.id,
            "prompt": group.prompt.text,
            "text": group.completions[row].text.decode("utf-8", errors="replace"),
            "rewards": {name: _or_none(values[row]) for name, values in group.by_function.items()},
            "extra": {column: values[index] for column, values in extra.items()},
        }


def _or_none(reward: np.float32) -> float | None:
    return None if np.isnan(reward) else float(reward)


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
