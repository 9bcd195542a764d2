"""Exit codes of the command line and of every role process.

0 done · 1 the run failed · 2 the configuration or the run directory cannot be used · 128 + N ended by signal N (130 for
SIGINT, 143 for SIGTERM).
"""

from __future__ import annotations

import signal

from mutualrl.errors import ConfigError, RunDirError

DONE = 0
RUN_FAILED = 1
BAD_CONFIG = 2


def of_signal(number: int) -> int:
    """Exit code of a process that ended because of this signal."""
    return 128 + number


def of_error(error: BaseException) -> int:
    """Exit code for an error that reached the top of a process."""
    if isinstance(error, KeyboardInterrupt):
        return of_signal(signal.SIGINT)
    return BAD_CONFIG if isinstance(error, ConfigError | RunDirError) else RUN_FAILED
