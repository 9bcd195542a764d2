"""Runs a command line of mutualrl as a process that this one waits for, and that gets this one's signals."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from mutualrl import exit_codes

PROGRAM = (sys.executable, "-m", "mutualrl")
_PR_SET_PDEATHSIG = 1


def run_command(arguments: Sequence[str], *, program: Sequence[str] = PROGRAM) -> int:
    """Run `mutualrl ARGUMENTS` as a process of its own and return its exit code.

    It lives in its own session, so that Ctrl-C reaches it once, through here; SIGINT, SIGTERM and SIGHUP are passed
    on, and it is told to stop when this process dies.
    """
    with _signals_noted() as noted:
        process = subprocess.Popen(
            [*program, *arguments],
            start_new_session=True,
            preexec_fn=_follow_parent if sys.platform == "linux" else None,
        )
        noted.pass_on_to(process)
        code = process.wait()
    if noted.numbers:
        return exit_codes.of_signal(noted.numbers[0])
    return code if code >= 0 else exit_codes.of_signal(-code)


class _NotedSignals:
    """Signals that came, kept in order, and sent on to a process as soon as there is one."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        self.numbers.append(number)
        if self._process is not None:
            self._process.send_signal(number)

    def pass_on_to(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        for number in self.numbers:
            process.send_signal(number)


@contextmanager
def _signals_noted() -> Iterator[_NotedSignals]:
    noted = _NotedSignals()
    before = {number: signal.signal(number, noted.note) for number in exit_codes.ending_signals()}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
