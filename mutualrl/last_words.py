"""What a failed role printed last: its traceback, or the end of its log."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from mutualrl import exit_codes

_TAIL_BYTES = 64 * 1024
_MOST_LINES = 80
_WITHOUT_TRACEBACK = 15


def describe_failure(role: str, exit_code: int, log: Path) -> str:
    """Who failed, how, where its log is, and the last traceback in it."""
    return f"{role} {_how(exit_code)}; its log is {log}\n{last_words(log)}".rstrip()


def last_words(log: Path) -> str:
    """The tail of a log from the first traceback in it on; without one, the last lines."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()[-_MOST_LINES:]
    except FileNotFoundError:
        return ""
    for index, line in enumerate(lines):
        if "Traceback (most recent call last)" in line:
            return "\n".join(lines[index:])
    return "\n".join(lines[-_WITHOUT_TRACEBACK:])


def _how(exit_code: int) -> str:
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"
    if exit_code == exit_codes.BAD_CONFIG:
        return "cannot use its configuration"
    return "failed" if exit_code else "ended before its time"
