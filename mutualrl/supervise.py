"""The supervisor: starts a run's processes, watches them, and ends them in order, whatever happens.

    start    hub and agents at once; an agent's HELLO waits for the hub
    watch    until all agents are done, one of them or the hub fails, or a signal asks for the end
    drain    SIGTERM to the agents: they finish the step, save, leave         at most `drain_s`
    end      SIGTERM, then SIGKILL, to the process groups of what is left     `leave_s` each
    hub      last of all, so that the agents' last words arrive; it saves its statistics

A second SIGINT, SIGTERM or SIGHUP skips what is left of the waiting. Every agent is essential: one that fails ends the
run, and so does one that ends without a final checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from mutualrl import exit_codes
from mutualrl.config import Run
from mutualrl.last_words import describe_failure
from mutualrl.manifest import Manifest, Role, Status, now
from mutualrl.rundir import RunDir
from mutualrl.spawn import DeathPipe, RoleProcess, spawn

HUB = "hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long the stages of the end may take, in seconds."""

    drain_s: float
    leave_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended. failure: None, or what is to be shown: who failed, how, and its traceback."""

    status: Status
    exit_code: int
    failure: str | None = None


def role_command(run_dir: RunDir, role: str) -> list[str]:
    """Python's arguments for a role of this run."""
    which = [HUB, str(run_dir.path)] if role == HUB else ["agent", str(run_dir.path), role]
    return ["-m", "mutualrl.roles", *which]


class Supervisor:
    """Owns every process of one run. Use one instance for one run; `run` may be called once, `interrupt` at any time.

    tell: receives one line for each thing that a person should know. before_hub: awaited when the agents have ended and
    the hub is still there. command: arguments of a role's process.
    """

    def __init__(
        self,
        run: Run,
        run_dir: RunDir,
        manifest: Manifest,
        *,
        tell: Callable[[str], None],
        before_hub: Callable[[], Awaitable[None]] | None = None,
        deadlines: Deadlines | None = None,
        command: Callable[[RunDir, str], list[str]] = role_command,
    ) -> None:
        self._run = run
        self._run_dir = run_dir
        self._manifest = manifest
        self._tell = tell
        self._before_hub = before_hub
        self._deadlines = deadlines or Deadlines(drain_s=run.drain_s)
        self._command = command
        self._ends: dict[RoleProcess, asyncio.Task[int]] = {}
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._signal: int | None = None
        self._failure: Outcome | None = None

    async def run(self) -> Outcome:
        """Run to the end and say how it ended. Cancelled, it kills what it started before it raises."""
        pipe = DeathPipe()
        try:
            with self._signals():
                await self._start(pipe)
                await self._watch()
                await self._end()
        finally:
            await _uncancelled(self._reap())
            pipe.close()
            outcome = self._outcome()
            self._record(outcome.status, exit_code=outcome.exit_code, ended=now())
        return outcome

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """First call: drain and end. Second call: end now."""
        if self._signal is not None:
            self._tell("ending now")
            self._hurry.set()
            return
        self._signal = number
        self._tell("stopping: agents finish their step and save; once more to end now")
        self._stop.set()

    def fail(self, reason: str) -> None:
        """End the run as failed for a reason that lies outside its processes' exit codes."""
        self._failure = self._failure or Outcome(status="failed", exit_code=exit_codes.RUN_FAILED, failure=reason)
        self._stop.set()

    async def _reap(self) -> None:
        """Kill and wait for what is left. The tasks that wait for the roles may have been cancelled with everything."""
        for role, end in self._ends.items():
            if not end.done() or end.cancelled():
                role.signal_group(signal.SIGKILL)
        await asyncio.gather(*(role.process.wait() for role in self._ends))

    async def _start(self, pipe: DeathPipe) -> None:
        for name in (HUB, *self._run.agents):
            threads = 1 if name == HUB else self._run.agents[name].threads
            role = await spawn(
                name, self._command(self._run_dir, name), log=self._run_dir.log(name), death_pipe=pipe, threads=threads
            )
            self._ends[role] = asyncio.create_task(role.wait())
        self._record("running")

    async def _watch(self) -> None:
        agents = {role for role in self._ends if role.name != HUB}
        stop = asyncio.create_task(self._stop.wait())
        seen: set[RoleProcess] = set()
        while not self._stop.is_set() and not agents <= seen:
            waiting = [end for role, end in self._ends.items() if role not in seen]
            await asyncio.wait([stop, *waiting], return_when=asyncio.FIRST_COMPLETED)
            for role, end in self._ends.items():
                if end.done() and role not in seen:
                    seen.add(role)
                    self._judge(role, end.result())
        stop.cancel()

    def _judge(self, role: RoleProcess, code: int) -> None:
        """A role has ended before it was asked to: an agent that is done, or the run's failure."""
        if self._stop.is_set():
            return
        if role.name != HUB and code == exit_codes.DONE and self._run_dir.final_checkpoint(role.name).is_dir():
            self._tell(f"{role.name} is done")
            self._record("running")
            return
        self._failure = Outcome(
            status="failed",
            exit_code=exit_codes.BAD_CONFIG if code == exit_codes.BAD_CONFIG else exit_codes.RUN_FAILED,
            failure=describe_failure(role.name, code, role.log),
        )
        self._stop.set()

    async def _end(self) -> None:
        await self._end_roles([role for role in self._ends if role.name != HUB], self._deadlines.drain_s)
        if self._before_hub is not None:
            await self._before_hub()
        await self._end_roles([role for role in self._ends if role.name == HUB], self._deadlines.leave_s)

    async def _end_roles(self, roles: Iterable[RoleProcess], patience_s: float) -> None:
        left = self._running(roles)
        for role in left:
            role.ask_to_stop()
        left = await self._left_after(left, patience_s)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for role in left:
                self._tell(f"{role.name} has not left; sending {number.name}")
                role.signal_group(number)
            left = await self._left_after(left, self._deadlines.leave_s)

    def _running(self, roles: Iterable[RoleProcess]) -> list[RoleProcess]:
        return [role for role in roles if not self._ends[role].done()]

    async def _left_after(self, roles: list[RoleProcess], patience_s: float) -> list[RoleProcess]:
        """Wait for these roles to end, at most this long and not once in a hurry; those that have not."""
        if roles and not self._hurry.is_set():
            hurry = asyncio.create_task(self._hurry.wait())
            everyone = asyncio.create_task(asyncio.wait([self._ends[role] for role in roles]))
            waiting: list[asyncio.Task[Any]] = [hurry, everyone]
            await asyncio.wait(waiting, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            everyone.cancel()
        return self._running(roles)

    def _outcome(self) -> Outcome:
        if self._failure is not None:
            return self._failure
        if self._signal is not None:
            return Outcome(status="stopped", exit_code=exit_codes.of_signal(self._signal))
        if all(role.exit_code == exit_codes.DONE for role in self._ends if role.name != HUB):
            return Outcome(status="done", exit_code=exit_codes.DONE)
        return Outcome(status="failed", exit_code=exit_codes.RUN_FAILED, failure="the run was cut off")

    def _record(self, status: Status, *, exit_code: int | None = None, ended: str | None = None) -> None:
        roles = tuple(Role(name=role.name, pid=role.pid, exit_code=role.exit_code) for role in self._ends)
        self._manifest = msgspec.structs.replace(
            self._manifest, status=status, pid=os.getpid(), roles=roles, exit_code=exit_code, ended=ended
        )
        try:
            self._run_dir.write_manifest(self._manifest)
        except OSError as error:  # a full disk must not hide how the run ended
            self._tell(f"warning: {self._run_dir.manifest} could not be written: {error}")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        numbers = exit_codes.ending_signals()
        for number in numbers:
            loop.add_signal_handler(number, self.interrupt, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


async def _uncancelled(work: Coroutine[Any, Any, None]) -> None:
    """Do the work to its end, however often this task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    task.result()
