"""How far each agent is, from the run's metrics file as it grows, and what a person should be warned about."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

Row = dict[str, str | float | int | None]

HIT_RATE_ROWS = 20
LOW_HIT_RATE = 0.3
LOW_HIT_RATE_STEPS = 10
EVALUATION_FALL = 0.2

_decoder = msgspec.json.Decoder(Row)


class MetricsTail:
    """Reads the lines that were added to a JSONL file since the last call; a line still being written waits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def skip(self) -> None:
        """Leave out what is there by now."""
        self._offset = self._path.stat().st_size if self._path.exists() else 0

    def read(self) -> list[Row]:
        """New complete rows; lines that are not JSON objects are left out, and a missing file has no rows."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        complete, newline, _ = content.rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        rows = []
        for line in complete.splitlines():
            try:
                rows.append(_decoder.decode(line))
            except msgspec.DecodeError:
                continue
        return rows


@dataclass(slots=True)
class AgentProgress:
    """One agent, as of its newest row. Values are None until a row has brought them.

    total: steps of the run. hit_rate: share of prompts on which a peer was met, over the last rows. rescues: of all rows.
    """

    name: str
    total: int
    step: int = 0
    rewards: dict[str, float] = field(default_factory=dict)
    accuracies: dict[str, float] = field(default_factory=dict)
    rescues: int = 0
    hit_rate: float | None = None
    tokens_per_s: float | None = None
    staleness: float | None = None
    step_time_s: float | None = None
    _best: dict[str, float] = field(default_factory=dict)
    _meetings: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=HIT_RATE_ROWS))
    _low_hit_rate_steps: int = 0
    _warned: set[str] = field(default_factory=set)

    def update(self, row: Row) -> list[str]:
        """Take in one row of this agent; the warnings that it gives rise to, each once per run."""
        values = {key.removeprefix(f"{self.name}/"): float(v) for key, v in row.items() if isinstance(v, int | float)}
        self.step = int(values.get("step", self.step))
        self.rescues += int(values.get("rescues", 0))
        self.tokens_per_s = values.get("tokens_per_s", self.tokens_per_s)
        self.staleness = values.get("peer/staleness_mean", self.staleness)
        if (step_time_s := values.get("step_time")) is not None:
            self.step_time_s = step_time_s if self.step_time_s is None else 0.9 * self.step_time_s + 0.1 * step_time_s
        met_peers = self._meet(values)
        self.rewards |= {key.removeprefix("reward/"): v for key, v in values.items() if key.startswith("reward/")}
        evaluated = {
            key.removeprefix("eval/").removesuffix("/accuracy"): v
            for key, v in values.items()
            if key.startswith("eval/") and key.endswith("/accuracy")
        }
        self.accuracies |= evaluated
        return [*self._judge_hit_rate(met_peers=met_peers), *self._judge_evaluation(evaluated)]

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step at the present pace."""
        return None if self.step_time_s is None else max(0, self.total - self.step) * self.step_time_s

    def _meet(self, values: dict[str, float]) -> bool:
        """Take in the row's hit rates, weighted by their prompts; whether it has any."""
        rates = {key: rate for key, rate in values.items() if key.startswith("peer/") and key.endswith("/hit_rate")}
        if not rates:
            return False
        prompts = {key: values.get(key.replace("/hit_rate", "/prompts"), 1.0) for key in rates}
        self._meetings.append((sum(rates[key] * prompts[key] for key in rates), sum(prompts.values())))
        self.hit_rate = sum(hits for hits, _ in self._meetings) / max(sum(count for _, count in self._meetings), 1.0)
        return True

    def _judge_hit_rate(self, *, met_peers: bool) -> list[str]:
        low = met_peers and self.hit_rate is not None and self.hit_rate < LOW_HIT_RATE
        self._low_hit_rate_steps = self._low_hit_rate_steps + 1 if low else 0
        if self._low_hit_rate_steps < LOW_HIT_RATE_STEPS or "hit_rate" in self._warned:
            return []
        self._warned.add("hit_rate")
        return [
            f"{self.name} met its peers on only {self.hit_rate:.0%} of its prompts for {LOW_HIT_RATE_STEPS} steps: "
            'sharing has little effect; schedule = "follow" or a larger sharing.window helps agents of unequal speed'
        ]

    def _judge_evaluation(self, evaluated: dict[str, float]) -> list[str]:
        warnings = []
        for task, accuracy in evaluated.items():
            best = self._best[task] = max(accuracy, self._best.get(task, accuracy))
            if accuracy < best - EVALUATION_FALL and task not in self._warned:
                self._warned.add(task)
                warnings.append(
                    f"{self.name} has fallen on {task}: accuracy {accuracy:.2f}, it was {best:.2f}; sharing may be "
                    "harming it (compare with an isolated run)"
                )
        return warnings
