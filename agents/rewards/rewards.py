"""All reward functions of one agent, as one scorer.

Shape legend: B completions.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from agents.errors import RewardError
from agents.rewards.functions import RewardCallable, RewardFunction, find_reward, source_digest
from agents.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """total [B]: float32, the weighted sum over the functions that did not abstain; NaN where all did.

    by_function: name -> [B], unweighted, NaN where that function abstained.
    """

    total: npt.NDArray[np.float32]
    by_function: Mapping[str, npt.NDArray[np.float32]]


class Rewards:
    """Reward functions and their weights (default: all 1).

    functions: built-in names, import strings or callables. policy: the agent's name, handed to functions that ask for it.
    A function that raises (SystemExit and KeyboardInterrupt too), answers with the wrong length or with something that is
    no number raises RewardError with its name: a sample whose judge failed has no reward, and never the reward 0.
    """

    def __init__(
        self,
        functions: Sequence[str | RewardCallable],
        weights: Sequence[float] | None = None,
        *,
        policy: str | None = None,
    ) -> None:
        self._functions = [find_reward(function) for function in functions]
        self._policy = policy
        self.names = tuple(function.name for function in self._functions)
        self.weights = tuple(1.0 for _ in functions) if weights is None else tuple(float(weight) for weight in weights)
        if not self.names:
            raise RewardError("`functions` must have at least one reward function, got functions=()")
        if len(set(self.names)) < len(self.names):
            raise RewardError(f"reward functions must have different names, got {', '.join(self.names)}")
        if len(self.weights) != len(self.names):
            raise RewardError(f"`weights` must have one weight per function ({len(self.names)}), got {len(self.weights)}")
        # A function that looks at the policy may judge equal texts of two agents differently.
        digests = [
            [source_digest(function.call), policy if "policy" in function.named else None] for function in self._functions
        ]
        self.fingerprint = hashlib.sha256(msgspec.json.encode([self.names, self.weights, digests])).hexdigest()[:32]

    def check_columns(self, prompts: Sequence[Prompt]) -> None:
        """Raise RewardError when a function needs a column that a prompt does not have; call it before any generation."""
        for function in self._functions:
            for prompt in prompts:
                missing = [name for name in function.requires if name not in prompt.columns]
                if missing:
                    raise RewardError(
                        f"reward {function.name!r} needs column {missing[0]!r}, which prompt {prompt.id} of task "
                        f"{prompt.task!r} does not have; it has {', '.join(sorted(prompt.columns)) or 'none'}; the prompt "
                        f"begins {prompt.text[:60]!r}"
                    )

    async def score(self, prompts: Sequence[Prompt], texts: Sequence[bytes]) -> Scores:
        """Score one text per prompt (repeat a prompt for each of its completions).

        Waits for the functions, one after the other; sync ones run in a thread, so that heartbeats go on. A cancelled
        call leaves at most one such thread running to its end. Different tasks may call at the same time as far as the
        functions allow it. Bytes that are no UTF-8 (a text cut within a character) reach the functions as U+FFFD.
        """
        if len(prompts) != len(texts):
            raise RewardError(f"`texts` must have one text per prompt ({len(prompts)}), got {len(texts)}")
        by_function = {function.name: await self._call(function, prompts, texts) for function in self._functions}
        return Scores(total=self._combine(by_function), by_function=by_function)

    async def _call(
        self, function: RewardFunction, prompts: Sequence[Prompt], texts: Sequence[bytes]
    ) -> npt.NDArray[np.float32]:
        if inspect.iscoroutinefunction(function.call):
            answer, raised = self._outcome(function, prompts, texts)
        else:
            answer, raised = await asyncio.to_thread(self._outcome, function, prompts, texts)
        if inspect.isawaitable(answer):
            try:
                answer = await answer
            except (Exception, SystemExit, KeyboardInterrupt) as error:  # but not a cancellation: that one is ours
                raised = error
        if raised is not None:
            raise RewardError(f"reward {function.name!r} raised {type(raised).__name__}: {raised}") from raised
        return _checked(function.name, answer, len(prompts))

    def _outcome(
        self, function: RewardFunction, prompts: Sequence[Prompt], texts: Sequence[bytes]
    ) -> tuple[object, BaseException | None]:
        """What the function gave and what it raised.

        A user's code may raise anything, and a value is all that leaves the thread whole: no future carries a
        StopIteration, and a SystemExit or KeyboardInterrupt would end the event loop.
        """
        try:
            answer: object = function.call(**self._arguments(function, prompts, texts))
            return (list(answer) if isinstance(answer, Iterator) else answer), None
        except BaseException as error:
            return None, error

    def _arguments(self, function: RewardFunction, prompts: Sequence[Prompt], texts: Sequence[bytes]) -> dict[str, object]:
        """What the function takes of all that it can ask for; a column that only some rows have is None in the others.

        Made anew for each call, every row's values copied: what a function does to them changes neither the data nor
        another row or function.
        """
        columns = dict.fromkeys(name for prompt in prompts for name in prompt.columns if function.takes(name))
        arguments: dict[str, object] = {name: [deepcopy(prompt.columns.get(name)) for prompt in prompts] for name in columns}
        if function.takes("prompts"):
            arguments["prompts"] = [_prompt_argument(prompt) for prompt in prompts]
        if function.takes("completions"):
            arguments["completions"] = [
                _completion_argument(prompt, text.decode(errors="replace")) for prompt, text in zip(prompts, texts, strict=True)
            ]
        if function.takes("policy"):
            arguments["policy"] = self._policy
        return arguments

    def _combine(self, by_function: Mapping[str, npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
        values = np.stack([by_function[name] for name in self.names]).astype(np.float64)
        weighted = np.nansum(values * np.array(self.weights)[:, None], axis=0).astype(np.float32)
        return np.where(np.isnan(values).all(axis=0), np.float32(math.nan), weighted)


def _prompt_argument(prompt: Prompt) -> object:
    if not prompt.conversational:
        return prompt.text
    return [{"role": message.role, "content": message.content} for message in prompt.messages]


def _completion_argument(prompt: Prompt, text: str) -> object:
    return [{"role": "assistant", "content": text}] if prompt.conversational else text


def _checked(name: str, answer: object, count: int) -> npt.NDArray[np.float32]:
    try:
        values = list(answer)  # type: ignore[call-overload]
    except Exception:
        raise RewardError(f"reward {name!r} must return a list of {count} numbers, got {type(answer).__name__}") from None
    if len(values) != count:
        raise RewardError(f"reward {name!r} must return one number per completion ({count}), got {len(values)}")
    try:
        scores = np.array([math.nan if value is None else float(value) for value in values], dtype=np.float32)
    except Exception as error:  # a number too large, a tensor of several
        raise RewardError(f"reward {name!r} must return numbers or None, got {values!r:.200}") from error
    unusable = ~np.isfinite(scores) & np.array([value is not None for value in values], dtype=bool)
    if unusable.any():
        row = int(unusable.argmax())
        raise RewardError(f"reward {name!r} must return finite numbers or None, got {values[row]!r} in row {row}")
    return scores
