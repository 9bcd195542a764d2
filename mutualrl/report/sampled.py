"""pass@k of a run's sampled completions as a table: before training, and at the last evaluation."""

from __future__ import annotations

from mutualrl.report.page import Table
from mutualrl.report.records import RunRecord
from mutualrl.report.verdict import percent


def sampled_table(run: RunRecord) -> Table | None:
    """One row per agent and task, in each cell the first and the last value; None where nothing was sampled."""
    found = {(agent, task): run.curve(agent, task) for agent in run.agents for task in run.tasks(agent)}
    sampled = {key: [row for row in rows if row.pass_at_k] for key, rows in found.items()}
    ks = sorted({k for rows in sampled.values() for row in rows for k in row.pass_at_k}, key=int)
    if not ks:
        return None
    return Table(
        header=("agent", *(f"pass@{k}" for k in ks)),
        rows=[
            (f"{agent} on {task}", *(f"{_share(rows[0].pass_at_k, k)} → {_share(rows[-1].pass_at_k, k)}" for k in ks))
            for (agent, task), rows in sampled.items()
            if rows
        ],
    )


def _share(rates: dict[str, float], k: str) -> str:
    return percent(rates[k]) if k in rates else "–"
