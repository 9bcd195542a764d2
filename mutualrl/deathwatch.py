"""The first acts of a role process: it must not outlive the supervisor that started it, however that one ends.

Two means, for each has a gap. The death pipe's write end lives in the supervisor alone, so its end closes the pipe; a
thread waits for that, and works even when the main thread is stuck in C code. PDEATHSIG is the kernel's own, asks for a
drain at once, but fires when the supervisor's *thread* ends, so it is used only when that was its main thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

ORPHANED = signal.SIGHUP
"""What a role receives when its supervisor is gone: drain, and leave nothing behind, for nobody else will end it."""

_PR_SET_PDEATHSIG = 1


def arm(*, death_fd: int, supervisor_pid: int | None, grace_s: float = 1.0, last_act: Callable[[], None] | None = None) -> None:
    """Watch the supervisor for the rest of this process's life.

    death_fd: read end of the death pipe. supervisor_pid: set PDEATHSIG and leave at once if the parent is no longer
    this process; None leaves PDEATHSIG alone. grace_s: from the signal that begins the drain to the end of this
    process and its group. last_act: what even a role that does not drain in time must still do.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an ignored SIGCHLD is inherited and loses children's exit codes
    os.set_inheritable(death_fd, False)
    threading.Thread(target=_watch, args=(death_fd, grace_s, last_act), name="deathwatch", daemon=True).start()
    if supervisor_pid is not None and sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, ORPHANED)
        if os.getppid() != supervisor_pid:
            end_group()


def end_group() -> None:
    """Kill this process and all that it started; a process that leads no group of its own ends alone."""
    if os.getpgrp() == os.getpid():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _watch(death_fd: int, grace_s: float, last_act: Callable[[], None] | None) -> None:
    while os.read(death_fd, 1):
        pass
    os.kill(os.getpid(), ORPHANED)
    time.sleep(grace_s)
    if last_act is not None:
        with contextlib.suppress(OSError):
            last_act()
    end_group()
