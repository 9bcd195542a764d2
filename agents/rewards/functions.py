"""One reward function: found by name or import string, called with what its signature accepts, its answer checked.

The convention is TRL's: `f(prompts, completions, **columns) -> list[float | None]`, sync or async; None abstains.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agents.errors import RewardError

RewardCallable = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]

GIVEN = ("prompts", "completions", "policy")
"""What every call can have beside the columns of the data."""


def exact_match(completions: Sequence[object], answer: Sequence[object], **_: object) -> list[float | None]:
    """1.0 where completion and answer are equal but for space around them, else 0.0; None where there is no answer."""
    return [
        None if right is None else float(_text(completion).strip() == str(right).strip())
        for completion, right in zip(completions, answer, strict=True)
    ]


def first_line_match(completions: Sequence[object], answer: Sequence[object], **_: object) -> list[float | None]:
    """1.0 where the completion's first line that is not blank equals the answer but for space around them, else 0.0.

    For base models, which go on with a next question behind their answer. None where there is no answer.
    """
    return [
        None if right is None else float(_text(completion).strip().partition("\n")[0].strip() == str(right).strip())
        for completion, right in zip(completions, answer, strict=True)
    ]


def contains_answer(completions: Sequence[object], answer: Sequence[object], **_: object) -> list[float | None]:
    """1.0 where the answer, less the space around it, stands anywhere in the completion, else 0.0; None without answer."""
    return [
        None if right is None else float(str(right).strip() in _text(completion))
        for completion, right in zip(completions, answer, strict=True)
    ]


def _text(completion: Any) -> str:
    """A completion is text, or for conversational data a list with one message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


BUILT_IN: Mapping[str, RewardCallable] = {
    "exact_match": exact_match,
    "first_line_match": first_line_match,
    "contains_answer": contains_answer,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A callable with what its signature says.

    named: arguments that it names. takes_any: it has `**kwargs`. requires: columns without which it cannot run.
    """

    name: str
    call: RewardCallable
    named: frozenset[str]
    takes_any: bool
    requires: tuple[str, ...]

    def takes(self, name: str) -> bool:
        """Whether the signature takes that argument; `policy` only where it is named."""
        return name in self.named or (self.takes_any and name != "policy")


def find_reward(reference: str | RewardCallable) -> RewardFunction:
    """The reward function of that built-in name, of that import string `package.module:function`, or the callable itself.

    Raises RewardError when there is none, it cannot be imported, or its arguments cannot be passed by name.
    """
    call = _resolve(reference) if isinstance(reference, str) else reference
    if not callable(call):
        raise RewardError(f"reward {reference!r} is not callable, got {type(call).__name__}")
    name = getattr(call, "__name__", type(call).__name__)
    named: set[str] = set()
    requires = []
    takes_any = False
    try:
        signature = inspect.signature(call)
    except (ValueError, TypeError) as error:
        raise RewardError(f"the signature of reward {name!r} cannot be read: {error}; wrap it in a function") from error
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise RewardError(f"reward {name!r}: `{parameter.name}` is positional-only; arguments are passed by name")
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            named.add(parameter.name)
            if parameter.default is parameter.empty and parameter.name not in GIVEN:
                requires.append(parameter.name)
    return RewardFunction(name=name, call=call, named=frozenset(named), takes_any=takes_any, requires=tuple(requires))


def _resolve(reference: str) -> Any:
    if reference in BUILT_IN:
        return BUILT_IN[reference]
    module_name, colon, attribute = reference.partition(":")
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
