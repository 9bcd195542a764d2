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

    def cpu_s(self) -> float:
        """Seconds of processor time that it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def hub_child(at: Path, *, endpoint: str | None = None, directory: Path | None = None, **config: object) -> Iterator[HubChild]:
    """A hub in a process of its own, killed in the end. at: a directory for its standard error. endpoint: a new ipc path
    unless given."""
    own = None if endpoint else exchange.private_ipc_dir()
    endpoint = endpoint or f"ipc://{own}/hub"
    errors = at / "stderr"
    arguments = [sys.executable, str(HUB), endpoint, str(directory or ""), json.dumps(config)]
    with errors.open("ab") as stderr:
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        assert said[:1] == ["ready"], errors.read_text()
        yield HubChild(process=process, endpoint=said[1], errors=errors)
    finally:
        process.kill()
        process.wait()
        if own is not None:
            exchange.endpoints.remove_private_dir(endpoint)
