"""Doubles for tests of rules, objectives and the learner: an enumerable language model and a scripted receiver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from agents.types import Completion, Group, Prompt
from exchange.types import AgentName, Message, PromptId, RolloutGroup, Version
from tokenalign import Trace, Translation, Translator


class BigramLM(nn.Module):
    """A causal LM with V tokens whose logits depend on the token before only, so that all sequences can be enumerated.

    Speaks the part of the Hugging Face interface that the learner uses.
    """

    def __init__(self, vocab_size: int, *, seed: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(vocab_size, vocab_size, generator=generator, dtype=dtype))

    def forward(self, input_ids: Tensor, logits_to_keep: int = 0, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids][:, -logits_to_keep:])

    def sequences(self, start: int, *, eos: int, max_length: int) -> list[tuple[list[int], float]]:
        """All completions after `start`, each with its probability: ended by `eos` or cut at max_length."""
        logprobs = torch.log_softmax(self.table.detach(), dim=-1)

        def extend(ids: list[int], logprob: float) -> list[tuple[list[int], float]]:
            if ids and (ids[-1] == eos or len(ids) == max_length):
                return [(ids, float(np.exp(logprob)))]
            last = ids[-1] if ids else start
            return [
                each for token in range(len(logprobs)) for each in extend([*ids, token], logprob + float(logprobs[last, token]))
            ]

        return extend([], 0.0)


class ScriptedReceiver:
    """Judges texts with a given function and translates them with a given translator."""

    def __init__(
        self,
        judge: Callable[[Prompt, bytes], float],
        translator: Translator | None = None,
        *,
        tokenizer_fingerprint: str = "receiver",
        reward_fingerprint: str = "reward",
        max_tokens: int = 64,
    ) -> None:
        self._judge = judge
        self._translator = translator
        self._max_tokens = max_tokens
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.reward_fingerprint = reward_fingerprint
        self.verified: list[bytes] = []

    async def verify(self, prompts: Sequence[Prompt], texts: Sequence[bytes]) -> npt.NDArray[np.float32]:
        self.verified += texts
        return np.array([self._judge(*pair) for pair in zip(prompts, texts, strict=True)], dtype=np.float32)

    def adopt(self, peer: Trace, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        return ids

    def translate(self, peers: Sequence[Trace]) -> Translation:
        if self._translator is not None:
            return self._translator.translate_batch(peers, max_tokens=self._max_tokens)
        if peers:
            raise AssertionError("this test does not expect a translation")
        nothing = np.empty(0, dtype=np.int64)
        return Translation(
            ids=nothing.astype(np.int32),
            ends=nothing,
            cu=np.zeros(1, dtype=np.int64),
            alignment=None,
            span_logprobs=None,
            mask=None,
            residuals=[],
        )


def make_prompt(key: str = "p0", *, task: str = "reverse", text: str = "reverse ab:", **columns: object) -> Prompt:
    """A prompt with the given id."""
    return Prompt(
        id=PromptId(key), task=task, messages=(Message(role="user", content=text),), columns=columns or {"answer": "ba"}
    )


def make_group(prompt: Prompt, rewards: Sequence[float], *, step: int = 0, ids: Sequence[Sequence[int]] | None = None) -> Group:
    """A scored group of finished completions; `ids` default to one distinct token each, all spelled "x"."""
    sequences = ids or [[index + 1, 0] for index in range(len(rewards))]
    completions = tuple(
        Completion(
            ids=np.array(each, dtype=np.int32),
            logprobs=np.full(len(each), -1.0, dtype=np.float32),
            ends=np.minimum(np.arange(1, len(each) + 1), len(each) - 1).astype(np.int32),
            text=b"x" * (len(each) - 1),
            finished=True,
            has_eos=True,
        )
        for each in sequences
    )
    return Group(
        prompt=prompt,
        prompt_ids=np.array([0], dtype=np.int32),
        completions=completions,
        step=step,
        version=Version(0, step),
        rewards=np.array(rewards, dtype=np.float32),
    )


def make_rollouts(
    texts: list[bytes],
    *,
    agent: str = "beta",
    finished: bool = True,
    tokenizer: str = "source",
    step: int = 0,
) -> RolloutGroup:
    """A peer's group: one source token for each text (log-prob -1, -2, …), and one of log-prob -0.5 for the end of sequence."""
    counts = np.full(len(texts), 2 if finished else 1, dtype=np.int32)
    ends = [[len(text)] * (2 if finished else 1) for text in texts]
    logprobs = [[-1.0 - index] + ([-0.5] if finished else []) for index in range(len(texts))]
    return RolloutGroup(
        agent=AgentName(agent),
        step=step,
        version=Version(0, step),
        prompt_id=make_prompt().id,
        task="reverse",
        messages=(Message(role="user", content="x"),),
        texts=np.frombuffer(b"".join(texts), dtype=np.uint8),
        text_lengths=np.array([len(text) for text in texts], dtype=np.int32),
        token_ends=np.array(ends, dtype=np.int32).ravel(),
        token_counts=counts,
        ids=np.arange(int(counts.sum()), dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32).ravel(),
        finished=np.full(len(texts), finished),
        rewards=np.zeros(len(texts), dtype=np.float32),
        reward_fingerprint="another reward",
        tokenizer=tokenizer,
        temperature=1.0,
    )
