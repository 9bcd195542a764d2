"""The agent's end of the vLLM process: whatever the other end does, there is an answer or an error that tells why."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import psutil
import pytest

from agents.errors import SamplerError, SamplerTimeoutError
from agents.samplers import vllm_process
from agents.samplers.vllm_process import VLLMProcess
from agents.samplers.vllm_server import Load, Loaded, Ready

FAKE = str(Path(__file__).with_name("fake_vllm.py"))
QUESTION = Load(version="0.1")
HANG_S = 30.0


def start(mode: str, folder: Path) -> VLLMProcess:
    return VLLMProcess([sys.executable, FAKE, mode], environment=dict(os.environ), log=folder / "alpha.vllm.log")


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("dead on arrival", r"ended with exit code 1 before (Load|Ready); its log is .*alpha\.vllm\.log"),
        ("dying", r"ended with exit code 3 before Ready"),
        ("killed", r"was ended by SIGKILL before Ready"),
        ("cut off", r"ended with exit code 0 before Ready"),
        ("garbage", r"broke its protocol in Ready: "),
        ("boundless", r"broke its protocol in Ready: a frame has at most 1073741824 bytes, got length=4294967295"),
    ],
)
def test_a_server_that_breaks_off_is_told_of_with_its_end_and_its_log(mode: str, why: str, tmp_path: Path) -> None:
    process = start(mode, tmp_path)
    with pytest.raises(SamplerError, match=why) as raised:
        process.ask(QUESTION, Ready, timeout_s=HANG_S)
    assert f"fake engine, mode {mode}" in str(raised.value)
    assert gone(process.pid)
    with pytest.raises(SamplerError):
        process.ask(QUESTION, Ready, timeout_s=HANG_S)
    process.close()


@pytest.mark.parametrize("mode", ["silent", "dripping"])
def test_a_server_that_does_not_answer_in_time_is_ended(mode: str, tmp_path: Path) -> None:
    process = start(mode, tmp_path)
    with pytest.raises(SamplerTimeoutError, match=r"Ready took the vLLM process longer than 0\.3 s and it was ended; raise"):
        process.ask(QUESTION, Ready, timeout_s=0.3)
    assert gone(process.pid)


def test_an_answer_to_another_question_ends_the_process(tmp_path: Path) -> None:
    process = start("mistaken", tmp_path)
    with pytest.raises(SamplerError, match="got Ready, not Loaded"):
        process.ask(QUESTION, Loaded, timeout_s=HANG_S)
    assert gone(process.pid)


def test_a_failure_is_told_in_the_servers_words_and_the_server_lives(tmp_path: Path) -> None:
    process = start("sorry", tmp_path)
    for _ in range(2):
        with pytest.raises(SamplerError, match="vLLM could not give Loaded: ValueError: no room for keys and values"):
            process.ask(QUESTION, Loaded, timeout_s=HANG_S)
    process.close()
    process.close()
    assert gone(process.pid)
    with pytest.raises(SamplerError, match="the vLLM process ended with exit code 0; its log is"):
        os.fstat(process.weights_fd)


def test_closing_ends_a_call_that_waits_on_another_thread(tmp_path: Path) -> None:
    process = start("silent", tmp_path)
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            process.ask(QUESTION, Ready, timeout_s=HANG_S)
        except SamplerError as error:
            raised.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    process.close()
    asking.join(HANG_S)
    assert raised


def test_a_server_that_does_not_leave_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_process, "LEAVE_S", 0.05)
    process = start("stubborn", tmp_path)
    process.ask(QUESTION, Ready, timeout_s=HANG_S)
    process.close()
    assert gone(process.pid)


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SamplerError, match=r"cannot be started: .*no/such/python.*; set sampler\.python"):
        VLLMProcess(["no/such/python"], environment={}, log=tmp_path / "log")


def test_no_descriptors_are_left(tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    process = start("honest", tmp_path)
    process.ask(QUESTION, Ready, timeout_s=HANG_S)
    process.close()
    with pytest.raises(SamplerError):
        VLLMProcess(["no/such/python"], environment={}, log=tmp_path / "log")
    assert psutil.Process().num_fds() == before
