"""The agent's end of the vLLM process: starts it, asks it, and tells how it ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from agents.errors import SamplerError, SamplerTimeoutError
from agents.samplers.vllm_server import Answer, Failed, Question, read_frame, to_frame
from agents.samplers.weights import anonymous_file

A = TypeVar("A", bound=Answer)

LEAVE_S = 5.0
"""How long a process whose socket has been closed may take to end."""

_TAIL_BYTES = 4096
_TAIL_LINES = 20


class VLLMProcess:
    """A running server (agents/samplers/vllm_server.py). One question at a time; `close` from any thread.

    It belongs to this process's group, and ends when its socket does: with `close`, or with this process, however it
    ends. Its output goes to `log`.
    """

    def __init__(self, command: Sequence[str], *, environment: dict[str, str], log: Path) -> None:
        """command: what to run; the numbers of two file descriptors are put behind it. SamplerError if it cannot be."""
        self._weights_fd = anonymous_file()
        self._log = log
        self._socket, theirs = socket.socketpair()
        self._decoder = msgspec.msgpack.Decoder(Answer)
        self._started_s = time.monotonic()
        self._closing = threading.Lock()
        inherited = (theirs.fileno(), self._weights_fd)
        try:
            with log.open("ab") as output, theirs:
                self._process = subprocess.Popen(
                    [*command, *map(str, inherited)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=inherited,
                )
        except OSError as error:
            self._socket.close()
            os.close(self._weights_fd)
            raise SamplerError(f"the sampler's process cannot be started: {error}; set sampler.python") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def weights_fd(self) -> int:
        """The file in memory that both have open; SamplerError once the process has been closed."""
        if self._socket.fileno() < 0:
            raise SamplerError(f"the vLLM process {self._how_it_ended()}; {self._last_words()}")
        return self._weights_fd

    def since_start_s(self) -> float:
        """Seconds since the process was started."""
        return time.monotonic() - self._started_s

    def tell(self, question: Question, *, timeout_s: float) -> None:
        """Send a question whose answer is taken later. Raises like `ask`."""
        with self._watched(type(question).__name__, timeout_s):
            self._socket.settimeout(timeout_s)
            self._socket.sendall(to_frame(question))

    def hear(self, expected: type[A], *, timeout_s: float) -> A:
        """The answer to the last question. Raises like `ask`."""
        with self._watched(expected.__name__, timeout_s):
            answer = self._decoder.decode(read_frame(self._receiver(timeout_s)))
        if isinstance(answer, Failed):
            raise SamplerError(f"vLLM could not give {expected.__name__}: {answer.reason}; {self._last_words()}")
        if not isinstance(answer, expected):
            self.close()
            raise SamplerError(f"the vLLM process broke its protocol: got {type(answer).__name__}, not {expected.__name__}")
        return answer

    def ask(self, question: Question, expected: type[A], *, timeout_s: float) -> A:
        """Send and wait for the answer, `timeout_s` for each.

        SamplerTimeoutError when it does not come in time, SamplerError when the server says that it failed, says what
        nobody can read, or is gone. But for a failure that the server tells of, the process is ended then.
        """
        self.tell(question, timeout_s=timeout_s)
        return self.hear(expected, timeout_s=timeout_s)

    def close(self) -> None:
        """End the process, and a call that waits for it on another thread."""
        with suppress(OSError):  # wakes the other thread; the other side may have been first
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._closing:
            if self._socket.fileno() < 0:
                return
            try:
                self._process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._socket.close()
            os.close(self._weights_fd)

    def _receiver(self, timeout_s: float) -> Callable[[int], bytes]:
        deadline_s = time.monotonic() + timeout_s

        def receive(count: int) -> bytes:
            self._socket.settimeout(max(deadline_s - time.monotonic(), 1e-3))
            return self._socket.recv(count)

        return receive

    @contextmanager
    def _watched(self, what: str, timeout_s: float) -> Iterator[None]:
        """What goes wrong on the socket, as this package's errors."""
        try:
            yield
        except TimeoutError:
            self._process.kill()
            self.close()
            raise SamplerTimeoutError(
                f"{what} took the vLLM process longer than {timeout_s:g} s and it was ended; raise sampler.start_timeout_s or "
                f"sampler.request_timeout_s, or ask for less; {self._last_words()}"
            ) from None
        except (EOFError, OSError):
            self.close()
            raise SamplerError(f"the vLLM process {self._how_it_ended()} before {what}; {self._last_words()}") from None
        except ValueError as error:
            self.close()
            raise SamplerError(f"the vLLM process broke its protocol in {what}: {error}; {self._last_words()}") from None

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _last_words(self) -> str:
        with self._log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join([f"its log is {self._log}", *lines])
