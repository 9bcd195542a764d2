"""Starts one role process: own session and process group, own log, death pipe, thread limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class DeathPipe:
    """A pipe whose write end lives in this process only: its reader meets end of file when this process is gone."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()

    def close(self) -> None:
        """End every process that still watches the pipe."""
        os.close(self.read_fd)
        os.close(self._write_fd)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoleProcess:
    """A started role. Its process group has the same number as its process."""

    name: str
    log: Path
    process: asyncio.subprocess.Process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs, -N when signal N ended it."""
        return self.process.returncode

    async def wait(self) -> int:
        """Exit code, once the process has ended; what it left behind in its group is killed then."""
        code = await self.process.wait()
        self.signal_group(signal.SIGKILL)
        return code

    def ask_to_stop(self) -> None:
        """SIGTERM to the role alone: it finishes its step and leaves, while its own children still serve it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the role and everything that it started; none of them left is no error."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


async def spawn(name: str, command: Sequence[str], *, log: Path, death_pipe: DeathPipe, threads: int = 1) -> RoleProcess:
    """Start `python COMMAND --death-fd N [--supervisor-pid P]` as the role `name`.

    Call it from the main thread where that is possible: only then can the role let the kernel tell it of this process's
    end, besides the death pipe. Cancellation leaves no process behind.
    """
    watch = ["--death-fd", str(death_pipe.read_fd)]
    if threading.current_thread() is threading.main_thread():
        watch += ["--supervisor-pid", str(os.getpid())]
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            *watch,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=(death_pipe.read_fd,),
            env=os.environ | _environment(threads),
        )
    return RoleProcess(name=name, log=log, process=process)


def _environment(threads: int) -> dict[str, str]:
    limits = dict.fromkeys(_THREAD_VARIABLES, str(threads))
    return limits | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "TOKENIZERS_PARALLELISM": "false"}
