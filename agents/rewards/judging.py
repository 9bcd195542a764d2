"""Calling a reward function and checking what it gives, in the agent's process or in one of its own.

Nothing that a function does leaves here as an exception: a completion without a verdict has a `Failed` in its place.
Shape legend: B completions.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agents.rewards.functions import RewardFunction

MOST = (2 - 2**-23) * 2.0**127
"""The greatest float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What a reward function can know of the run's progress, by the names of transformers' TrainerState."""

    global_step: int = 0
    max_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call's arguments. rows: name -> [B] values, one for each completion. completions: B."""

    completions: int
    rows: dict[str, list[object]]
    policy: str | None
    state: TrainerState


@dataclass(frozen=True, slots=True, eq=False)
class Failed:
    """No verdict on a completion. reason: what the function did, to stand behind its name."""

    reason: str
    cause: BaseException | None = None


Verdict = float | None | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """What functions log beside their verdicts. extra: column -> [B] values. metrics: name -> values in order."""

    extra: dict[str, list[object]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        """TRL's `log_metric`: one number, averaged over a step."""
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"`log_metric` takes finite numbers, got {name}={number}")
        self.metrics.setdefault(str(name), []).append(number)

    def merge(self, other: Journal) -> None:
        """Take over what another journal holds."""
        self.extra.update(other.extra)
        for name, values in other.metrics.items():
            self.metrics.setdefault(name, []).extend(values)


def begin(function: RewardFunction, call: Call, journal: Journal) -> list[object]:
    """The outcomes of the function's calls, awaitables of async ones among them; one call for all, or B of them.

    A user's code may raise anything, and a value is all that leaves a thread whole: no future carries a StopIteration,
    and a SystemExit or KeyboardInterrupt would end an event loop.
    """
    signature = function.signature

    def log_extra(column: str, values: Sequence[object]) -> None:
        listed = list(values)
        if len(listed) != call.completions:
            raise ValueError(f"`log_extra` takes one value per completion ({call.completions}), got {len(listed)}")
        journal.extra[str(column)] = listed

    whole: dict[str, object] = {
        "policy": call.policy,
        "trainer_state": call.state,
        "log_extra": log_extra,
        "log_metric": journal.log_metric,
    }
    whole = {name: value for name, value in whole.items() if signature.takes(name)}
    if not signature.by_row:
        return [_outcome(function, call.rows | whole)]
    return [
        _outcome(function, {name: values[row] for name, values in call.rows.items()} | whole) for row in range(call.completions)
    ]


async def awaited(outcomes: Sequence[object]) -> list[object]:
    """The outcomes with every awaitable's own in its place; waits for all at the same time. A cancellation ends them."""
    return await asyncio.gather(*map(_awaited, outcomes))


def verdicts(function: RewardFunction, outcomes: Sequence[object], call: Call) -> list[Verdict]:
    """The verdicts [B] in what the function gave, checked."""
    if function.signature.by_row:
        return [_verdict(_score(outcome), row) for row, outcome in enumerate(outcomes)]
    return _verdicts(outcomes[0], call.completions)


def _outcome(function: RewardFunction, arguments: Mapping[str, object]) -> object:
    try:
        answer: object = function.call(**arguments)
        return list(answer) if isinstance(answer, Iterator) else answer
    except BaseException as error:
        return _raised(error)


async def _awaited(outcome: object) -> object:
    if not inspect.isawaitable(outcome):
        return outcome
    try:
        return await outcome
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # but not a cancellation: that one is ours
        return _raised(error)


def _raised(error: BaseException) -> Failed:
    return Failed(f"raised {type(error).__name__}: {error}", error)


def _score(answer: object) -> object:
    """verl's functions may return a dict, with the number under `score`."""
    return answer["score"] if isinstance(answer, Mapping) and "score" in answer else answer


def _verdicts(answer: object, count: int) -> list[Verdict]:
    if isinstance(answer, Failed):
        return [answer] * count
    try:
        values = list(answer)  # type: ignore[call-overload]
    except Exception:
        return [Failed(f"must return a list of {count} numbers, got {type(answer).__name__}")] * count
    if len(values) != count:
        return [Failed(f"must return one number per completion ({count}), got {len(values)}")] * count
    return [_verdict(value, row) for row, value in enumerate(values)]


def _verdict(value: object, row: int) -> Verdict:
    if value is None or isinstance(value, Failed):
        return value
    try:
        number = float(value)  # type: ignore[arg-type]
    except Exception as error:  # a number too large, a tensor of several
        return Failed(f"must return numbers or None, got {_shown(value)} in row {row}", error)
    if not abs(number) <= MOST:
        return Failed(f"must return finite numbers or None, got {_shown(value)} in row {row}")
    return number


def _shown(value: object) -> str:
    try:
        return f"{value!r:.200}"
    except Exception:
        return f"a {type(value).__name__}"
