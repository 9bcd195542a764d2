"""What the hub counts, asked for by the supervisor as an observer: who has joined, and what crosses the exchange."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exchange.stats import HubStats

ASK_EVERY_S = 1.0
WELCOME_S = 30.0


class Traffic:
    """The hub's newest statistics; None until the hub has welcomed the observer."""

    def __init__(self) -> None:
        self.stats: HubStats | None = None

    def describe(self) -> str:
        """One line: records and bytes published and handed over; empty before the first statistics."""
        if self.stats is None:
            return ""
        workers = self.stats.workers.values()
        accepted = sum(sum(worker.accepted.values()) for worker in workers)
        accepted_bytes = sum(sum(worker.accepted_bytes.values()) for worker in workers)
        delivered = sum(sum(kinds.values()) for worker in workers for kinds in worker.delivered.values())
        delivered_bytes = sum(worker.delivered_bytes for worker in workers)
        refused = sum(sum(worker.refused.values()) for worker in workers)
        line = (
            f"exchange: {accepted:,} records in ({_size(accepted_bytes)}), {delivered:,} out "
            f"({_size(delivered_bytes)}), {_size(self.stats.stored_bytes)} kept"
        )
        return f"{line}, {refused:,} refused" if refused else line

    def joined(self) -> set[str]:
        """The agents that the hub has welcomed."""
        return set() if self.stats is None else set(self.stats.workers)


async def observe(traffic: Traffic, endpoint: str, run_id: str, *, agents: set[str], tell: Callable[[str], None]) -> None:
    """Keep `traffic` up to date until the hub ends; tells once when all agents have joined.

    Raises exchange.errors.ConnectError when no WELCOME came in time. Cancellation says good-bye to the hub.
    """
    import exchange

    announced = False
    async with exchange.connect(endpoint, name="supervisor", run_id=run_id, observer=True, connect_timeout_s=WELCOME_S) as hub:
        while True:
            try:
                traffic.stats = await hub.stats()
            except exchange.ExchangeError:
                return
            if not announced and agents <= traffic.joined():
                announced = True
                tell("all agents have joined")
            await asyncio.sleep(ASK_EVERY_S)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
