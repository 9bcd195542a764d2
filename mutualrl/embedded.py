"""A run inside this process: its hub and its agents as tasks of one event loop, each agent with its own torch thread.

The coroutines are those that the processes of `mutualrl up` run (mutualrl/hub.py, mutualrl/wiring.py), on the same run
directory, so that a run of a program and a run of the command line are the same code.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from agents.loop import Parts
from agents.stopping import unless_stopped
from exchange.endpoints import private_ipc_dir
from exchange.types import AgentName
from mutualrl import exit_codes
from mutualrl.checkpoints import join
from mutualrl.config import Run
from mutualrl.given import Given
from mutualrl.hub import hub_main
from mutualrl.manifest import Manifest, Status, installed_versions, now
from mutualrl.rundir import RunDir
from mutualrl.trackers import Reporter
from mutualrl.wiring import build_parts, take_part

logger = logging.getLogger("mutualrl.trainer")


async def run_embedded(run: Run, run_dir: RunDir, given: Given, stop: asyncio.Event) -> tuple[bool, dict[str, Parts]]:
    """Run to the end, or until `stop` is set; returns whether all steps were made, and what the agents were made of.

    Raises what the first agent that failed raised, when the others have finished their step and saved. Cancelled, it does
    the same and leaves no task behind; a computation that has begun runs to its end on its thread.
    """
    ipc_dir = private_ipc_dir()
    manifest = Manifest(
        run_id=f"{run.name}-{secrets.token_hex(4)}",
        name=run.name,
        status="running",
        pid=os.getpid(),
        started=now(),
        endpoint=f"ipc://{ipc_dir}/hub",
        versions=installed_versions(),
    )
    status: Status = "failed"
    parts: dict[str, Parts] = {}
    run_dir.write_config(run)
    run_dir.write_manifest(manifest)
    try:
        await unless_stopped(stop, _build(run, run_dir, given, into=parts))
        with Reporter(run, run_dir, manifest, tell=logger.warning) as reporter:
            finished = not stop.is_set() and await _train(run, run_dir, manifest, parts, stop)
            await asyncio.to_thread(reporter.finish)
        status = "done" if finished else "stopped"
        return finished, parts
    finally:
        for each in parts.values():
            each.rewards.close()
            each.sampler.close()
        join(run_dir.checkpoints, run)
        code = {"done": exit_codes.DONE, "failed": exit_codes.RUN_FAILED}.get(status)
        run_dir.write_manifest(msgspec.structs.replace(manifest, status=status, exit_code=code, ended=now()))
        shutil.rmtree(ipc_dir, ignore_errors=True)


async def _build(run: Run, run_dir: RunDir, given: Given, *, into: dict[str, Parts]) -> None:
    """Every agent's parts, one after the other: building draws from torch's one generator."""
    builder = ThreadPoolExecutor(1, thread_name_prefix="build")
    loop = asyncio.get_running_loop()
    try:
        for name in run.agents:
            build = partial(build_parts, run, AgentName(name), run_dir, given=given)
            into[name] = await loop.run_in_executor(builder, build)
    finally:
        builder.shutdown(wait=False, cancel_futures=True)


async def _train(run: Run, run_dir: RunDir, manifest: Manifest, parts: Mapping[str, Parts], stop: asyncio.Event) -> bool:
    """Hub and agents until all agents have left; whether each made all its steps."""
    ended = asyncio.Event()

    async def play(name: str) -> bool:
        try:
            return await take_part(run, manifest, AgentName(name), parts[name], stop)
        except BaseException:
            stop.set()  # the others finish their step and save
            raise

    hub = asyncio.create_task(hub_main(run_dir.path, ended))
    agents = [asyncio.create_task(play(name)) for name in parts]
    try:
        waiting: list[asyncio.Future[Any]] = [hub, asyncio.gather(*agents, return_exceptions=True)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for agent in agents:
            agent.cancel()
        results = await asyncio.gather(*agents, return_exceptions=True)
        ended.set()
        await hub
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return all(results)
