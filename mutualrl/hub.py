"""The hub's role in a run: serves and records the exchange by the run's config, and saves what it counted when it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from exchange.config import HubConfig
from exchange.endpoints import remove_private_dir
from exchange.server import serve
from mutualrl.manifest import write_atomically
from mutualrl.rundir import RunDir
from mutualrl.topology import hub_edges


async def hub_main(path: Path, stop: asyncio.Event) -> None:
    """Serve the run in this directory until `stop` is set; then write exchange.json.

    The socket's directory goes with the hub, the last process that needs it: `up` may have been killed long before.
    """
    run_dir = RunDir(path)
    run, manifest = run_dir.read_config(), run_dir.read_manifest()
    config = HubConfig(
        run_id=manifest.run_id,
        members=frozenset(run.agents),
        edges=hub_edges(run),
        memory_bytes=run.exchange.memory_bytes,
        credit_messages=run.exchange.credit_messages,
        credit_bytes=run.exchange.credit_bytes,
        heartbeat_s=run.exchange.heartbeat_s,
        disk_bytes=max(run.exchange.disk_bytes, 1),
    )
    directory = run_dir.records if run.exchange.disk_bytes else None
    try:
        stats = await serve(manifest.endpoint, config, stop=stop, directory=directory)
    finally:
        remove_private_dir(manifest.endpoint)
    write_atomically(run_dir.exchange, msgspec.json.format(msgspec.json.encode(stats), indent=2))
