"""What crossed the exchange, from the hub's last statistics."""

from __future__ import annotations

from collections.abc import Callable

from exchange.stats import HubStats, WorkerStats
from mutualrl.report.page import Table

_ROWS: tuple[tuple[str, Callable[[WorkerStats], int]], ...] = (
    ("refused by the hub", lambda worker: sum(worker.refused.values())),
    ("sent twice", lambda worker: worker.duplicates),
    ("withheld from it, no edge", lambda worker: worker.withheld),
)


def exchange_table(stats: HubStats | None) -> Table | None:
    """Counts per worker: a column each; None where nothing was recorded. Rows that are zero for all are left out."""
    if stats is None or not stats.workers:
        return None
    names = list(stats.workers)
    workers = list(stats.workers.values())
    sent = sorted({kind for worker in workers for kind in worker.accepted})
    rows = [[f"sent, {kind}", *(_sent(worker, kind) for worker in workers)] for kind in sent]
    for producer in names:
        for kind in sorted({kind for worker in workers for kind in worker.delivered.get(producer, {})}):
            counts = [worker.delivered.get(producer, {}).get(kind, 0) for worker in workers]
            rows.append([f"received from {producer}, {kind}", *(f"{count:,}" for count in counts)])
    rows.append(["received, bytes", *(size(worker.delivered_bytes) for worker in workers)])
    for label, count_of in _ROWS:
        if any(count_of(worker) for worker in workers):
            rows.append([label, *(f"{count_of(worker):,}" for worker in workers)])
    return Table(header=["", *names], rows=rows)


def size(count_bytes: float) -> str:
    """Bytes for people: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count_bytes < 1024:
            return f"{count_bytes:.0f} {unit}" if unit == "B" else f"{count_bytes:.1f} {unit}"
        count_bytes /= 1024
    return f"{count_bytes:.1f} GiB"


def _sent(worker: WorkerStats, kind: str) -> str:
    count = worker.accepted.get(kind, 0)
    return f"{count:,} ({size(worker.accepted_bytes.get(kind, 0))})" if count else "0"
