"""What is read from a growing metrics file, and the warnings that it gives rise to."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

from rich.console import Console

from mutualrl.live import View, describe
from mutualrl.progress import HIT_RATE_ROWS, AgentProgress, MetricsTail, Row


def row(agent: str, step: int, **values: float) -> Row:
    row: Row = {"agent": agent, "step": step, "wall_s": 1.0}
    row.update({f"{agent}/{key}": value for key, value in values.items()})
    return row


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
    agent.update(row("alpha", 1, **{"reward/sort": 0.25, "rescues": 2, "step_time": 2.0}))
    agent.update(row("alpha", 2, **{"reward/reverse": 1.0, "rescues": 3, "tokens_per_s": 1500.0, "step_time": 4.0}))
    assert agent.step == 2
    assert agent.rewards == {"sort": 0.25, "reverse": 1.0}
    assert agent.rescues == 5
    assert agent.hit_rate is None
    # pace: 0.9 * 2.0 + 0.1 * 4.0 = 2.2 s, 8 steps left
    assert agent.left_s is not None and abs(agent.left_s - 17.6) < 1e-9


def test_the_hit_rate_is_over_the_prompts_of_the_last_rows() -> None:
    agent = AgentProgress(name="alpha", total=10)
    agent.update(row("alpha", 1, **{"peer/b/hit_rate": 1.0, "peer/b/prompts": 30, "peer/c/hit_rate": 0.5, "peer/c/prompts": 6}))
    agent.update(row("alpha", 2, **{"peer/b/hit_rate": 0.25, "peer/b/prompts": 4}))
    agent.update(row("alpha", 3))
    assert agent.hit_rate == (30 + 3 + 1) / (30 + 6 + 4)
    for step in range(HIT_RATE_ROWS):
        agent.update(row("alpha", 4 + step, **{"peer/b/hit_rate": 0.0}))
    assert agent.hit_rate == 0.0


def test_a_low_hit_rate_is_warned_of_once_and_only_when_it_lasts() -> None:
    agent = AgentProgress(name="alpha", total=100)
    low, high = {"peer/beta/hit_rate": 0.1}, {"peer/beta/hit_rate": 0.9}
    steps = [high] + [low] * 60
    warnings = [(step, text) for step, values in enumerate(steps) for text in agent.update(row("alpha", step, **values))]
    # after n low rows the mean is (0.9 + 0.1 n) / (n + 1): 0.3 at n = 3, below it from n = 4, for ten rows at n = 13
    assert [step for step, _ in warnings] == [13]
    assert "only 16% of its prompts" in warnings[0][1]


def test_a_falling_evaluation_is_warned_of() -> None:
    agent = AgentProgress(name="alpha", total=100)
    accuracies = [0.5, 0.75, 0.6, 0.5, 0.2]
    found = [agent.update(row("alpha", step, **{"eval/sort/accuracy": value})) for step, value in enumerate(accuracies)]
    assert [len(warnings) for warnings in found] == [0, 0, 0, 1, 0]
    assert "alpha has fallen on sort: accuracy 0.50, it was 0.75" in found[3][0]


async def test_plain_output_is_log_lines_with_every_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [row("alpha", 1, **{"reward/sort": 0.5}), row("alpha", 2), row("alpha", 3, **{"eval/sort/accuracy": 0.25})]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*rows, row("alpha", 4), row("zoe", 1)]))
    console = Console(file=io.StringIO(), width=200)
    agents = {"alpha": AgentProgress(name="alpha", total=4)}
    view = View(MetricsTail(path), agents, console, clock=lambda: 0.0)
    done = asyncio.Event()
    done.set()
    await view.show(done)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    # the clock stands still: the first row is due, the second and the fourth are not, the third has an evaluation
    assert [line.split(" ", 1)[1].split(" · ")[0] for line in lines] == ["alpha 1/4", "alpha 3/4"]
    assert "held out sort 0.25" in lines[1]


async def test_in_a_terminal_there_is_a_table(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    agents = {"alpha": AgentProgress(name="alpha", total=4)}
    done = asyncio.Event()
    done.set()
    await View(MetricsTail(tmp_path / "none"), agents, console).show(done)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "hit rate" in shown and "0/4" in shown


def test_text_that_looks_like_markup_is_shown_as_it_is(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    View(MetricsTail(tmp_path / "none"), {}, console).tell("[red]x[/red] [/]")
    assert "[red]x[/red] [/]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_agent_of_which_nothing_is_known_yet_can_be_described() -> None:
    assert describe(AgentProgress(name="alpha", total=4)) == "alpha 0/4 · rescues 0 · – left"
