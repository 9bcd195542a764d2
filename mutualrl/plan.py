"""What a run will do, shown before it starts: the resolved config, its processes, and who learns from whom."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from agents.config import AgentConfig, TinyPolicy
from mutualrl.config import Run
from mutualrl.topology import published_kinds, routes


def show_plan(run: Run, console: Console, *, directory: str, warnings: list[str]) -> None:
    """Print the plan; starts nothing and needs no torch."""
    resolved = msgspec.json.format(msgspec.json.encode(run), indent=2).decode()
    console.print(Syntax(resolved, "json", background_color="default", word_wrap=True))
    console.print(_processes(run))
    console.print(_learning(run))
    console.print(_tasks(run))
    console.print(f"directory  {directory}", markup=False, highlight=False)
    console.print("endpoint   ipc://, in a directory that only this user can enter, named when the run starts")
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)


def _processes(run: Run) -> Table:
    table = Table(title="processes", title_justify="left")
    for column in ("process", "device", "threads", "policy", "sampler", "prompts × completions", "learning rate"):
        table.add_column(column)
    table.add_row("hub", "–", "1", f"{run.exchange.memory_bytes / 2**20:.0f} MiB of experience", "–", "–", "–")
    for name, agent in run.agents.items():
        device = "cuda if there, else cpu" if agent.device == "auto" else agent.device
        table.add_row(
            name,
            f"{device}, {agent.dtype}",
            f"{agent.num_processes} × {agent.threads}" if agent.num_processes > 1 else str(agent.threads),
            _policy(agent),
            str(agent.sampler.__struct_config__.tag),
            f"{agent.prompts_per_step} × {agent.num_generations}",
            f"{agent.learning_rate:g}",
        )
    return table


def _learning(run: Run) -> Table:
    table = Table(title="who learns from whom", title_justify="left")
    for column in ("learner", "rule", "teacher", "what crosses"):
        table.add_column(column)
    for name, agent in run.agents.items():
        rule = str(agent.sharing.__struct_config__.tag)
        own = [route for route in routes(run) if route.learner == name and route.kinds]
        for route in own:
            table.add_row(name, rule, route.teacher, ", ".join(sorted(route.kinds)))
        if not own:
            table.add_row(name, rule, "nobody", "–")
    table.caption = "\n".join(
        f"{name} publishes {', '.join(sorted(published_kinds(run, name))) or 'nothing'}" for name in run.agents
    )
    table.caption_justify = "left"
    return table


def _tasks(run: Run) -> Table:
    table = Table(title="tasks", title_justify="left")
    for column in ("task", "kind", "held out", "skill of"):
        table.add_column(column)
    for task in run.tasks:
        masters = [name for name, agent in run.agents.items() if task.name in agent.skills]
        kind = str(task.__struct_config__.tag)
        table.add_row(task.name, kind, str(task.heldout), ", ".join(masters) or "nobody")
    return table


def _policy(agent: AgentConfig) -> str:
    policy = agent.policy
    if isinstance(policy, TinyPolicy):
        return f"tiny {policy.arch}, {policy.tokenizer} tokenizer"
    return policy.path
