"""`Sandbox`: a reward function in a process of its own, seen from the agent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref

import msgspec

from agents.errors import RewardError
from agents.rewards.config import SandboxedReward
from agents.rewards.functions import Signature
from agents.rewards.judging import Call, Failed, Journal, Verdict
from agents.rewards.wire import LENGTH, MOST_BYTES, Answer, Broken, Described, Judged, Limits, encode

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Longest time that a function's module may take to import."""

_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from agents.rewards.worker import main; main()"


class Sandbox:
    """Starts its process when made, and again after it had to be killed or died.

    Raises RewardError when the function cannot be found there. `close` ends the process; so does the end of this one.
    """

    def __init__(self, settings: SandboxedReward) -> None:
        self._settings = settings
        self._mutex = threading.Lock()  # one call at a time
        self._worker = _Worker(settings)
        self.signature = self._worker.signature

    async def judge(self, call: Call, journal: Journal) -> list[Verdict]:
        """The function's verdicts [B]; waits for its process, at most timeout_s and the time that a new one needs.

        A cancelled call ends the process.
        """
        try:
            answer = await asyncio.to_thread(self._ask, call)
        except asyncio.CancelledError:
            self._worker.kill()
            raise
        if isinstance(answer, Judged) and len(answer.verdicts) == call.completions:
            journal.merge(Journal(extra=answer.extra, metrics=answer.metrics))
            return [Failed(verdict) if isinstance(verdict, str) else verdict for verdict in answer.verdicts]
        reason = answer.reason if isinstance(answer, Broken) else "answered out of turn"
        return [Failed(reason)] * call.completions

    def close(self) -> None:
        """End the process and all that it has started."""
        self._worker.end()

    def _ask(self, call: Call) -> Answer:
        try:
            message = encode(call)
        except (TypeError, ValueError, OverflowError) as error:
            return Broken(reason=f"cannot be asked: {error}")
        with self._mutex:
            try:
                if not self._worker.alive:
                    self._worker.end()
                    self._worker = _Worker(self._settings)
                return self._worker.ask(message, self._settings.timeout_s)
            except _GoneError as gone:
                self._worker.end()
                return Broken(reason=str(gone))
            except RewardError as error:
                return Broken(reason=f"could not be started again: {error}")


class _GoneError(Exception):
    """The process ended, or had to be given up."""


class _Worker:
    """One process, from its start to its end."""

    def __init__(self, settings: SandboxedReward) -> None:
        # Its hashes do not depend on the process, so that what a function makes of sets and dicts is alike everywhere.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {"PYTHONHASHSEED": "0"},
            bufsize=0,
        )
        self.end = weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self._to, self._from):
            os.set_blocking(descriptor, False)
        limits = Limits(reference=settings.sandbox, timeout_s=settings.timeout_s, memory_bytes=settings.memory_bytes)
        try:
            answer = self.ask(encode(limits), START_TIMEOUT_S)
        except _GoneError as gone:
            self.end()
            raise RewardError(f"reward {settings.sandbox!r} cannot be started in a process of its own: it {gone}") from None
        if not isinstance(answer, Described):
            self.end()
            raise RewardError(answer.reason if isinstance(answer, Broken) else f"{settings.sandbox!r} answered out of turn")
        self.signature = Signature(
            name=answer.name,
            named=frozenset(answer.named),
            takes_any=answer.takes_any,
            requires=tuple(answer.requires),
            by_row=answer.by_row,
            digest=answer.digest,
        )

    @property
    def alive(self) -> bool:
        return self.end.alive and self._process.poll() is None

    def kill(self) -> None:
        """End the process from another thread than the one that asks it, which then cleans up."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def ask(self, message: bytes, timeout_s: float) -> Answer:
        """The process's answer. Raises _GoneError when it ends, says what nobody can read, or takes longer than timeout_s."""
        deadline = time.monotonic() + timeout_s
        try:
            view = memoryview(message)
            while view:
                self._wait(self._to, select.POLLOUT, deadline, timeout_s)
                view = view[os.write(self._to, view) :]
            (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline, timeout_s))
            if length > MOST_BYTES:
                raise _GoneError(f"answered with {length} bytes, the most is {MOST_BYTES}")
            return msgspec.msgpack.decode(self._read(length, deadline, timeout_s), type=Answer)
        except msgspec.DecodeError as error:
            raise _GoneError(f"answered with what cannot be read: {error}") from error
        except BrokenPipeError:
            raise _GoneError(self._ended()) from None

    def _read(self, count: int, deadline: float, timeout_s: float) -> bytes:
        received = bytearray()
        while len(received) < count:
            self._wait(self._from, select.POLLIN, deadline, timeout_s)
            piece = os.read(self._from, min(count - len(received), 2**20))
            if not piece:
                raise _GoneError(self._ended())
            received += piece
        return bytes(received)

    def _wait(self, descriptor: int, event: int, deadline: float, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise _GoneError(f"took longer than timeout_s={timeout_s:g} and was ended")

    def _ended(self) -> str:
        """How the process ended: it has closed its pipe, so it is about to, or refuses to."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if code >= 0:
            return f"ended its process with exit code {code}"
        return f"had its process ended by {signal.Signals(-code).name}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole group: what a function has started stays behind when the process itself is dead."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
