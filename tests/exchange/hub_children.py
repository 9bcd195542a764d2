"""Hubs in processes of their own, and what such a process costs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import exchange
from exchange.endpoints import remove_private_dir

HUB = Path(__file__).with_name("hub_process.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubChild:
    """A hub's process. errors: the file that has its standard error."""

    process: subprocess.Popen[str]
    endpoint: str
    errors: Path

    def rss_bytes(self, field: str = "VmRSS") -> int:
        """What it has in memory now, or with VmHWM at most had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith(field))
        return int(line.split()[1]) << 10

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def start_hub(endpoint: str, errors: Path, *arguments: str) -> subprocess.Popen[str]:
    """The process, which may not be ready yet."""
    with errors.open("ab") as stderr:
        command = [sys.executable, str(HUB), endpoint, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)


@contextmanager
def hub_child(at: Path, *, endpoint: str | None = None, directory: Path | None = None, **config: object) -> Iterator[HubChild]:
    """A hub in a process of its own, killed in the end. at: a directory for its standard error. endpoint: a new ipc path
    unless given."""
    own = None if endpoint else exchange.private_ipc_dir()
    endpoint = endpoint or f"ipc://{own}/hub"
    process = start_hub(endpoint, at / "stderr", str(directory or ""), json.dumps(config))
    try:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        assert said[:1] == ["ready"], (at / "stderr").read_text()
        yield HubChild(process=process, endpoint=said[1], errors=at / "stderr")
    finally:
        process.kill()
        process.wait()
        if own is not None:
            remove_private_dir(endpoint)


@contextmanager
def script_child(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a program and has said a first line; it may be told one. Killed in the end."""
    command = [sys.executable, "-c", script, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
