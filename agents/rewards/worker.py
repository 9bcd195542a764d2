"""The process of one sandboxed reward function: reads calls from its standard input, writes verdicts to its standard output.

Its function runs on the main thread, so that alarms work there. Another thread reads; when the agent is gone, which closes
the pipe, it ends this process and all that it has started, whatever the main thread does. What the function prints goes
to the agent's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import resource
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue

import msgspec

from agents.errors import RewardError
from agents.rewards.functions import RewardFunction, find_reward
from agents.rewards.judging import Call, Failed, Journal, awaited, begin, verdicts
from agents.rewards.wire import LENGTH, Broken, Described, Judged, Limits, encode


def main() -> None:
    """Serve until the agent closes the pipe."""
    # Private copies, which no child inherits; a function that reads or prints must not meet the messages.
    questions, answers = os.dup(0), os.dup(1)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    inbox: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(questions, inbox), name="questions", daemon=True).start()
    limits = msgspec.msgpack.decode(inbox.get(), type=Limits)
    with contextlib.suppress(ValueError, OSError):  # not every system has these limits
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        function = find_reward(limits.reference)
    except RewardError as error:
        _write(answers, encode(Broken(reason=str(error))))
        return
    signature = asdict(function.signature) | {"named": sorted(function.signature.named)}
    _write(answers, encode(msgspec.convert(signature, Described)))
    runner = asyncio.Runner()  # one event loop for all calls, made by the first that needs it
    while True:
        call = msgspec.msgpack.decode(inbox.get(), type=Call)
        _limit_cpu(limits.timeout_s)
        _write(answers, _judge(function, call, runner))


def _judge(function: RewardFunction, call: Call, runner: asyncio.Runner) -> bytes:
    journal = Journal()
    outcomes = begin(function, call, journal)
    if any(map(inspect.isawaitable, outcomes)):
        outcomes = runner.run(awaited(outcomes))
    judged = verdicts(function, outcomes, call)
    plain = [verdict.reason if isinstance(verdict, Failed) else verdict for verdict in judged]
    try:
        return encode(Judged(verdicts=plain, extra=journal.extra, metrics=journal.metrics))
    except (TypeError, ValueError, OverflowError) as error:
        return encode(Broken(reason=f"logged what cannot be sent: {error}"))


def _limit_cpu(seconds: float) -> None:
    """Behind the agent's own deadline, so that a worker whose agent cannot act ends too."""
    most = math.ceil(time.process_time() + seconds) + 1
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _read(questions: int, inbox: SimpleQueue[bytes]) -> None:
    with open(questions, "rb") as stream:
        while len(header := stream.read(LENGTH.size)) == LENGTH.size:
            inbox.put(stream.read(*LENGTH.unpack(header)))
    os.killpg(os.getpid(), signal.SIGKILL)


def _write(answers: int, message: bytes) -> None:
    view = memoryview(message)
    while view:
        view = view[os.write(answers, view) :]
    sys.stdout.flush()
