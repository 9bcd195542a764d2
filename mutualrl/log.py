"""What crossed a run's exchange, from the records in its directory: a table, or whole records as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from exchange.errors import StorageError, WireError
from exchange.log import LoggedRow, RecordLog
from exchange.types import AgentName, Cursor, PromptId
from mutualrl.errors import RunDirError
from mutualrl.rundir import RunDir

LISTED = 50
WIDEST = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which records. None does not filter; limit: only the newest, None for all (in a table 50)."""

    kinds: Sequence[str] | None = None
    agents: Sequence[str] | None = None
    prompts: Sequence[str] | None = None
    after: int = 0
    limit: int | None = None


def run_log(run: Path, wanted: Wanted, *, as_json: bool = False) -> None:
    """Print the records of a run, the newest last; reads beside a hub that is running.

    Raises RunDirError for a directory that is no run or has no records, and behind the records before it for a damaged one.
    """
    log = _open(run)
    limit = LISTED if wanted.limit is None and not as_json else wanted.limit
    rows = log.rows(
        kinds=wanted.kinds,
        agents=None if wanted.agents is None else [AgentName(agent) for agent in wanted.agents],
        prompt_ids=None if wanted.prompts is None else [PromptId(prompt) for prompt in wanted.prompts],
        after=Cursor(wanted.after),
        limit=limit,
    )
    with _told(run):
        if as_json:
            for row in rows:
                print(as_object(log, row))
        else:
            _print_table(list(rows), limit)


def as_object(log: RecordLog, row: LoggedRow) -> str:
    """A whole record as one JSON object on one line; one that cannot be decoded says why under "error"."""
    what: dict[str, Any] = {"cursor": row.cursor, "time": _utc(row), "kind": row.kind, "bytes": row.nbytes}
    try:
        what["record"] = plain(log.read(row))
    except WireError as error:
        what["error"] = str(error)
    return msgspec.json.encode(what).decode()


def plain(value: Any) -> Any:
    """A value of a record as JSON has it. Arrays become lists; the bytes of texts that stand beside their lengths (`texts`,
    `text_lengths`) become strings, in which bytes that are no UTF-8 are escaped."""
    if isinstance(value, dict):
        return {name: _texts(value, name) or plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def _texts(fields: dict[Any, Any], name: Any) -> list[str] | None:
    content, lengths = fields[name], fields.get(f"{str(name)[:-1]}_lengths")
    if not (isinstance(content, np.ndarray) and isinstance(lengths, np.ndarray)):
        return None
    if content.dtype != np.uint8 or lengths.ndim != 1 or lengths.min(initial=0) < 0 or lengths.sum() != content.size:
        return None
    ends = np.cumsum(lengths)
    pieces = (content[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True))
    return [piece.decode("utf-8", "backslashreplace") for piece in pieces]


def _print_table(rows: Sequence[LoggedRow], limit: int | None) -> None:
    out = Console(highlight=False)
    if not rows:
        out.print("no records", markup=False)
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in ("cursor", "time", "kind", "agent", "step", "version", "prompt", "bytes"):
        table.add_column(column, justify="right" if column in ("step", "version", "bytes") else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.cursor),
            _local(row),
            row.kind,
            row.agent,
            str(row.step),
            f"{row.version.epoch}.{row.version.step}",
            _prompt(row.prompt_ids),
            f"{row.nbytes:,}",
        )
    # As wide as it is: a cursor or an id that was cut off would be of no use.
    out.width = max(out.width, out.measure(table, options=out.options.update(max_width=WIDEST)).maximum)
    out.print(table)
    if len(rows) == limit:
        out.print(f"the newest {limit}; more with --limit", markup=False)


def _prompt(prompt_ids: Sequence[PromptId]) -> str:
    if not prompt_ids:
        return "-"
    return prompt_ids[0] if len(prompt_ids) == 1 else f"{prompt_ids[0]} +{len(prompt_ids) - 1}"


def _local(row: LoggedRow) -> str:
    return datetime.fromtimestamp(row.stored_at_ns / 1e9).isoformat(sep=" ", timespec="milliseconds")


def _utc(row: LoggedRow) -> str:
    return datetime.fromtimestamp(row.stored_at_ns / 1e9, UTC).isoformat(timespec="milliseconds")


def _open(run: Path) -> RecordLog:
    run_dir = RunDir(run)
    records = run_dir.records if run_dir.records.is_dir() else run
    if records == run and not any(run.glob("*.seg")):
        if run_dir.manifest.exists():
            raise RunDirError(f"no records in {run}: the run was started with exchange.disk_bytes = 0, or its hub never began")
        raise RunDirError(f"no run in {run}: give a directory that `mutualrl up` wrote, or that a hub of exchange.serve keeps")
    with _told(run):
        return RecordLog(records)


@contextmanager
def _told(run: Path) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        sys.stdout.flush()  # what was read before it comes first
        raise RunDirError(f"the records of {run} cannot be read on: {error}") from error
