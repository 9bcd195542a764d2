"""A comparison as tables in the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mutualrl.report.comparison import BUDGET_CONTROL, CONTROL, Comparison, rescues
from mutualrl.report.hits import hit_rate
from mutualrl.report.outcomes import Outcome, judge
from mutualrl.statistics import Gain

FILE_WIDTH = 120


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print accuracies in 0..1: per agent and task for every rule, then the means over agents and seeds."""
    # Where nobody watches, nothing sets a width, and a table squeezed into 80 columns loses its numbers.
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=max(FILE_WIDTH, console.width))
    console.print(_outcome_table(comparison))
    console.print(_mean_table(comparison))


def _outcome_table(comparison: Comparison) -> Table:
    seeds = comparison.seeds
    table = _new_table(f"Held-out accuracy, mean over {len(seeds)} seed{'' if len(seeds) == 1 else 's'}")
    table.add_column("agent", no_wrap=True)
    table.add_column("task", no_wrap=True)
    for column in ("before", "after", "control", "gain", "95 % interval", "harmed"):
        table.add_column(column, justify="right", no_wrap=True)
    shown = [rule for rule in comparison.rules if rule != CONTROL] or [CONTROL]
    for rule in shown:
        table.add_row(Text(rule, style="bold"))
        outcomes = judge(comparison.pairs(rule))
        for outcome in sorted(outcomes, key=lambda outcome: outcome.own_skill):
            table.add_row(f"  {outcome.agent}", _task(outcome, comparison), *_numbers(outcome), _harm(outcome))
        table.add_section()
    return table


def _mean_table(comparison: Comparison) -> Table:
    table = _new_table("Gain over training alone, mean over agents and seeds")
    budget = BUDGET_CONTROL in comparison.rules
    table.add_column("rule", no_wrap=True)
    table.add_column("peers' skills" if comparison.has_skills else "all tasks", no_wrap=True)
    if budget:
        table.add_column("over equal budget", no_wrap=True)
    if comparison.has_skills:
        table.add_column("own skills", no_wrap=True)
    table.add_column("rescues", justify="right", no_wrap=True)
    table.add_column("hit rate", justify="right", no_wrap=True)
    for rule in comparison.rules:
        if rule == CONTROL:
            continue
        cells = [_gain(comparison.gain(rule, own_skill=False))]
        if budget:
            cells.append(_gain(comparison.gain(rule, own_skill=False, against=BUDGET_CONTROL)))
        if comparison.has_skills:
            cells.append(_gain(comparison.gain(rule, own_skill=True)))
        runs = comparison.of_rule(rule)
        total = sum(rescues(run, agent) for run in runs for agent in run.agents)
        rates = [rate for run in runs for agent in run.agents if (rate := hit_rate(run, agent, run.agents)) is not None]
        table.add_row(rule, *cells, f"{total:,}", f"{sum(rates) / len(rates):.2f}" if rates else "–")
    return table


def _new_table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _task(outcome: Outcome, comparison: Comparison) -> str:
    if not comparison.has_skills:
        return outcome.task
    return f"{outcome.task}, {'own' if outcome.own_skill else 'peer’s'}"


def _numbers(outcome: Outcome) -> list[Text]:
    accuracies = (outcome.before, outcome.after, outcome.control)
    cells = [Text("–" if value is None else f"{value:.2f}") for value in accuracies]
    if outcome.gain is None:
        return [*cells, Text("–"), Text("–")]
    color = "green" if outcome.gain.low > 0 else "red" if outcome.gain.high < 0 else ""
    return [*cells, Text(_signed(outcome.gain.mean), style=color), Text(_interval(outcome.gain))]


def _harm(outcome: Outcome) -> Text:
    if outcome.harmed is None:
        return Text("–")
    style = "bold red" if outcome.harmed else ""
    if not outcome.harmed and outcome.gain is not None and outcome.gain.high < 0:
        return Text("lost ground", style="red")
    if outcome.seeds == 1:
        return Text("yes" if outcome.harmed else "no", style=style)
    return Text(f"{outcome.harmed} of {outcome.seeds}", style=style)


def _gain(gain: Gain | None) -> str:
    return "–" if gain is None else f"{_signed(gain.mean)} ({_interval(gain)})"


def _interval(gain: Gain) -> str:
    return f"{_signed(gain.low)} to {_signed(gain.high)}"


def _signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}"  # adding 0.0 turns -0.0 into 0.0
