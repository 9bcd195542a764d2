"""The supervisor over real but light processes: every role is a few lines of Python."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest
from processes import alive, eventually, stranger

from agents.config import AgentConfig, TinyPolicy
from agents.tasks.config import Sort
from mutualrl.config import Run
from mutualrl.manifest import Manifest
from mutualrl.rundir import RunDir
from mutualrl.spawn import DeathPipe, spawn
from mutualrl.supervise import Deadlines, Supervisor

pytestmark = pytest.mark.slow

SIGTERM_WAITS = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
UNTIL_STOPPED = SIGTERM_WAITS + "print('up', flush=True); signal.sigwait({signal.SIGTERM}); print('saved')"
HUB = UNTIL_STOPPED


def done(path: Path, agent: str) -> str:
    """A script that makes all its steps at once."""
    return f"import os; os.makedirs({str(path / 'checkpoints' / agent / 'final')!r})"


RAISES = "raise RuntimeError('no luck today')"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile True: time.sleep(60)"
)
# A child that outlives its parent's drain: only a signal to the process group reaches it.
WITH_CHILD = (
    SIGTERM_WAITS + "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print('up', child.pid, flush=True); signal.sigwait({signal.SIGTERM})"
)


def once_up(path: Path, role: str) -> str:
    """A script that ends, or goes on to what stands behind it, when another role has printed something."""
    log = str(path / "logs" / f"{role}.log")
    return f"import os, time\nwhile not os.path.getsize({log!r}): time.sleep(0.01)\n"


class Harness:
    """A supervisor whose roles run the given scripts."""

    def __init__(self, path: Path, deadlines: Deadlines, hub: str = HUB, **agents: str) -> None:
        config = AgentConfig(policy=TinyPolicy())
        run = Run(tasks=(Sort(name="sort"),), agents=dict.fromkeys(agents, config))
        scripts = {"hub": hub, **agents}
        self.dir = RunDir(path)
        (path / "logs").mkdir()
        self.told: list[str] = []
        self.supervisor = Supervisor(
            run,
            self.dir,
            Manifest(run_id="r", name="n", status="starting", pid=0, started="", endpoint="ipc://unused"),
            tell=self.told.append,
            before_hub=self.note_hub,
            deadlines=deadlines,
            command=lambda _, role: ["-c", scripts[role]],
        )

    async def note_hub(self) -> None:
        hub, *agents = self.dir.read_manifest().roles
        self.told.append(f"before hub: {alive(hub.pid)}, {any(alive(agent.pid) for agent in agents)}")

    async def until_up(self, *roles: str) -> None:
        await eventually(lambda: all(self.dir.log(r).exists() and self.dir.log(r).read_text() for r in roles))

    def nobody_lives(self) -> bool:
        return not any(alive(role.pid) for role in self.dir.read_manifest().roles)


PATIENT = Deadlines(drain_s=30, leave_s=30)
IMPATIENT = Deadlines(drain_s=0.05, leave_s=0.05)


async def test_agents_that_end_early_do_not_end_the_run(tmp_path: Path) -> None:
    harness = Harness(tmp_path, PATIENT, alpha=done(tmp_path, "alpha"), beta=UNTIL_STOPPED)
    running = asyncio.create_task(harness.supervisor.run())
    await harness.until_up("beta")
    await eventually(lambda: "alpha is done" in harness.told)
    assert not running.done()
    harness.supervisor.interrupt(signal.SIGTERM)
    outcome = await running
    assert (outcome.status, outcome.exit_code) == ("stopped", 143)
    assert harness.dir.log("beta").read_text() == "up\nsaved\n"
    assert harness.nobody_lives()


async def test_a_run_is_done_when_all_agents_are_and_the_hub_ends_last(tmp_path: Path) -> None:
    alpha, beta = (once_up(tmp_path, "hub") + done(tmp_path, agent) for agent in ("alpha", "beta"))
    harness = Harness(tmp_path, PATIENT, alpha=alpha, beta=beta)
    outcome = await harness.supervisor.run()
    assert (outcome.status, outcome.exit_code, outcome.failure) == ("done", 0, None)
    assert harness.told[-1] == "before hub: True, False"
    assert harness.dir.log("hub").read_text() == "up\nsaved\n"
    manifest = harness.dir.read_manifest()
    assert (manifest.status, manifest.exit_code, manifest.pid) == ("done", 0, os.getpid())
    assert [(role.name, role.exit_code) for role in manifest.roles] == [("hub", 0), ("alpha", 0), ("beta", 0)]
    assert manifest.ended is not None


async def test_an_agent_that_raises_ends_the_run_with_its_traceback_and_drains_the_others(tmp_path: Path) -> None:
    harness = Harness(tmp_path, PATIENT, alpha=UNTIL_STOPPED, beta=once_up(tmp_path, "alpha") + RAISES)
    outcome = await harness.supervisor.run()
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
    assert outcome.failure is not None
    assert outcome.failure.startswith(f"beta failed; its log is {harness.dir.log('beta')}\nTraceback (most recent")
    assert outcome.failure.endswith("RuntimeError: no luck today")
    assert "saved" in harness.dir.log("alpha").read_text()
    assert harness.nobody_lives()


@pytest.mark.parametrize(
    ("script", "exit_code", "text"),
    [
        ("import sys; print('bad value', file=sys.stderr); sys.exit(2)", 2, "cannot use its configuration.*\nbad value"),
        ("import os; os.kill(os.getpid(), 9)", 1, r"was ended by SIGKILL \(out of memory\?\)"),
        ("import os; os._exit(1)", 1, "alpha failed"),
        ("print('bye')", 1, "alpha ended before its time; .*\nbye"),
    ],
)
async def test_how_an_agent_failed_is_said(tmp_path: Path, script: str, exit_code: int, text: str) -> None:
    outcome = await Harness(tmp_path, PATIENT, alpha=script).supervisor.run()
    assert outcome.exit_code == exit_code
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(outcome.failure)


@pytest.mark.parametrize("hub", [RAISES, "pass"])
async def test_a_hub_that_ends_first_fails_the_run(tmp_path: Path, hub: str) -> None:
    harness = Harness(tmp_path, PATIENT, hub=hub, alpha=UNTIL_STOPPED)
    outcome = await harness.supervisor.run()
    assert outcome.exit_code == 1
    assert outcome.failure is not None and outcome.failure.startswith("hub ")
    assert harness.nobody_lives()


async def test_a_stubborn_agent_is_killed_after_the_deadlines(tmp_path: Path) -> None:
    harness = Harness(tmp_path, IMPATIENT, alpha=STUBBORN)
    running = asyncio.create_task(harness.supervisor.run())
    await harness.until_up("alpha")
    harness.supervisor.interrupt()
    outcome = await running
    assert outcome.exit_code == 130
    assert [line for line in harness.told if line.startswith("alpha")] == [
        "alpha has not left; sending SIGTERM",
        "alpha has not left; sending SIGKILL",
    ]
    assert {role.name: role.exit_code for role in harness.dir.read_manifest().roles}["alpha"] == -9


async def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    harness = Harness(tmp_path, Deadlines(drain_s=3600, leave_s=3600), alpha=STUBBORN, beta=STUBBORN)
    running = asyncio.create_task(harness.supervisor.run())
    await harness.until_up("alpha", "beta")
    harness.supervisor.interrupt()
    await asyncio.sleep(0)
    harness.supervisor.interrupt()
    async with asyncio.timeout(30):
        outcome = await running
    assert outcome.exit_code == 130
    assert harness.nobody_lives()


async def test_what_a_role_leaves_behind_ends_with_it_and_strangers_live(tmp_path: Path) -> None:
    harness = Harness(tmp_path, PATIENT, alpha=WITH_CHILD)
    async with stranger() as unrelated:
        running = asyncio.create_task(harness.supervisor.run())
        await harness.until_up("alpha")
        child = psutil.Process(int(harness.dir.log("alpha").read_text().split()[1]))
        harness.supervisor.interrupt()
        await running
        try:
            await eventually(lambda: not alive(child.pid))
        finally:
            for process in psutil.wait_procs([child], timeout=0)[1]:
                process.kill()
        assert alive(unrelated)


async def test_a_cancelled_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    harness = Harness(tmp_path, PATIENT, alpha=STUBBORN)
    running = asyncio.create_task(harness.supervisor.run())
    await harness.until_up("alpha")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert harness.nobody_lives()
    assert harness.dir.read_manifest().status == "failed"


async def test_however_often_it_is_cancelled_the_end_is_recorded(tmp_path: Path) -> None:
    """As when an exit in another task makes asyncio cancel every task at once, those that wait for roles too."""
    harness = Harness(tmp_path, PATIENT, alpha=STUBBORN)
    running = asyncio.create_task(harness.supervisor.run())
    await harness.until_up("alpha")
    everything = asyncio.all_tasks() - {asyncio.current_task()}
    for _ in range(3):
        for task in everything:
            task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert harness.nobody_lives()
    manifest = harness.dir.read_manifest()
    assert (manifest.status, {role.exit_code for role in manifest.roles}) == ("failed", {-9})


async def test_agents_that_are_done_before_they_are_watched_are_judged_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tmp_path, PATIENT, alpha=RAISES)
    start = harness.supervisor._start

    async def start_slowly(pipe: DeathPipe) -> None:
        await start(pipe)
        await asyncio.wait([end for role, end in harness.supervisor._ends.items() if role.name == "alpha"])

    monkeypatch.setattr(harness.supervisor, "_start", start_slowly)
    outcome = await harness.supervisor.run()
    assert outcome.failure is not None and "no luck today" in outcome.failure


async def test_a_manifest_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    harness = Harness(tmp_path, PATIENT, alpha=done(tmp_path, "alpha"))
    harness.supervisor._before_hub = None
    harness.dir.manifest.mkdir()
    outcome = await harness.supervisor.run()
    assert (outcome.status, outcome.exit_code) == ("done", 0)
    assert harness.told[-1].startswith(f"warning: {harness.dir.manifest} could not be written: ")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
async def test_signals_drain_and_give_their_codes(tmp_path: Path, number: signal.Signals, code: int) -> None:
    # Under `nohup` a hang-up is ignored from the start, and stays so.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        harness = Harness(tmp_path, PATIENT, alpha=UNTIL_STOPPED)
        running = asyncio.create_task(harness.supervisor.run())
        await harness.until_up("alpha")
        os.kill(os.getpid(), number)
        outcome = await running
        assert (outcome.status, outcome.exit_code) == ("stopped", code)
    finally:
        signal.signal(number, before)


async def test_a_hang_up_that_is_ignored_stays_so(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        harness = Harness(tmp_path, PATIENT, alpha=UNTIL_STOPPED)
        running = asyncio.create_task(harness.supervisor.run())
        await harness.until_up("alpha")
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await running).exit_code == 143
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_role_knows_its_threads_and_leads_its_own_group(tmp_path: Path) -> None:
    script = "import os; print(os.environ['OMP_NUM_THREADS'], os.getpgrp() == os.getpid() == os.getsid(0), flush=True)"
    pipe = DeathPipe()
    role = await spawn("alpha", ["-c", script], log=tmp_path / "log", death_pipe=pipe, threads=3)
    assert await role.wait() == 0
    pipe.close()
    assert (tmp_path / "log").read_text() == "3 True\n"


async def test_the_kernel_is_asked_for_a_signal_only_from_the_main_thread(tmp_path: Path) -> None:
    """PDEATHSIG fires when the spawning thread ends: a role that another thread starts must do without."""
    script = "import sys; print('--supervisor-pid' in sys.argv)"

    async def start(log: Path) -> None:
        pipe = DeathPipe()
        await (await spawn("alpha", ["-c", script], log=log, death_pipe=pipe)).wait()
        pipe.close()

    await start(tmp_path / "main")
    thread = threading.Thread(target=lambda: asyncio.run(start(tmp_path / "thread")))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert ((tmp_path / "main").read_text(), (tmp_path / "thread").read_text()) == ("True\n", "False\n")
