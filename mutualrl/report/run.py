"""The report of one run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from markupsafe import Markup

from agents.sharing.config import Isolated
from mutualrl.report.counters import counter_table
from mutualrl.report.curves import Arm, accuracy_chart, agent_chart, task_chart
from mutualrl.report.exchange import exchange_table
from mutualrl.report.flow import Flow, flows, topology_chart
from mutualrl.report.hits import hit_series
from mutualrl.report.outcomes import Pair, judge
from mutualrl.report.page import agent_cards, write_page
from mutualrl.report.records import Rescue, RunRecord, load_record
from mutualrl.report.sampled import sampled_table
from mutualrl.report.svg import MUTED, series_color, series_variable
from mutualrl.report.trial import trial_table
from mutualrl.report.verdict import percent, run_verdict

RESCUES_SHOWN = 8
LOW_HIT_RATE = 0.3


def find_control(run_dir: Path) -> Path | None:
    """The isolated run of the same seed that a comparison left beside this one (`sgt-seed0` -> `isolated-seed0`)."""
    match = re.fullmatch(r"(.+)-seed(\d+)", run_dir.resolve().name)
    if match is None or match[1] == "isolated":
        return None
    control = run_dir.resolve().with_name(f"isolated-seed{match[2]}")
    return control if (control / "evals.jsonl").exists() else None


def write_run_report(run_dir: Path, control_dir: Path | None) -> Path:
    """Write RUN/report.html; see `mutualrl.report.write_report`."""
    run = load_record(run_dir)
    control = load_record(control_dir) if control_dir is not None else None
    outcomes = judge([Pair(run=run, control=control)])
    edges = flows(run)
    context = {
        "title": f"{run.name}: run report",
        "facts": _facts(run),
        "verdict": run_verdict(outcomes, shared=is_shared(run)),
        "warnings": run_warnings(run, edges),
        "several_seeds": False,
        "cards": agent_cards(run, outcomes),
        "controlled": control is not None,
        "accuracy": _accuracy_charts(run, control),
        "topology": topology_chart(run, edges),
        "exchange": exchange_table(run.exchange),
        "counters": counter_table(run),
        "counters_note": "Sums over the run, and means over its steps. Thin lines: single steps; bold: their running mean.",
        "counter_charts": _counter_charts(run),
        "sampled": sampled_table(run),
        "trial": trial_table(run.trial),
        "rescues": choose_rescues(run.rescues),
        "rescue_note": "Shown are different prompts, those cut most differently first.",
        "colors": {agent: series_variable(index) for index, agent in enumerate(_everyone(run))},
        "lengths": _length_charts(run),
        "config": msgspec.json.format(msgspec.json.encode(run.config), indent=2).decode() if run.config else "",
    }
    return write_page(run_dir / "report.html", "run.html.j2", context)


def is_shared(run: RunRecord) -> bool:
    """Whether any agent's rule asked anything of a peer."""
    if run.config is None:
        return len(run.agents) > 1
    rules = [agent.sharing for agent in run.config.agents.values()]
    return len(rules) > 1 and not all(isinstance(rule, Isolated) for rule in rules)


def choose_rescues(rescues: Sequence[Rescue], limit: int = RESCUES_SHOWN) -> list[Rescue]:
    """Up to `limit` rescues per learner on different prompts, those with the most differently cut spans first."""
    chosen: list[Rescue] = []
    for agent in dict.fromkeys(row.agent for row in rescues):
        distinct = {row.prompt_id or row.prompt: row for row in reversed(rescues) if row.agent == agent}
        ranked = sorted(distinct.values(), key=lambda row: (-sum(not span.exact for span in row.spans), row.step))
        chosen += ranked[:limit]
    return chosen


def _facts(run: RunRecord) -> list[str]:
    facts = ["Run report", run.name]
    if run.config is not None:
        rules = dict.fromkeys(str(agent.sharing.__struct_config__.tag) for agent in run.config.agents.values())
        facts += [", ".join(rules), f"seed {run.config.seed}", run.config.mode]
    facts.append(f"{len(run.agents)} agent{'' if len(run.agents) == 1 else 's'}")
    if run.steps:
        facts += [f"{run.steps[-1].step} steps", f"{max(row.wall_s for row in run.steps):.0f} s"]
    return facts


def run_warnings(run: RunRecord, edges: Sequence[Flow]) -> list[str]:
    """What a reader must know before believing the numbers: unfinished, unreadable, or peers that seldom met."""
    warnings = []
    if run.manifest is not None and run.manifest.status != "done":
        warnings.append(
            f"This run is not finished (status: {run.manifest.status}); the numbers are those of its last evaluation."
        )
    if run.unreadable_lines:
        warnings.append(f"Unreadable lines in its records, left out: {run.unreadable_lines}.")
    return warnings + [
        f"{edge.learner} seldom met {edge.teacher}: a row was at hand for {percent(edge.hit_rate)} of its prompts."
        for edge in edges
        if edge.kinds and edge.hit_rate is not None and edge.hit_rate < LOW_HIT_RATE
    ]


def _accuracy_charts(run: RunRecord, control: RunRecord | None) -> list[Markup]:
    name = "shared" if is_shared(run) else "accuracy"
    arms = [Arm(label=name, runs=[run])]
    if control is not None:
        arms.append(Arm(label="alone", runs=[control], color=MUTED, dashes="--"))
    return [
        accuracy_chart(arms, agent, task, color=series_color(index), title=f"{agent} on {task}")
        for index, agent in enumerate(run.agents)
        for task in run.tasks(agent)
    ]


def _counter_charts(run: RunRecord) -> list[Markup]:
    rescues = {agent: run.series(agent, "rescues") for agent in run.agents}
    hits = {agent: hit_series(run, agent, run.agents) for agent in run.agents}
    rewards = {agent: run.series(agent, "reward") for agent in run.agents}
    return [
        agent_chart(rescues, title="Rescues per step", unit_interval=False),
        agent_chart(hits, title="Prompts with a peer’s row at hand", unit_interval=True),
        agent_chart(rewards, title="Training reward", unit_interval=False),
    ]


def _length_charts(run: RunRecord) -> list[Markup]:
    charts = []
    for agent in run.agents:
        charts += [
            task_chart(run, agent, "mean_length", title=f"{agent}: length", unit_interval=False, unit="tokens"),
            task_chart(run, agent, "eos_rate", title=f"{agent}: ended by itself", unit_interval=True),
        ]
    return [chart for chart in charts if chart]


def _everyone(run: RunRecord) -> Sequence[str]:
    peers = [row.peer for row in run.rescues]
    return list(dict.fromkeys([*run.agents, *(row.agent for row in run.rescues), *peers]))
