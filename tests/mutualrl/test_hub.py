"""The hub's role: what it leaves in the run's directory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import exchange
from agents.config import AgentConfig, TinyPolicy
from agents.tasks.config import Sort
from mutualrl.config import Exchange, Run
from mutualrl.hub import hub_main
from mutualrl.manifest import Manifest
from mutualrl.rundir import RunDir


@pytest.mark.parametrize("disk_bytes", [0, 1 << 20])
async def test_a_run_is_recorded_unless_it_wants_nothing_on_disk(tmp_path: Path, disk_bytes: int) -> None:
    run_dir = RunDir(tmp_path)
    agents = {"alpha": AgentConfig(policy=TinyPolicy())}
    run_dir.write_config(Run(tasks=(Sort(name="sort"),), agents=agents, exchange=Exchange(disk_bytes=disk_bytes)))
    endpoint = f"ipc://{exchange.private_ipc_dir()}/hub"
    run_dir.write_manifest(Manifest(run_id="r", name="run", status="running", pid=0, started="", endpoint=endpoint))
    stop = asyncio.Event()
    stop.set()
    await hub_main(tmp_path, stop)
    assert run_dir.exchange.exists()
    assert run_dir.records.is_dir() == bool(disk_bytes)
