"""All reward functions of one agent, as one scorer.

Shape legend: B completions.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from agents.errors import RewardError
from agents.rewards.arguments import row_arguments
from agents.rewards.config import SandboxedReward
from agents.rewards.functions import ALWAYS_SANDBOXED, OWN_VIEW, RewardCallable, RewardFunction, Signature, find_reward
from agents.rewards.judging import Call, Failed, Journal, TrainerState, Verdict, awaited, begin, verdicts
from agents.rewards.sandbox import Sandbox
from agents.types import Prompt

logger = logging.getLogger(__name__)

Reference = str | SandboxedReward | RewardCallable


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """total [B]: float32, the weighted sum over the functions that did not abstain; NaN where all did.

    by_function: name -> [B], unweighted, NaN where that function abstained. extra: column -> [B], as logged by functions.
    """

    total: npt.NDArray[np.float32]
    by_function: Mapping[str, npt.NDArray[np.float32]]
    extra: Mapping[str, Sequence[object]]


class Judge(Protocol):
    """A reward function, wherever it runs."""

    @property
    def signature(self) -> Signature: ...

    async def judge(self, call: Call, journal: Journal) -> list[Verdict]: ...

    def close(self) -> None: ...


class Rewards:
    """Reward functions and their weights (default: all 1).

    functions: built-in names, import strings, callables, or SandboxedReward. policy: the agent's name, handed to functions
    that ask for it. A function fails on a completion when it raises (SystemExit and KeyboardInterrupt too), answers with
    the wrong length or with something that is no number, or, in a process of its own, ends it or takes too long. on_error:
    such a failure raises RewardError with the function's name, or is logged, counted and taken as abstaining; a sample
    whose judge failed never has the reward 0 for it.
    """

    def __init__(
        self,
        functions: Sequence[Reference],
        weights: Sequence[float] | None = None,
        *,
        policy: str | None = None,
        on_error: Literal["raise", "abstain"] = "raise",
    ) -> None:
        self.weights = tuple(1.0 for _ in functions) if weights is None else tuple(float(weight) for weight in weights)
        if not functions:
            raise RewardError("`functions` must have at least one reward function, got functions=()")
        if len(self.weights) != len(functions):
            raise RewardError(f"`weights` must have one weight per function ({len(functions)}), got {len(self.weights)}")
        self._policy = policy
        self._on_error = on_error
        self._state = TrainerState()
        self._failures: Counter[str] = Counter()
        self._logged = Journal()
        self._judges: list[Judge] = []
        try:
            thread = asyncio.Lock()
            self._judges += (_judge_of(function, thread) for function in functions)
            self.names = tuple(judge.signature.name for judge in self._judges)
            if len(set(self.names)) < len(self.names):
                raise RewardError(f"reward functions must have different names, got {', '.join(self.names)}")
        except RewardError:
            self.close()
            raise
        # Functions that look at the policy, its tokens or its progress may judge equal texts of two agents differently.
        digests = [[each.digest, policy if each.named & OWN_VIEW else None] for each in self._signatures()]
        self.fingerprint = hashlib.sha256(msgspec.json.encode([self.names, self.weights, digests])).hexdigest()[:32]

    def close(self) -> None:
        """End the processes of sandboxed functions; the end of this process does so too."""
        for judge in self._judges:
            judge.close()

    @property
    def takes_ids(self) -> bool:
        """Whether a function asks for `completion_ids`."""
        return any(signature.takes("completion_ids") for signature in self._signatures())

    def begin_step(self, step: int, *, steps: int) -> None:
        """Say which step of how many the coming calls belong to: the functions' `trainer_state`."""
        self._state = TrainerState(global_step=step, max_steps=steps)

    def check_columns(self, prompts: Sequence[Prompt]) -> None:
        """Raise RewardError when a function needs a column that a prompt does not have; call it before any generation."""
        for signature in self._signatures():
            for prompt in prompts:
                missing = [name for name in signature.requires if prompt.column_for(name) is None]
                if missing:
                    raise RewardError(
                        f"reward {signature.name!r} needs column {missing[0]!r}, which prompt {prompt.id} of task "
                        f"{prompt.task!r} does not have; it has {', '.join(sorted(prompt.columns)) or 'none'}; the prompt "
                        f"begins {prompt.text[:60]!r}"
                    )

    async def score(
        self, prompts: Sequence[Prompt], texts: Sequence[bytes], *, ids: Sequence[npt.NDArray[np.int32] | None] | None = None
    ) -> Scores:
        """Score one text per prompt (repeat a prompt for each of its completions).

        ids: the policy's tokens of each text, for functions that ask for `completion_ids` (None where they are not known).
        Waits for all functions. Async and sandboxed ones run at the same time, the others beside them in a thread, one
        after the other, so that heartbeats go on; a cancelled call leaves at most one such thread running to its end.
        Different tasks may call at the same time as far as the functions allow it. Bytes that are no UTF-8 (a text cut
        within a character) reach the functions as U+FFFD.
        """
        if len(prompts) != len(texts):
            raise RewardError(f"`texts` must have one text per prompt ({len(prompts)}), got {len(texts)}")
        if not prompts:
            nothing = np.empty(0, dtype=np.float32)
            return Scores(total=nothing, by_function=dict.fromkeys(self.names, nothing), extra={})
        journal = Journal()
        calls = await asyncio.to_thread(self._calls, prompts, texts, ids)
        async with asyncio.TaskGroup() as group:
            judged = [group.create_task(judge.judge(call, journal)) for judge, call in zip(self._judges, calls, strict=True)]
        by_function = {name: self._checked(name, task.result()) for name, task in zip(self.names, judged, strict=True)}
        self._logged.merge(Journal(metrics=journal.metrics))
        return Scores(total=self._combine(by_function), by_function=by_function, extra=journal.extra)

    def take(self) -> dict[str, float]:
        """Metrics since the last call: completions without a verdict per function, and what functions logged, averaged."""
        metrics = {f"rewards/{name}/error": float(self._failures[name]) for name in self.names if self._on_error == "abstain"}
        metrics |= {name: sum(values) / len(values) for name, values in self._logged.metrics.items()}
        self._failures, self._logged = Counter(), Journal()
        return metrics

    def _calls(
        self, prompts: Sequence[Prompt], texts: Sequence[bytes], ids: Sequence[npt.NDArray[np.int32] | None] | None
    ) -> list[Call]:
        return [
            Call(
                completions=len(texts),
                rows=row_arguments(signature, prompts, texts, ids),
                policy=self._policy,
                state=self._state,
            )
            for signature in self._signatures()
        ]

    def _signatures(self) -> list[Signature]:
        return [judge.signature for judge in self._judges]

    def _checked(self, name: str, judged: Sequence[Verdict]) -> npt.NDArray[np.float32]:
        failures = [verdict for verdict in judged if isinstance(verdict, Failed)]
        if failures:
            first = failures[0]
            if self._on_error == "raise":
                raise RewardError(f"reward {name!r} {first.reason}") from first.cause
            self._failures[name] += len(failures)
            logger.warning(
                "reward %r abstains from %d of %d completions: it %s", name, len(failures), len(judged), first.reason
            )
        return np.array(
            [math.nan if verdict is None or isinstance(verdict, Failed) else verdict for verdict in judged], dtype=np.float32
        )

    def _combine(self, by_function: Mapping[str, npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
        values = np.stack([by_function[name] for name in self.names]).astype(np.float64)
        weighted = np.nansum(values * np.array(self.weights)[:, None], axis=0).astype(np.float32)
        return np.where(np.isnan(values).all(axis=0), np.float32(math.nan), weighted)


def find_signature(reference: Reference) -> Signature:
    """What is known of a reward function without calling it; RewardError when it cannot be had."""
    judge = _judge_of(reference, asyncio.Lock())
    judge.close()
    return judge.signature


class _InProcess:
    """A function in the agent's own process: async ones on the event loop, others in a thread, one at a time."""

    def __init__(self, function: RewardFunction, thread: asyncio.Lock) -> None:
        self._function = function
        self._thread = thread
        self.signature = function.signature

    async def judge(self, call: Call, journal: Journal) -> list[Verdict]:
        if inspect.iscoroutinefunction(self._function.call):
            outcomes = begin(self._function, call, journal)
        else:
            async with self._thread:
                outcomes = await asyncio.to_thread(begin, self._function, call, journal)
        return verdicts(self._function, await awaited(outcomes), call)

    def close(self) -> None:
        pass


def _judge_of(reference: Reference, thread: asyncio.Lock) -> Judge:
    if isinstance(reference, str) and reference in ALWAYS_SANDBOXED:
        reference = SandboxedReward(sandbox=reference)
    return Sandbox(reference) if isinstance(reference, SandboxedReward) else _InProcess(find_reward(reference), thread)
