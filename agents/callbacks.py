"""What a program may want to be told while its policies train; the field's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agents.errors import CallbackError


class Callback:
    """Does nothing; override what you need.

    Every method is called on the thread of the run's event loop, for one policy at a time, so it must be short: while it
    runs, no heartbeat goes out. What it raises ends the run, with the callback's name. policy: whose event it is. step: how
    many steps that policy has made. metrics: by their names, without the policy's.
    """

    def on_train_begin(self, policy: str) -> None:
        """Before the policy's first evaluation and step."""

    def on_step_end(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """After every step, with its metrics."""

    def on_evaluate(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """After every evaluation, with `eval/<task>/…`; at step 0 too."""

    def on_log(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """Whenever metrics are written: those of steps, evaluations and the end."""

    def on_save(self, policy: str, step: int, path: Path) -> None:
        """After every checkpoint, with its directory."""

    def on_train_end(self, policy: str, step: int) -> None:
        """After the policy's last checkpoint, also where the run was stopped; not where it failed."""


class Callbacks(Callback):
    """Tells several, in order; raises CallbackError with the name of the one that failed."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def on_train_begin(self, policy: str) -> None:
        self._tell("on_train_begin", lambda each: each.on_train_begin(policy))

    def on_step_end(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        self._tell("on_step_end", lambda each: each.on_step_end(policy, step, metrics))

    def on_evaluate(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        self._tell("on_evaluate", lambda each: each.on_evaluate(policy, step, metrics))

    def on_log(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        self._tell("on_log", lambda each: each.on_log(policy, step, metrics))

    def on_save(self, policy: str, step: int, path: Path) -> None:
        self._tell("on_save", lambda each: each.on_save(policy, step, path))

    def on_train_end(self, policy: str, step: int) -> None:
        self._tell("on_train_end", lambda each: each.on_train_end(policy, step))

    def _tell(self, event: str, call: Callable[[Callback], None]) -> None:
        for callback in self._callbacks:
            try:
                call(callback)
            except Exception as error:  # a callback is foreign code
                name = type(callback).__name__
                raise CallbackError(f"callback {name!r} failed in {event}: {type(error).__name__}: {error}") from error
