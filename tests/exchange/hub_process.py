"""Runs a hub for tests that kill it: python hub_process.py ENDPOINT [DIRECTORY]; says 'ready ENDPOINT' on stdout."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import exchange


async def main(endpoint: str, directory: Path | None) -> None:
    config = exchange.HubConfig(run_id="r", heartbeat_s=0.1)

    def ready(real: str) -> None:
        print("ready", real, flush=True)

    await exchange.serve(endpoint, config, stop=asyncio.Event(), on_ready=ready, directory=directory)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else None))
