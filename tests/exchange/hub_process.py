"""Runs a hub for tests that kill it: python hub_process.py ENDPOINT [DIRECTORY [CONFIG]]; says 'ready ENDPOINT' on stdout.

DIRECTORY may be empty for none; CONFIG is JSON. SIGTERM ends it in order.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import msgspec

import exchange


async def main(endpoint: str, directory: str = "", config: str = "{}") -> None:
    settings = msgspec.convert({"run_id": "r", "heartbeat_s": 0.1} | msgspec.json.decode(config), exchange.HubConfig)

    def ready(real: str) -> None:
        print("ready", real, flush=True)

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    kept_in = Path(directory) if directory else None
    await exchange.serve(endpoint, settings, stop=stop, on_ready=ready, directory=kept_in)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
