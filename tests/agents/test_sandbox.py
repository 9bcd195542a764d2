"""Reward functions in processes of their own: what they do there reaches nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pytest

from agents.errors import RewardError
from agents.rewards.config import SandboxedReward
from agents.rewards.rewards import Rewards
from agents.testing import make_prompt

JUDGES = '''
import asyncio, os, signal, socket, subprocess, sys, threading, time

def told(completions, **columns):
    """Does to itself what the completions say."""
    for text in completions:
        if text.startswith(("print", "hang", "exit", "crash", "hoard", "raise", "spin", "child")):
            act(text)
    return [float(len(text)) for text in completions]

def act(text):
    if text == "print":
        print("x" * 100_000); os.write(1, b"noise"); sys.stdin.read()
    if text == "hang":
        threading.Event().wait()
    if text == "spin":
        while True: pass
    if text == "exit":
        os._exit(3)
    if text == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if text == "hoard":
        bytearray(2**30)
    if text == "raise":
        raise LookupError("no such thing")
    if text.startswith("child"):
        child = subprocess.Popen(["sleep", "600"])
        open(text.split()[1], "w").write(str(child.pid))
        threading.Event().wait()

def process(completions):
    return [float(os.getpid()) for _ in completions]

def sockets(completions):
    kinds = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    return [float(sum("socket" in kind for kind in kinds))] * len(completions)

async def slow(completions):
    await asyncio.sleep(0.001)
    return [1.0 for _ in completions]

def alarmed(completions):
    signal.signal(signal.SIGALRM, lambda *_: None)
    return [1.0 if threading.current_thread() is threading.main_thread() else 0.0 for _ in completions]

def by_row(completion, answer, log_metric, policy=None, trainer_state=None):
    log_metric("seen", len(completion))
    if completion == "raise":
        raise LookupError("no such thing")
    return {"score": (completion == answer) + trainer_state.global_step + 10 * (policy == "alpha")}

def logs(completions, completion_ids, log_extra, log_metric):
    log_extra("length", [len(ids) for ids in completion_ids])
    log_metric("mine", 3)
    return [None if ids is None else float(sum(ids)) for ids in completion_ids]
'''


@pytest.fixture(autouse=True)
def judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sandbox_judges.py").write_text(JUDGES)
    monkeypatch.syspath_prepend(tmp_path)


Make = Callable[..., Rewards]


@pytest.fixture
def make() -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def made(*names: str, timeout_s: float = 30.0, on_error: Literal["raise", "abstain"] = "raise", **more: Any) -> Rewards:
            functions = [
                SandboxedReward(sandbox=f"sandbox_judges:{name}", timeout_s=timeout_s, memory_bytes=2**29) for name in names
            ]
            rewards = Rewards(functions, on_error=on_error, **more)
            stack.callback(rewards.close)
            return rewards

        yield made


async def score(rewards: Rewards, *texts: str) -> list[float | None]:
    prompts = [make_prompt(answer="ab") for _ in texts]
    total = (await rewards.score(prompts, [text.encode() for text in texts])).total
    return [None if np.isnan(each) else float(each) for each in total]


async def test_a_function_of_another_process_is_called_with_what_it_asks_for(make: Make) -> None:
    rewards = make("told", "by_row", policy="alpha")
    rewards.begin_step(3, steps=10)
    assert rewards.names == ("told", "by_row")
    assert await score(rewards, "ab", "xyz") == [2 + 1 + 3 + 10, 3 + 0 + 3 + 10]
    assert rewards.take() == {"seen": 2.5}
    assert rewards.take() == {}


async def test_ids_go_there_and_columns_and_metrics_come_back(make: Make) -> None:
    rewards = make("logs")
    ids = [np.array([1, 2, 3], dtype=np.int32), np.array([4], dtype=np.int32)]
    scores = await rewards.score([make_prompt()] * 2, [b"abc", b"d"], ids=ids)
    assert scores.total.tolist() == [6, 4]
    assert scores.extra == {"length": [3, 1]}
    assert rewards.take() == {"mine": 3.0}


@pytest.mark.slow
async def test_it_is_one_process_until_it_has_to_be_killed(make: Make) -> None:
    rewards = make("process")
    first, again = await score(rewards, "a"), await score(rewards, "a")
    assert first == again != [float(os.getpid())]
    process = int(first[0] or 0)
    os.kill(process, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert await score(rewards, "a") != first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "reason"),
    [
        ("hang", "'told' took longer than timeout_s=0.5 and was ended"),
        ("spin", "'told' took longer than timeout_s=0.5 and was ended"),
        ("exit", "'told' ended its process with exit code 3"),
        ("crash", "'told' had its process ended by SIGSEGV"),
        ("hoard", "'told' raised MemoryError"),
        ("raise", "'told' raised LookupError: no such thing"),
    ],
)
async def test_a_failure_is_named_and_the_next_call_is_judged(make: Make, act: str, reason: str) -> None:
    rewards = make("told", timeout_s=0.5)
    async with asyncio.timeout(30):
        with pytest.raises(RewardError, match=reason):
            await score(rewards, "ab", act)
        assert await score(rewards, "ab") == [2]


@pytest.mark.slow
async def test_a_failing_function_can_abstain_and_is_counted(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    rewards = make("told", "by_row", on_error="abstain")
    assert await score(rewards, "ab", "raise") == [1, None]
    assert rewards.take() == {"rewards/told/error": 2, "rewards/by_row/error": 1, "seen": 3.5}
    assert rewards.take() == {"rewards/told/error": 0, "rewards/by_row/error": 0}
    assert "reward 'by_row' abstains from 1 of 2 completions: it raised LookupError: no such thing" in caplog.text


async def test_what_it_prints_and_reads_does_not_meet_the_messages(make: Make) -> None:
    assert await score(make("told"), "print", "ab") == [5, 2]


async def test_it_inherits_no_socket(make: Make) -> None:
    pair = socket.socketpair()
    for end in pair:
        end.set_inheritable(True)
    assert await score(make("sockets"), "a") == [0]
    for end in pair:
        end.close()


@pytest.mark.slow
async def test_alarms_and_async_functions_work_there(make: Make) -> None:
    rewards = make("alarmed", "slow")
    assert await score(rewards, "a") == [2]
    assert await score(rewards, "a") == [2]


@pytest.mark.slow
async def test_a_cancelled_call_ends_the_process_and_its_children(make: Make, tmp_path: Path) -> None:
    rewards = make("told")
    note = tmp_path / "child"
    scoring = asyncio.create_task(score(rewards, f"child {note}"))
    child = await child_in(note)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    await gone(child)
    assert await score(rewards, "ab") == [2]


@pytest.mark.slow
async def test_it_ends_with_the_agent_though_it_hangs(tmp_path: Path) -> None:
    note = tmp_path / "child"
    program = (
        "import asyncio, sys; sys.path[:] = sys.argv[1:]\n"
        "from agents.rewards.config import SandboxedReward\n"
        "from agents.rewards.rewards import Rewards\n"
        "from agents.types import Prompt\n"
        "prompt = Prompt(id='p', task='t', messages=(), columns={})\n"
        "rewards = Rewards([SandboxedReward(sandbox='sandbox_judges:told')])\n"
        f"asyncio.run(rewards.score([prompt], [b'child {note}']))\n"
    )
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, *sys.path)
    try:
        child = await child_in(note)
        worker = child.parent()
    finally:
        agent.kill()
        await agent.wait()
    assert worker is not None
    await gone(child)
    await gone(worker)


async def child_in(note: Path) -> psutil.Process:
    """The process whose number a function has written there."""
    await asyncio.to_thread(until, lambda: note.exists() and bool(note.read_text()))
    return await asyncio.to_thread(lambda: psutil.Process(int(note.read_text())))


async def gone(process: psutil.Process) -> None:
    """Waits for the end of a process; one that nobody reaps yet has ended too."""
    await asyncio.to_thread(until, lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_a_sandboxed_function_that_blocks_leaves_the_event_loop_free(make: Make) -> None:
    rewards = make("told", timeout_s=0.5)
    beats = 0

    async def heartbeat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.01)

    heart = asyncio.create_task(heartbeat())
    started = time.monotonic()
    with pytest.raises(RewardError):
        await score(rewards, "spin")
    assert beats > 5, f"the loop stood still for {time.monotonic() - started:.1f} s"
    heart.cancel()


@pytest.mark.slow
def test_a_function_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "dies_on_import.py").write_text("import os; os._exit(7)")
    for reference, message in [
        ("no.such.module:f", "cannot be imported: ModuleNotFoundError"),
        ("exact_matsch", "unknown reward 'exact_matsch'"),
        ("dies_on_import:f", "cannot be started in a process of its own: it ended its process with exit code 7"),
    ]:
        with pytest.raises(RewardError, match=message):
            Rewards([SandboxedReward(sandbox=reference)])


async def test_columns_that_cannot_be_sent_are_named(make: Make) -> None:
    rewards = make("told")
    with pytest.raises(RewardError, match=r"'told' cannot be asked: a builtins\.object cannot be sent"):
        await rewards.score([make_prompt(answer=object())], [b"x"])
    scores = await rewards.score([make_prompt(answer=np.arange(3))], [b"x"])
    assert scores.total.tolist() == [1]


def test_its_fingerprint_is_that_of_the_function_in_the_agent(make: Make) -> None:
    assert make("told").fingerprint == Rewards(["sandbox_judges:told"]).fingerprint
