"""One reward function: found by name or import string, and what its signature says.

Two conventions, told apart by the arguments' names. TRL's function is called once for all completions:
`f(prompts, completions, **columns) -> list[float | None]`. One that names `completion` (verifiers) or `solution_str` (verl's
`compute_score`) is called once for each and returns one number. Both may be async; None abstains.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agents.errors import RewardError

RewardCallable = Callable[..., Any]

GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "policy")
"""What every call can have beside the columns of the data."""

GIVEN_BY_ROW = ("prompt", "completion", "solution_str", "data_source", "extra_info", "task")
"""What a call for one completion can have besides; of the last three a column of that name comes first."""

NAMED_ONLY = ("completion_ids", "trainer_state", "log_extra", "log_metric", "policy")
"""What `**kwargs` does not ask for: ids, state and policy may make agents judge equal texts differently."""

OWN_VIEW = frozenset({"completion_ids", "trainer_state", "policy"})

BUILT_IN: Mapping[str, str] = {
    "exact_match": "agents.rewards.built_in:exact_match",
    "first_line_match": "agents.rewards.built_in:first_line_match",
    "contains_answer": "agents.rewards.built_in:contains_answer",
    "accuracy_reward": "agents.rewards.maths:accuracy_reward",
    "reasoning_gym": "agents.rewards.gym:reasoning_gym",
}

ALWAYS_SANDBOXED = frozenset({"accuracy_reward", "reasoning_gym"})
"""Built-in functions that parse mathematics out of what a model wrote: it can take for ever, and their alarms need a main
thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What is known of a function without calling it.

    named: arguments that it names. takes_any: it has `**kwargs`. requires: columns without which it cannot run.
    by_row: it is called for one completion at a time. digest: of its source (see `source_digest`).
    """

    name: str
    named: frozenset[str]
    takes_any: bool
    requires: tuple[str, ...]
    by_row: bool
    digest: str

    def takes(self, name: str) -> bool:
        """Whether the signature takes that argument; those of NAMED_ONLY only where they are named."""
        return name in self.named or (self.takes_any and name not in NAMED_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A callable and its signature."""

    call: RewardCallable
    signature: Signature


def find_reward(reference: str | RewardCallable) -> RewardFunction:
    """The reward function of that built-in name, of that import string `package.module:function`, or the callable itself.

    Raises RewardError when there is none, it cannot be imported, or its arguments cannot be passed by name.
    """
    call = _resolve(reference) if isinstance(reference, str) else reference
    if not callable(call):
        raise RewardError(f"reward {reference!r} is not callable, got {type(call).__name__}")
    return RewardFunction(call=call, signature=_signature(call))


def _signature(call: RewardCallable) -> Signature:
    name = getattr(call, "__name__", type(call).__name__)
    try:
        parameters = inspect.signature(call).parameters.values()
    except (ValueError, TypeError) as error:
        raise RewardError(f"the signature of reward {name!r} cannot be read: {error}; wrap it in a function") from error
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise RewardError(f"reward {name!r}: `{parameter.name}` is positional-only; arguments are passed by name")
    usual = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    named = frozenset(parameter.name for parameter in usual)
    by_row = "completions" not in named and bool(named & {"completion", "solution_str"})
    given = {*GIVEN, *(GIVEN_BY_ROW if by_row else ())}
    return Signature(
        name=name,
        named=named,
        takes_any=any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters),
        requires=tuple(each.name for each in usual if each.default is each.empty and each.name not in given),
        by_row=by_row,
        digest=source_digest(call),
    )


def _resolve(reference: str) -> Any:
    module_name, colon, attribute = BUILT_IN.get(reference, reference).partition(":")
    if not colon:
        raise RewardError(
            f"unknown reward {reference!r}; built in are {', '.join(BUILT_IN)}, others go by import string "
            f"'package.module:function'"
        )
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:  # a module's own code runs on import
        raise RewardError(f"reward {reference!r} cannot be imported: {type(error).__name__}: {error}") from error


def source_digest(call: RewardCallable) -> str:
    """SHA-256 of the function's name and of the whole file that it stands in (what it calls there changes it too).

    A function whose behaviour its source does not fix (a closure, an object with state, no source at hand) gets a digest
    that nothing else has: not pooling equal rewards loses a little, pooling unequal ones is wrong.
    """
    unique = secrets.token_hex(32)
    if not inspect.isfunction(call) or call.__closure__ is not None:
        return unique
    try:
        source = inspect.getsource(inspect.getmodule(call) or call)
    except (OSError, TypeError):
        return unique
    return hashlib.sha256(f"{call.__qualname__}\n{source}".encode()).hexdigest()
