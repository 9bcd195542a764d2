"""What tests against an exchange need: a clock to turn by hand, experience of every kind, a hub without transport."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from exchange.config import HubConfig
from exchange.hub import Hub
from exchange.messages import Hello, Publish, ToHub, ToWorker
from exchange.types import (
    AgentName,
    AnyExperience,
    GroupRewards,
    Message,
    PromptId,
    RolloutGroup,
    StepPrompts,
    VerifiedSuccesses,
    Version,
)
from exchange.wire import Buffer, Incoming, Outgoing, encode_record

__all__ = [
    "FakeClock",
    "HubDriver",
    "a_rollout_group",
    "a_success",
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


class HubDriver:
    """A hub on a fake clock, spoken to by worker name; every message is handled at once."""

    def __init__(self, config: HubConfig | None = None) -> None:
        self.clock = FakeClock()
        self.hub = Hub(HubConfig(run_id="r") if config is None else config, clock=self.clock)
        self._seq: dict[str, int] = {}
        self._request_id = 0

    def say(self, peer: str, message: ToHub, payload: Sequence[Buffer] = ()) -> list[Outgoing]:
        """Everything that one message causes."""
        self._request_id += 1
        frames = tuple(memoryview(frame) for frame in payload)
        return self.hub.handle(peer.encode(), Incoming(message=message, request_id=self._request_id, payload=frames))

    def ask(self, peer: str, message: ToHub, payload: Sequence[Buffer] = ()) -> ToWorker:
        """The answer to one message that is answered at once."""
        (answer,) = (out for out in self.say(peer, message, payload) if out.request_id == self._request_id)
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
