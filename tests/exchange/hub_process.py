"""Runs a hub for tests that kill it: python hub_process.py ENDPOINT; says 'ready ENDPOINT' on stdout."""

from __future__ import annotations

import asyncio
import sys

import exchange


async def main(endpoint: str) -> None:
    config = exchange.HubConfig(run_id="r", heartbeat_s=0.1)
    await exchange.serve(endpoint, config, stop=asyncio.Event(), on_ready=lambda real: print("ready", real, flush=True))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
