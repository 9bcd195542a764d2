"""What tests against an exchange need: a clock to turn by hand, experience of every kind, a hub without transport, a disk
that crashes."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from exchange.commits import Publication
from exchange.config import HubConfig
from exchange.errors import StorageError
from exchange.hub import Hub
from exchange.messages import Hello, Publish, ToHub, ToWorker
from exchange.store import Record
from exchange.types import (
    AgentName,
    AnyExperience,
    Cursor,
    Experience,
    GroupRewards,
    Message,
    PromptId,
    RolloutGroup,
    StepPrompts,
    VerifiedSuccesses,
    Version,
    kind_of,
    prompt_ids_of,
)
from exchange.wire import Buffer, Incoming, Outgoing, encode_record

__all__ = [
    "Crash",
    "CrashFiles",
    "FakeClock",
    "HubDriver",
    "a_rollout_group",
    "a_success",
    "publication_of",
    "rewards_of",
    "step_prompts",
]


class FakeClock:
    """Monotonic seconds that pass when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Crash(BaseException):
    """The machine stopped in the middle of something."""


@dataclass(slots=True)
class _CrashFile:
    """content: what a reader sees. durable: what a crash cannot take. pending: appended bytes and truncations since."""

    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    pending: list[bytes | int] = field(default_factory=list)
    named: bool = False


class CrashFiles:
    """Files in memory, on a machine that can stop, with a disk that can be full and whose syncs can fail.

    stop_in: so many more changes succeed, the next raises Crash half done. room_bytes: all files together; what does not
    fit raises StorageError after a part was written. failing_syncs: so many raise, and lose what they should have kept.
    """

    def __init__(self) -> None:
        self._files: dict[str, _CrashFile] = {}
        self._removed: dict[str, _CrashFile] = {}
        self.stop_in: int | None = None
        self.room_bytes: int | None = None
        self.failing_syncs = 0

    def crash(self, draw: Callable[[int], int]) -> None:
        """Keep what was synced, and of the rest any beginning. draw: gives a number from 0 to its argument."""
        self.stop_in = None
        for name, removed in self._removed.items():
            if draw(1):
                self._files.setdefault(name, removed)
        self._removed = {}
        for name, file in list(self._files.items()):
            if not file.named and draw(1):
                del self._files[name]
                continue
            kept = draw(len(file.pending))
            whole, cut = file.pending[:kept], file.pending[kept : kept + 1]
            if cut and isinstance(cut[0], bytes):
                count = draw(len(cut[0]))
                # The size may be on disk before the bytes are.
                zeros = bytes(len(cut[0]) - count) if draw(1) else b""
                whole.append(cut[0][:count] + zeros)
            durable = _apply(file.durable, whole)
            self._files[name] = _CrashFile(content=bytearray(durable), durable=durable, named=True)

    def append(self, name: str, buffers: Sequence[Buffer]) -> None:
        file = self._files.setdefault(name, _CrashFile())
        written = b"".join(buffers)
        room = len(written) if self.room_bytes is None else max(self.room_bytes - sum(self.sizes().values()), 0)
        file.content += written[:room]
        file.pending.append(written[:room])
        self._change()
        if room < len(written):
            raise StorageError(errno.ENOSPC, f"no space left, got path={name!r}")

    def sync(self, name: str) -> None:
        self._change()
        file = self._files.setdefault(name, _CrashFile())
        if self.failing_syncs:
            self.failing_syncs -= 1
            # The system takes the pages for clean and forgets them; a later sync does not bring them back.
            file.pending = [bytes(len(change)) if isinstance(change, bytes) else change for change in file.pending]
            raise StorageError(errno.EIO, f"input/output error, got path={name!r}")
        file.durable = _apply(file.durable, file.pending)
        file.pending = []

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        if name not in self._files:
            raise StorageError(errno.ENOENT, f"no such file, got path={name!r}")
        found = self._files[name].content[offset : offset + target.nbytes]
        target[: len(found)] = found
        return len(found)

    def truncate(self, name: str, nbytes: int) -> None:
        file = self._files.setdefault(name, _CrashFile())
        del file.content[nbytes:]
        file.pending.append(nbytes)
        self._change()

    def remove(self, name: str) -> None:
        if name in self._files:
            self._removed[name] = self._files.pop(name)
        self._change()

    def sizes(self) -> dict[str, int]:
        return {name: len(file.content) for name, file in self._files.items()}

    def sync_directory(self) -> None:
        self._change()
        self._removed = {}
        for file in self._files.values():
            file.named = True

    def damage(self, name: str, offset: int) -> None:
        """Turn every bit of one byte that was already durable."""
        file = self._files[name]
        file.content[offset] ^= 0xFF
        file.durable = bytes(file.content)

    def _change(self) -> None:
        if self.stop_in is not None:
            if not self.stop_in:
                raise Crash
            self.stop_in -= 1


def _apply(durable: bytes, changes: Sequence[bytes | int]) -> bytes:
    for change in changes:
        durable = durable + change if isinstance(change, bytes) else durable[:change]
    return durable


class HubDriver:
    """A hub on a fake clock, spoken to by worker name; every message is handled at once. request_id: of the last one."""

    def __init__(self, config: HubConfig | None = None) -> None:
        self.clock = FakeClock()
        self.hub = Hub(HubConfig(run_id="r") if config is None else config, clock=self.clock)
        self._seq: dict[str, int] = {}
        self.request_id = 0

    def say(self, peer: str, message: ToHub, payload: Sequence[Buffer] = ()) -> list[Outgoing]:
        """Everything that one message causes."""
        self.request_id += 1
        frames = tuple(memoryview(frame) for frame in payload)
        incoming = Incoming(message=message, request_id=self.request_id, payload=frames)
        return self.hub.handle(peer.encode(), incoming) + self.hub.answers()

    def ask(self, peer: str, message: ToHub, payload: Sequence[Buffer] = ()) -> ToWorker:
        """The answer to one message that is answered at once."""
        (answer,) = (out for out in self.say(peer, message, payload) if out.request_id == self.request_id)
        return answer.message

    def join(self, *names: str) -> None:
        for name in names:
            self.ask(name, Hello(name=AgentName(name), run_id=self.hub.config.run_id))

    def publish(self, experience: AnyExperience, *, seq: int | None = None) -> ToWorker:
        """Publish in the name of the producer, under its next sequence number unless given."""
        name = experience.agent
        self._seq[name] = self._seq.get(name, 0) + 1 if seq is None else seq
        record = encode_record(experience)
        return self.ask(name, Publish(seq=self._seq[name], body=record.body), record.frames)


def publication_of(experience: Experience, cursor: int, *, at: float = 1000.0) -> Publication:
    """One record on its way to the disk, as a hub would have admitted it at that time."""
    record = Record(
        cursor=Cursor(cursor),
        kind=kind_of(experience),
        agent=experience.agent,
        prompt_ids=prompt_ids_of(experience),
        step=experience.step,
        version=experience.version,
        encoded=encode_record(experience),
        stored_at=at,
    )
    return Publication(record=record, peer=b"incarnation", seq=cursor)


def step_prompts(agent: str, step: int, *prompt_ids: str, epoch: int = 0) -> StepPrompts:
    """The prompts of one step of an agent."""
    return StepPrompts(
        agent=AgentName(agent),
        step=step,
        version=Version(epoch, step),
        prompt_ids=tuple(PromptId(prompt) for prompt in prompt_ids),
    )


def rewards_of(agent: str, step: int, prompt_id: str, rewards: Sequence[float] = (1.0, 0.0), *, epoch: int = 0) -> GroupRewards:
    """Rewards of one group, sampled by the version of the same number as the step."""
    return GroupRewards(
        agent=AgentName(agent),
        step=step,
        version=Version(epoch, step),
        prompt_id=PromptId(prompt_id),
        task="reverse",
        rewards=np.array(rewards, np.float32),
        reward_fingerprint="exact_match",
    )


def a_success(agent: str, step: int, prompt_id: str, text: str = "cba", *, epoch: int = 0) -> VerifiedSuccesses:
    """One verified success, tokenized byte by byte."""
    content = text.encode()
    return VerifiedSuccesses(
        agent=AgentName(agent),
        step=step,
        version=Version(epoch, step),
        prompt_id=PromptId(prompt_id),
        task="reverse",
        texts=np.frombuffer(content, np.uint8),
        text_lengths=np.array([len(content)], np.int32),
        token_ends=np.arange(1, len(content) + 1, dtype=np.int32),
        token_counts=np.array([len(content)], np.int32),
        rewards=np.ones(1, np.float32),
        tokenizer="bytes",
    )


def a_rollout_group(
    agent: str, step: int, prompt_id: str, *, completions: int = 8, tokens: int = 4, epoch: int = 0
) -> RolloutGroup:
    """A whole group of `completions` of `tokens` tokens each: one byte a token, numbers that differ everywhere."""
    total = completions * tokens
    return RolloutGroup(
        agent=AgentName(agent),
        step=step,
        version=Version(epoch, step),
        prompt_id=PromptId(prompt_id),
        task="reverse",
        messages=(Message(role="user", content="reverse abc:"),),
        texts=np.arange(total, dtype=np.int64).astype(np.uint8),
        text_lengths=np.full(completions, tokens, np.int32),
        token_ends=np.tile(np.arange(1, tokens + 1, dtype=np.int32), completions),
        token_counts=np.full(completions, tokens, np.int32),
        ids=np.arange(total, dtype=np.int32),
        logprobs=-np.linspace(0, 1, total, dtype=np.float32),
        finished=np.ones(completions, np.bool_),
        rewards=np.arange(completions, dtype=np.float32),
        reward_fingerprint="exact_match",
        tokenizer="bytes",
        temperature=1.0,
    )
