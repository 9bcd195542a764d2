"""What is read from a growing metrics file, and the warnings that it gives rise to."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

from rich.console import Console

from mutualrl.live import View, describe
from mutualrl.progress import LOW_HIT_RATE_STEPS, AgentProgress, MetricsTail, Row
from mutualrl.traffic import Traffic


def row(agent: str, step: int, **values: float) -> Row:
    named: Row = {f"{agent}/{key}": value for key, value in values.items()}
    return {"agent": agent, "step": step, "wall_s": 1.0} | named


def test_rows_are_read_once_and_a_line_being_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    path.write_bytes(b'{"agent":"a","step":1}\n{"agent":"a","st')
    assert tail.read() == [{"agent": "a", "step": 1}]
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(b'ep":2}\nnot json\n[1]\n{"agent":"b","step":1}\n')
    assert tail.read() == [{"agent": "a", "step": 2}, {"agent": "b", "step": 1}]


def test_an_agent_is_as_far_as_its_newest_row() -> None:
    agent = AgentProgress(name="alpha", total=10)
    agent.update(row("alpha", 1, **{"reward/sort": 0.25, "rescues": 2, "peer/beta/hit_rate": 0.5, "step_time": 2.0}))
    agent.update(row("alpha", 2, **{"reward/reverse": 1.0, "rescues": 3, "tokens_per_s": 1500.0, "step_time": 4.0}))
    assert agent.step == 2
    assert agent.rewards == {"sort": 0.25, "reverse": 1.0}
    assert agent.rescues == 5
    assert agent.hit_rate == 0.5
    # pace: 0.9 * 2.0 + 0.1 * 4.0 = 2.2 s, 8 steps left
    assert agent.left_s is not None and abs(agent.left_s - 17.6) < 1e-9


def test_a_low_hit_rate_is_warned_of_once_and_only_when_it_lasts() -> None:
    agent = AgentProgress(name="alpha", total=100)
    low, high = {"peer/beta/hit_rate": 0.1}, {"peer/beta/hit_rate": 0.9}
    steps = [low] * (LOW_HIT_RATE_STEPS - 1) + [high] + [low] * (LOW_HIT_RATE_STEPS + 5)
    warnings = [(step, text) for step, values in enumerate(steps) for text in agent.update(row("alpha", step, **values))]
    assert [step for step, _ in warnings] == [2 * LOW_HIT_RATE_STEPS - 1]
    assert "only 10%" in warnings[0][1]


def test_a_falling_evaluation_is_warned_of() -> None:
    agent = AgentProgress(name="alpha", total=100)
    accuracies = [0.5, 0.75, 0.7, 0.6, 0.2]
    found = [agent.update(row("alpha", step, **{"eval/sort/accuracy": value})) for step, value in enumerate(accuracies)]
    assert [len(warnings) for warnings in found] == [0, 0, 0, 1, 0]
    assert "alpha has fallen on sort: accuracy 0.60, it was 0.75" in found[3][0]


async def test_plain_output_is_log_lines_with_the_evaluations_and_the_last_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [row("alpha", 1, **{"reward/sort": 0.5}), row("alpha", 2), row("alpha", 3, **{"eval/sort/accuracy": 0.25})]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*rows, row("alpha", 4), row("zoe", 1)]))
    console = Console(file=io.StringIO(), width=200)
    agents = {"alpha": AgentProgress(name="alpha", total=4)}
    view = View(MetricsTail(path), agents, console, traffic=Traffic(), clock=lambda: 0.0)
    done = asyncio.Event()
    done.set()
    await view.show(done)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    # clock stands still: the first row is due, the second is not, the third has an evaluation, the fourth is the last
    assert [line.split(" ", 1)[1].split(" · ")[0] for line in lines] == ["alpha 1/4", "alpha 3/4", "alpha 4/4"]
    assert "held out sort 0.25" in lines[1]


async def test_in_a_terminal_there_is_a_table(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    agents = {"alpha": AgentProgress(name="alpha", total=4)}
    done = asyncio.Event()
    done.set()
    await View(MetricsTail(tmp_path / "none"), agents, console, traffic=Traffic()).show(done)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "hit rate" in shown and "0/4" in shown


def test_text_that_looks_like_markup_is_shown_as_it_is(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    View(MetricsTail(tmp_path / "none"), {}, console, traffic=Traffic()).tell("[red]x[/red] [/]")
    assert "[red]x[/red] [/]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_agent_of_which_nothing_is_known_yet_can_be_described() -> None:
    assert describe(AgentProgress(name="alpha", total=4)) == "alpha 0/4 · rescues 0 · – left"
