"""Exit codes of the command line and of every role process.

0 done · 1 the run failed · 2 the configuration, the input or the run directory cannot be used · 128 + N ended by signal N
(130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP: a closed terminal).
"""

from __future__ import annotations

import signal

from mutualrl.errors import ConfigError, InputError, RunDirError

DONE = 0
RUN_FAILED = 1
BAD_CONFIG = 2


def of_signal(number: int) -> int:
    """Exit code of a process that ended because of this signal."""
    return 128 + number


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals that end a run in order; not SIGHUP where it is ignored, as `nohup` has it."""
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hang_up)


def of_error(error: BaseException) -> int:
    """Exit code for an error that reached the top of a process."""
    if isinstance(error, KeyboardInterrupt):
        return of_signal(signal.SIGINT)
    return BAD_CONFIG if isinstance(error, ConfigError | InputError | RunDirError) else RUN_FAILED
