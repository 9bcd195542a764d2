"""What an agent writes for people: metrics, evaluations, rescues, the lines of a trial."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from agents.callbacks import Callback
from agents.evaluate import TaskScore
from agents.metrics import rescue_line
from agents.sharing.rule import Shared
from agents.sink import JsonlSink
from exchange.types import AgentName

MAX_RESCUES_LOGGED = 200
"""Rescues written for the report, per agent; the counters count all."""


class Journal:
    """One agent's lines in the files of its run. wall_s counts from `started_at_s`, by the wall clock."""

    def __init__(
        self,
        agent: AgentName,
        sink: JsonlSink,
        *,
        skills: Collection[str],
        started_at_s: float,
        clock: Callable[[], float] = time.time,
        callback: Callback | None = None,
    ) -> None:
        self._agent = agent
        self._sink = sink
        self._skills = frozenset(skills)
        self._started_at_s = started_at_s
        self._clock = clock
        self._callback = callback or Callback()

    @property
    def wall_s(self) -> float:
        """Seconds that the agent has been at it, those before an interruption included."""
        return round(self._clock() - self._started_at_s, 3)

    def lines(self) -> dict[str, int]:
        """How many lines of this agent each file has by now."""
        return dict(self._sink.lines)

    def resume(self, lines: Mapping[str, int], *, wall_s: float) -> None:
        """Go on behind these lines, as if no time had passed since."""
        self._sink.lines.update(lines)
        self._started_at_s = self._clock() - wall_s

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics under the agent's name; none for no metrics."""
        if metrics:
            line = self._head(step) | {f"{self._agent}/{name}": round(value, 6) for name, value in metrics.items()}
            self._sink.metrics(line)
            self._callback.on_log(self._agent, step, metrics)

    def rescues(self, step: int, shared: Shared) -> None:
        for rescue in shared.rescues:
            if self._sink.lines["rescues.jsonl"] < MAX_RESCUES_LOGGED:
                self._sink.rescue({"agent": self._agent, "step": step} | rescue_line(rescue))

    def evaluation(self, step: int, scores: Sequence[TaskScore]) -> None:
        """A line of metrics, and one per task with the outcome on every held-out prompt; nothing for no tasks."""
        if not scores:
            return
        metrics = {name: value for score in scores for name, value in score.metrics.items()}
        self.metrics(step, metrics)
        for score in scores:
            self._sink.evaluation(
                self._head(step)
                | {
                    "task": score.task,
                    "own_skill": score.task in self._skills,
                    "accuracy": score.accuracy,
                    "correct": [int(each) for each in score.correct],
                    "prompt_ids": list(score.prompt_ids),
                    "mean_length": score.mean_length,
                    "eos_rate": score.eos_rate,
                }
                | _sampled(score)
            )
        self._callback.on_evaluate(self._agent, step, metrics)

    def trial(self, step: int, lines: Iterable[Mapping[str, object]]) -> None:
        for line in lines:
            self._sink.trial({"agent": self._agent, "step": step, **line})

    def _head(self, step: int) -> dict[str, object]:
        return {"agent": self._agent, "step": step, "wall_s": self.wall_s}


def _sampled(score: TaskScore) -> dict[str, object]:
    """What a line of evals.jsonl has beside the greedy result where completions were sampled."""
    if not score.num_samples:
        return {}
    return {
        "num_samples": score.num_samples,
        "num_correct": score.num_correct.tolist(),
        "pass_at_k": {str(k): rate for k, rate in score.pass_at_k.items()},
    }
