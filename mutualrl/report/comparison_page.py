"""The report of a comparison: the first sharing rule's verdict, then all rules side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from markupsafe import Markup

from mutualrl.report.comparison import BUDGET_CONTROL, CONTROL, Comparison, load_comparison, pair_dir, rescues, seconds
from mutualrl.report.comparison_chart import gain_chart
from mutualrl.report.curves import Arm, accuracy_chart
from mutualrl.report.hits import hit_rate
from mutualrl.report.outcomes import Outcome, judge
from mutualrl.report.page import Table, agent_cards, write_page
from mutualrl.report.svg import MUTED, series_color
from mutualrl.report.verdict import Verdict, points, run_verdict
from mutualrl.statistics import Gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One rule's rows in the table of all outcomes; rescues, hit_rates: by agent."""

    label: str
    outcomes: Sequence[Outcome]
    rescues: Mapping[str, str]
    hit_rates: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way to a single run's report, from the comparison's own place."""

    href: str
    label: str


def write_comparison_page(output_dir: Path) -> Path:
    """Write OUT/report.html; see `mutualrl.report.write_comparison_report`."""
    comparison = load_comparison(output_dir)
    if not comparison.runs:
        raise FileNotFoundError(f"no runs to compare in {output_dir}: give the directory that `mutualrl compare` wrote")
    shown = comparison.headline_rule
    outcomes = judge(comparison.pairs(shown))
    first = comparison.of_rule(shown)[0]
    context = {
        "title": f"{output_dir.name}: comparison",
        "facts": _facts(comparison, output_dir),
        "verdict": _verdict(comparison, shown, outcomes),
        "warnings": _warnings(comparison),
        "several_seeds": len(comparison.seeds) > 1,
        "seeds": comparison.seeds,
        "skilled": comparison.has_skills,
        "cards": agent_cards(first, outcomes),
        "means": _mean_table(comparison),
        "gain_chart": gain_chart(comparison),
        "accuracy": _accuracy_charts(comparison),
        "groups": [_group(comparison, rule) for rule in comparison.rules],
        "links": _links(comparison, output_dir),
    }
    return write_page(output_dir / "report.html", "comparison.html.j2", context)


def _facts(comparison: Comparison, output_dir: Path) -> list[str]:
    seeds = comparison.seeds
    return [
        "Comparison",
        output_dir.name,
        f"{len(comparison.rules)} rules",
        f"{len(seeds)} seed{'' if len(seeds) == 1 else 's'}",
    ]


def _verdict(comparison: Comparison, shown: str, outcomes: Sequence[Outcome]) -> Verdict:
    """The headline rule's verdict, and who was hurt under the others."""
    verdict = run_verdict(outcomes, shared=shown in comparison.sharing_rules)
    others = [
        f"Under {rule}, {outcome.agent} was hurt on {outcome.task}."
        for rule in comparison.sharing_rules
        if rule != shown
        for outcome in judge(comparison.pairs(rule))
        if outcome.harmed
    ]
    headline = verdict.headline
    if not headline.startswith(tuple(outcome.agent for outcome in outcomes)):
        headline = headline[0].lower() + headline[1:]
    return replace(verdict, headline=f"With {shown}, {headline}", sentences=(*verdict.sentences, *others))


def _warnings(comparison: Comparison) -> list[str]:
    unfinished = [
        f"{rule}, seed {seed}"
        for (rule, seed), run in comparison.runs.items()
        if run.manifest is not None and run.manifest.status != "done"
    ]
    return [f"Not finished: {'; '.join(unfinished)}."] if unfinished else []


def _mean_table(comparison: Comparison) -> Table:
    header = ["", "peers’ skills" if comparison.has_skills else "all tasks"]
    header += ["over equal budget"] if BUDGET_CONTROL in comparison.rules else []
    header += ["own skills"] if comparison.has_skills else []
    header += ["harmed", "seconds"]
    rows = []
    for rule in comparison.rules:
        cells = [rule, _gain(comparison.gain(rule, own_skill=False))]
        if BUDGET_CONTROL in comparison.rules:
            cells.append(_gain(comparison.gain(rule, own_skill=False, against=BUDGET_CONTROL)))
        if comparison.has_skills:
            cells.append(_gain(comparison.gain(rule, own_skill=True)))
        outcomes = judge(comparison.pairs(rule))
        harms = [outcome.harmed for outcome in outcomes if outcome.harmed is not None]
        runs = comparison.of_rule(rule)
        spent = sum(max((seconds(run, agent) for agent in run.agents), default=0.0) for run in runs) / len(runs)
        cells += [f"{sum(harms)} of {len(harms) * len(runs)}" if harms else "–", f"{spent:.0f}"]
        rows.append(cells)
    return Table(header=header, rows=rows)


def _accuracy_charts(comparison: Comparison) -> list[Markup]:
    colored = comparison.sharing_rules
    arms = [Arm(label=rule, runs=comparison.of_rule(rule), color=series_color(index)) for index, rule in enumerate(colored)]
    if CONTROL in comparison.rules:
        arms.append(Arm(label="alone", runs=comparison.of_rule(CONTROL), color=MUTED, dashes="--"))
    if BUDGET_CONTROL in comparison.rules:
        arms.append(Arm(label="equal budget", runs=comparison.of_rule(BUDGET_CONTROL), color=MUTED, dashes=":"))
    first = comparison.of_rule(comparison.rules[0])[0]
    return [
        accuracy_chart(arms, agent, task, color=MUTED, title=f"{agent} on {task}")
        for agent in first.agents
        for task in first.tasks(agent)
    ]


def _group(comparison: Comparison, rule: str) -> Group:
    runs = comparison.of_rule(rule)
    agents = runs[0].agents
    rates = {agent: [rate for run in runs if (rate := hit_rate(run, agent, run.agents)) is not None] for agent in agents}
    return Group(
        label=rule,
        outcomes=judge(comparison.pairs(rule)),
        rescues={agent: f"{sum(rescues(run, agent) for run in runs):,}" for agent in agents},
        hit_rates={agent: sum(found) / len(found) if found else None for agent, found in rates.items()},
    )


def _links(comparison: Comparison, output_dir: Path) -> list[Link]:
    return [
        Link(href=f"{pair_dir(output_dir, rule, seed).name}/report.html", label=f"{rule}, seed {seed}")
        for rule, seed in comparison.runs
    ]


def _gain(gain: Gain | None) -> str:
    return "–" if gain is None else f"{points(gain.mean)}  ({points(gain.low)} to {points(gain.high)})"
