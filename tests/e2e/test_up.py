"""Whole runs of `mutualrl up` with the real hub and light agents: how they end, and what they leave behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from pathlib import Path

import psutil
import pytest
from processes import HANG_S, alive, eventually, stranger

from exchange.log import RecordLog
from mutualrl.errors import RunDirError
from mutualrl.rundir import RunDir, new_run_dir

pytestmark = pytest.mark.slow

FAKE_UP = Path(__file__).with_name("fake_up.py")


def run_file(folder: Path, *agents: str) -> Path:
    """A run file with these agents; what they do is in their names."""
    path = folder / f"{'-'.join(agents)}.toml"
    tables = "".join(f'[agents.{name}]\npolicy = {{ kind = "tiny" }}\n' for name in agents)
    path.write_text(f'name = "{"-".join(agents)}"\nsteps = 5\n[[tasks]]\nkind = "sort"\nname = "sort"\n{tables}')
    return path


async def start_up(config: Path, output_dir: Path, **environment: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *(str(FAKE_UP), str(config), str(output_dir)),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        env=os.environ | environment,
    )


async def end_of(process: Process) -> tuple[int, str]:
    """Exit code and everything that was printed."""
    async with asyncio.timeout(HANG_S):
        output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def until_stepping(run_dir: RunDir, *agents: str) -> None:
    """Wait until each of these agents has made a step."""

    def stepped() -> bool:
        rows = run_dir.metrics.read_text().splitlines(keepends=True) if run_dir.metrics.exists() else []
        return {json.loads(row)["agent"] for row in rows if row.endswith("\n")} >= set(agents)

    await eventually(stepped)


def pids(run_dir: RunDir) -> list[int]:
    return [role.pid for role in run_dir.read_manifest().roles]


async def test_a_run_to_its_end_under_an_ignored_sigchld_and_a_long_temporary_directory(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as short:
        long = Path(short) / ("d" * (150 - len(short)))
        long.mkdir()
        config = run_file(tmp_path, "quick1", "quick2")
        shell = f"trap '' CHLD; exec {sys.executable} {FAKE_UP} {config} {tmp_path / 'run'}"
        up = await asyncio.create_subprocess_exec(
            "bash", "-c", shell, stdout=PIPE, stderr=STDOUT, env=os.environ | {"TMPDIR": str(long), "XDG_RUNTIME_DIR": ""}
        )
        code, shown = await end_of(up)
    assert code == 0, shown
    run_dir = RunDir(tmp_path / "run")
    manifest = run_dir.read_manifest()
    assert (manifest.status, manifest.exit_code) == ("done", 0)
    assert {role.name: role.exit_code for role in manifest.roles} == {"hub": 143, "quick1": 0, "quick2": 0}
    assert not Path(manifest.endpoint.removeprefix("ipc://")).parent.exists()
    workers = json.loads(run_dir.exchange.read_text())["workers"]
    assert {name: worker["step"] for name, worker in workers.items()} == {"quick1": 5, "quick2": 5}
    assert run_dir.read_config().steps == 5
    recorded = {(row.agent, row.kind, row.step) for row in RecordLog(run_dir.records).rows()}
    assert recorded == {(name, "prompts", step) for name in ("quick1", "quick2") for step in range(1, 6)}


async def test_an_agent_that_raises_ends_the_run_with_1_and_its_traceback(tmp_path: Path) -> None:
    up = await start_up(run_file(tmp_path, "failing", "steady"), tmp_path / "run")
    code, shown = await end_of(up)
    run_dir = RunDir(tmp_path / "run")
    assert code == 1, shown
    assert "failing failed; its log is" in shown
    assert "RuntimeError: no luck in step 2" in shown
    assert (run_dir.read_manifest().status, run_dir.read_manifest().exit_code) == ("failed", 1)
    assert (run_dir.checkpoints / "steady").is_dir()
    assert run_dir.exchange.exists()
    assert not any(map(alive, pids(run_dir)))


async def test_an_agent_that_cannot_use_its_configuration_ends_the_run_with_2_and_no_traceback(tmp_path: Path) -> None:
    code, shown = await end_of(await start_up(run_file(tmp_path, "misfit", "steady"), tmp_path / "run"))
    assert code == 2, shown
    assert "agents.misfit.policy: the prompt is longer than the context" in shown
    assert "Traceback" not in shown


async def test_two_runs_side_by_side_one_directory_each_and_signals_that_drain(tmp_path: Path) -> None:
    first, second = RunDir(tmp_path / "first"), RunDir(tmp_path / "second")
    config = run_file(tmp_path, "steady1", "steady2")
    up_first, up_second = await start_up(config, first.path), await start_up(config, second.path)
    await until_stepping(first, "steady1", "steady2")
    await until_stepping(second, "steady1", "steady2")

    with pytest.raises(RunDirError, match=rf"{first.path} is in use by another run \(pid {up_first.pid}\)"):
        new_run_dir(first.path).__enter__()

    up_first.send_signal(signal.SIGINT)
    code, shown = await end_of(up_first)
    assert code == 130, shown
    assert (first.read_manifest().status, first.read_manifest().exit_code) == ("stopped", 130)
    assert {path.name for path in first.checkpoints.iterdir()} == {"steady1", "steady2"}
    assert not any(map(alive, pids(first)))
    assert all(map(alive, pids(second)))

    up_second.send_signal(signal.SIGTERM)
    code, _ = await end_of(up_second)
    assert code == 143
    assert not any(map(alive, pids(second)))


async def test_nothing_outlives_a_killed_supervisor_and_strangers_do(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    async with stranger() as unrelated:
        up = await start_up(run_file(tmp_path, "parent", "numb", "steady"), run_dir.path)
        await until_stepping(run_dir, "parent", "numb", "steady")
        descendants = psutil.Process(up.pid).children(recursive=True)
        assert len(descendants) == 5, f"hub, three agents, and a child of one of them, got {descendants}"
        ipc_dir = Path(run_dir.read_manifest().endpoint.removeprefix("ipc://")).parent
        up.kill()
        try:
            await eventually(lambda: not any(alive(process.pid) for process in descendants), within_s=HANG_S)
        except TimeoutError:
            pytest.fail(f"still alive: {[process for process in descendants if alive(process.pid)]}")
        finally:
            for process in psutil.wait_procs(descendants, timeout=0)[1]:
                process.kill()
        assert alive(unrelated)
    assert not ipc_dir.exists(), list(ipc_dir.iterdir())
    await end_of(up)


async def test_a_run_goes_on_when_nobody_reads_its_output(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = (str(FAKE_UP), str(run_file(tmp_path, "quick1", "quick2")), str(tmp_path / "run"))
    up = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=DEVNULL, stdout=writer, stderr=PIPE)
    os.close(writer)
    async with asyncio.timeout(HANG_S):
        _, errors = await up.communicate()
    assert (up.returncode, errors) == (0, b"")
    manifest = RunDir(tmp_path / "run").read_manifest()
    assert (manifest.status, [role.exit_code for role in manifest.roles]) == ("done", [143, 0, 0])
