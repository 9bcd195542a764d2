"""What the sharing rules counted, as one table: a row per counter, a column per agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mutualrl.report.hits import hit_rate
from mutualrl.report.page import Table
from mutualrl.report.records import RunRecord
from mutualrl.report.verdict import percent

Reduce = Callable[[Sequence[float]], str]


def _sum(values: Sequence[float]) -> str:
    return f"{sum(values):,.0f}"


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):,.2f}"


def _share(values: Sequence[float]) -> str:
    return percent(sum(values) / len(values))


_COUNTERS: tuple[tuple[str, str, Reduce], ...] = (
    ("rescues", "prompts rescued", _sum),
    ("rescues/late", "of these, after a wait", _sum),
    ("rescues/expired", "failures that nobody rescued in time", _sum),
    ("rescues/unverified", "peer successes that the own reward refused", _sum),
    ("prp/pooled_groups", "groups with peer rollouts", _sum),
    ("prp/peer_rows", "peer rollouts pooled", _sum),
    ("xgrpo/pooled_groups", "groups with a shared baseline", _sum),
    ("xgrpo/all_fail_peer_success", "groups all failed where a peer succeeded", _sum),
    ("hacpo/pooled_groups", "groups with peer rollouts by capability", _sum),
    ("hacpo/peer_rows", "peer rollouts learned from by capability", _sum),
    ("graft/groups", "failed groups replaced by a peer's", _sum),
    ("graft/rows", "peer rollouts in these", _sum),
    ("peer/discarded", "peer rollouts too unlikely to be learned from, mean share", _share),
    ("peer/share", "peer rows in the batch, mean share", _share),
    ("thl/tokens_in", "peer tokens translated", _sum),
    ("thl/tokens_out", "own tokens that they became", _sum),
    ("thl/residual", "tokens cut differently, mean share (residual)", _share),
    ("thl/residual_logprob", "of the log-prob in spans, mean share", _share),
    ("thl/offered", "peer texts offered, each time that one was tried", _sum),
    ("thl/refused", "of these refused in translation", _sum),
    ("thl/text_bytes_changed", "bytes that the own normaliser rewrote", _sum),
    ("thl/text_bytes_lost", "bytes that the own vocabulary lacks", _sum),
    ("thl/noncanonical", "sampled tokens that the own encoder would cut otherwise, mean share", _share),
    ("peer/staleness_mean", "lag of peer rows, mean versions", _mean),
)


def counter_table(run: RunRecord) -> Table | None:
    """The table; counters that no agent has are left out. None where nothing was counted."""
    rows = []
    for metric, label, reduce in _COUNTERS:
        series = [[value for _, value in run.series(agent, metric)] for agent in run.agents]
        if any(series):
            rows.append([label, *(reduce(values) if values else "–" for values in series)])
    rates = [hit_rate(run, agent, run.agents) for agent in run.agents]
    if any(rate is not None for rate in rates):
        rows.append(["prompts with a peer's row at hand (hit rate)", *("–" if r is None else percent(r) for r in rates)])
    return Table(header=["", *run.agents], rows=rows) if rows else None
