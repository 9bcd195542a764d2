"""The processes of a run whose agents are light: they join the real hub, then do what their name says.

steady…     joins, writes a metrics row per step, runs until told to stop
quick…      does so for `steps` steps and is done
failing…    raises in its second step
parent…     like steady, with a child process in its group
misfit…     cannot use its configuration
numb…       never looks at the stop event, and blocks its event loop
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import exchange
from exchange.testing import step_prompts
from exchange.types import Version
from mutualrl.errors import ConfigError
from mutualrl.roles import main
from mutualrl.rundir import RunDir


async def agent_main(path: Path, name: str, stop: asyncio.Event) -> None:
    """Behave as `name` says."""
    run_dir = RunDir(path)
    run, manifest = run_dir.read_config(), run_dir.read_manifest()
    if name.startswith("misfit"):
        raise ConfigError(f"agents.{name}.policy: the prompt is longer than the context")
    async with exchange.connect(manifest.endpoint, name=name, run_id=manifest.run_id, connect_timeout_s=30) as client:
        if name.startswith("parent"):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # noqa: ASYNC220
            print("child", child.pid, flush=True)
        step = 0
        while not stop.is_set() and (step < run.steps or not name.startswith("quick")):
            step += 1
            await client.progress(step=step, version=Version(client.epoch, step))
            _log(run_dir, name, step)
            if name.startswith("quick"):
                await client.publish(step_prompts(name, step, f"p{step}", epoch=client.epoch))
            if name.startswith("numb"):
                time.sleep(600)  # noqa: ASYNC251
            if name.startswith("failing") and step == 2:
                raise RuntimeError(f"no luck in step {step}")
            try:
                async with asyncio.timeout(0.02):
                    await stop.wait()
            except TimeoutError:
                continue
        saved = run_dir.final_checkpoint(name) if step == run.steps else run_dir.checkpoints / name / f"step-{step}"
        saved.mkdir(parents=True)


def _log(run_dir: RunDir, name: str, step: int) -> None:
    row = {"agent": name, "step": step, "wall_s": 0.02 * step, f"{name}/reward/sort": 0.5, f"{name}/step_time": 0.02}
    with run_dir.metrics.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(agent_main=agent_main)
