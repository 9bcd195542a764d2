"""Where an agent writes what people read: one JSON object per line, whole lines only."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec


class JsonlSink:
    """Appends to metrics.jsonl, evals.jsonl, rescues.jsonl, coin.jsonl and completions.jsonl of a run directory.

    The agents of a run share these files: every line is one write to a file opened for appending, which the system does
    not interleave. A process killed in the middle leaves at most one torn last line. What JSON does not know is written as
    text.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.lines: Counter[str] = Counter()
        """Lines written by this agent, by file."""

    def metrics(self, line: Mapping[str, object]) -> None:
        self._append("metrics.jsonl", line)

    def evaluation(self, line: Mapping[str, object]) -> None:
        self._append("evals.jsonl", line)

    def rescue(self, line: Mapping[str, object]) -> None:
        self._append("rescues.jsonl", line)

    def trial(self, line: Mapping[str, object]) -> None:
        self._append("coin.jsonl", line)

    def completion(self, line: Mapping[str, object]) -> None:
        self._append("completions.jsonl", line)

    def _append(self, name: str, line: Mapping[str, object]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptor = os.open(self._run_dir / name, flags, 0o644)
        try:
            os.write(descriptor, msgspec.json.encode(line, enc_hook=str) + b"\n")
        finally:
            os.close(descriptor)
        self.lines[name] += 1
