"""The live view of a run: a table that is redrawn in a terminal, log lines elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from mutualrl.progress import AgentProgress, MetricsTail
from mutualrl.traffic import Traffic

REDRAW_S = 0.5
LINE_EVERY_S = 10.0


class View:
    """Shows the agents of one run. One task drives it with `show`; `tell` may be called from anywhere in that loop."""

    def __init__(
        self,
        tail: MetricsTail,
        agents: dict[str, AgentProgress],
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tail = tail
        self._agents = agents
        self._console = console
        self.traffic = Traffic()
        self._clock = clock
        self._line_due_s = dict.fromkeys(agents, 0.0)

    def tell(self, line: str) -> None:
        """Print one line, above the table where there is one."""
        self._console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {escape(line)}", highlight=False, soft_wrap=True)

    async def show(self, done: asyncio.Event) -> None:
        """Redraw until `done` is set, and once more then. Cancelled, it leaves the terminal as it should be."""
        if not self._console.is_terminal:
            await self._every(REDRAW_S, done, lambda: self.poll(lines=True))
            return
        with Live(self.table(), console=self._console, auto_refresh=False) as live:

            def redraw() -> None:
                self.poll(lines=False)
                live.update(self.table(), refresh=True)

            await self._every(REDRAW_S, done, redraw)

    def poll(self, *, lines: bool) -> None:
        """Take in the metrics that were written since the last call; lines: print one for an agent now and then."""
        for row in self._tail.read():
            agent = self._agents.get(str(row.get("agent")))
            if agent is None:
                continue
            warnings = agent.update(row)
            evaluated = any("/eval/" in key for key in row)
            if lines and (evaluated or self._clock() >= self._line_due_s[agent.name]):
                self._line_due_s[agent.name] = self._clock() + LINE_EVERY_S
                self.tell(describe(agent))
            for warning in warnings:
                self.tell(f"warning: {warning}")

    def table(self) -> Table:
        """All agents, and what has crossed the exchange."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False, caption=self.traffic.describe() or None, caption_justify="left")
        for column in ("agent", "step", "reward by task", "held out", "rescues", "hit rate", "tokens/s", "lag", "left"):
            table.add_column(column, justify="left" if column in ("agent", "reward by task", "held out") else "right")
        for agent in self._agents.values():
            table.add_row(
                agent.name,
                f"{agent.step}/{agent.total}",
                _by_task(agent.rewards),
                _by_task(agent.accuracies),
                str(agent.rescues),
                _share(agent.hit_rate),
                _number(agent.tokens_per_s),
                "–" if agent.staleness is None else f"{agent.staleness:.1f}",
                _duration(agent.left_s),
            )
        return table

    @staticmethod
    async def _every(period_s: float, done: asyncio.Event, act: Callable[[], None]) -> None:
        while not done.is_set():
            act()
            try:
                async with asyncio.timeout(period_s):
                    await done.wait()
            except TimeoutError:
                continue
        act()


def describe(agent: AgentProgress) -> str:
    """One line on one agent."""
    parts = [f"{agent.name} {agent.step}/{agent.total}"]
    if agent.rewards:
        parts.append(f"reward {_by_task(agent.rewards)}")
    if agent.accuracies:
        parts.append(f"held out {_by_task(agent.accuracies)}")
    parts.append(f"rescues {agent.rescues}")
    if agent.hit_rate is not None:
        parts.append(f"hit rate {_share(agent.hit_rate)}")
    if agent.tokens_per_s is not None:
        parts.append(f"{_number(agent.tokens_per_s)} tokens/s")
    parts.append(f"{_duration(agent.left_s)} left")
    return " · ".join(parts)


def _by_task(values: dict[str, float]) -> str:
    return " ".join(f"{task} {value:.2f}" for task, value in sorted(values.items())) or "–"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
