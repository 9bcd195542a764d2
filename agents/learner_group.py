"""A learner whose weights lie on several processes: rank 0 leads, the others follow.

    leader     has the whole policy, samples from it, and saves it; its learner holds a part, like every other
    step       the leader writes the step's rows to a private file and says so to the followers by their standard input;
               all take the step together, and the leader's policy gets the new weights
    followers  wait for the next word; its end is theirs

Only tensors go through the process group. So nobody sits in a collective operation while the leader samples, and whoever
loses the leader ends, wherever it waits.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from agents.dump import StepDump, read_dump, write_dump
from agents.errors import AgentError
from agents.learner import Learner, LearnerState
from agents.ranks import Ranks, whole
from agents.rows import Row

LEARN, STATE = "learn", "state"


class Followers:
    """The processes of ranks 1 and up, which end with this one.

    They write where this process writes, and stay in its process group.
    """

    def __init__(self, commands: Sequence[Sequence[str]], *, on_death: Callable[[int, int], None]) -> None:
        """on_death: called with the rank and exit code of one that ends before `close`, from a thread of its own."""
        self._on_death = on_death
        self._closing = False
        self._processes = [subprocess.Popen(command, stdin=subprocess.PIPE) for command in commands]
        self._watchers = [
            threading.Thread(target=self._watch, args=(rank, process), daemon=True)
            for rank, process in enumerate(self._processes, start=1)
        ]
        for watcher in self._watchers:
            watcher.start()

    def tell(self, line: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its watcher tells of its end
                process.stdin.write(line.encode() + b"\n")
                process.stdin.flush()

    def close(self) -> None:
        """Let them end, and wait for it."""
        self._closing = True
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for watcher in self._watchers:
            watcher.join()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            self._on_death(rank, code)


class LearnerGroup:
    """What `Learner` is to an agent, for rank 0 of a group. Not thread-safe either."""

    def __init__(self, learner: Learner, model: nn.Module, ranks: Ranks, followers: Followers) -> None:
        """learner: over a sharded copy of `model`, whose weights follow the learner's."""
        self._learner = learner
        self._model = model
        self._ranks = ranks
        self._followers = followers
        self._together = True
        self._scratch = tempfile.TemporaryDirectory(prefix="rows-")

    @property
    def steps(self) -> int | None:
        """See `Learner.steps`; None too when the ranks may no longer be at the same place."""
        return self._learner.steps if self._together else None

    def step(self, rows: Sequence[Row], *, prompts: int) -> dict[str, float]:
        """See `Learner.step`; the same numbers, but for rounding, as from one process."""
        dump = write_dump(Path(self._scratch.name), StepDump(agent="", step=0, prompts=prompts, rows=rows))
        with self._in_step(f"{LEARN} {dump}"):
            metrics = self._learner.step(rows, prompts=prompts)
            weights = dict(self._model.named_parameters())
            for name, tensor in trained(self._learner.model):
                weights[name].data.copy_(tensor)
            return metrics

    def state(self) -> LearnerState:
        """See `Learner.state`; whole tensors, in the memory of the CPU, which any number of ranks can restore."""
        if self.steps is None:
            raise ValueError("a step that failed in the middle of its updates cannot be resumed")
        with self._in_step(STATE):
            state = self._learner.state()
            return replace(state, tensors={name: whole(tensor).cpu() for name, tensor in state.tensors.items()})

    def restore(self, state: LearnerState) -> None:
        """See `Learner.restore`. Every rank restores its own part; nothing passes between them."""
        self._learner.restore(state)

    def close(self) -> None:
        """Let the followers end."""
        self._followers.close()
        self._scratch.cleanup()

    @contextmanager
    def _in_step(self, line: str) -> Iterator[None]:
        self._together, was_together = False, self._together
        self._followers.tell(line)
        try:
            with self._ranks.here():
                yield
        except AgentError:  # met by all ranks alike
            self._together = was_together
            raise
        self._together = was_together


def follow(learner: Learner, ranks: Ranks, lines: Iterable[str]) -> None:
    """Be a follower until `lines` end. A step that cannot be taken is the leader's to tell of."""
    for line in lines:
        word, _, path = line.strip().partition(" ")
        with ranks.here(), contextlib.suppress(AgentError):
            if word == LEARN:
                dump = read_dump(Path(path))
                learner.step(dump.rows, prompts=dump.prompts)
                for _ in trained(learner.model):
                    pass
            else:
                for tensor in learner.state().tensors.values():
                    whole(tensor)


def trained(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that training changes, whole, one after the other. To be run through by all ranks."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, whole(parameter.detach())
