"""From scored groups to the records that cross the exchange. Only the kinds that a learner needs are made: less is never
sent as more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agents.types import Completion, Group
from exchange.types import AgentName, AnyExperience, GroupRewards, Kind, RolloutGroup, VerifiedSuccesses


@dataclass(frozen=True, slots=True, kw_only=True)
class Producer:
    """What an agent says of itself in every record, and which kinds it publishes.

    success_threshold: the lowest reward that any of its learners counts as a success.
    """

    agent: AgentName
    kinds: frozenset[Kind]
    tokenizer: str
    reward_fingerprint: str
    temperature: float
    success_threshold: float

    def records(self, group: Group) -> list[AnyExperience]:
        """The records of one scored group, in a fixed order; none for kinds that nobody needs or that would be empty."""
        if group.rewards is None:
            raise ValueError(f"a group must be scored before it is published, got rewards=None on {group.prompt.id}")
        records: list[AnyExperience] = []
        if "rewards" in self.kinds:
            records.append(self._rewards(group))
        if "successes" in self.kinds:
            successes = [
                (completion, float(reward))
                for completion, reward in zip(group.completions, group.rewards, strict=True)
                if completion.finished and reward >= self.success_threshold
            ]
            if successes:
                records.append(self._successes(group, successes))
        if "rollouts" in self.kinds:
            records.append(self._rollouts(group))
        return records

    def _rewards(self, group: Group) -> GroupRewards:
        assert group.rewards is not None
        return GroupRewards(
            agent=self.agent,
            step=group.step,
            version=group.version,
            prompt_id=group.prompt.id,
            task=group.prompt.task,
            rewards=group.rewards,
            reward_fingerprint=self.reward_fingerprint,
        )

    def _successes(self, group: Group, successes: Sequence[tuple[Completion, float]]) -> VerifiedSuccesses:
        completions = [completion for completion, _ in successes]
        content_ends = [each.ends[:-1] if each.has_eos else each.ends for each in completions]
        return VerifiedSuccesses(
            agent=self.agent,
            step=group.step,
            version=group.version,
            prompt_id=group.prompt.id,
            task=group.prompt.task,
            texts=np.frombuffer(b"".join(each.text for each in completions), dtype=np.uint8),
            text_lengths=np.array([len(each.text) for each in completions], dtype=np.int32),
            token_ends=np.concatenate(content_ends).astype(np.int32),
            token_counts=np.array([len(ends) for ends in content_ends], dtype=np.int32),
            rewards=np.array([reward for _, reward in successes], dtype=np.float32),
            tokenizer=self.tokenizer,
        )

    def _rollouts(self, group: Group) -> RolloutGroup:
        assert group.rewards is not None
        completions = group.completions
        return RolloutGroup(
            agent=self.agent,
            step=group.step,
            version=group.version,
            prompt_id=group.prompt.id,
            task=group.prompt.task,
            messages=group.prompt.messages,
            texts=np.frombuffer(b"".join(each.text for each in completions), dtype=np.uint8),
            text_lengths=np.array([len(each.text) for each in completions], dtype=np.int32),
            token_ends=np.concatenate([each.ends for each in completions]).astype(np.int32),
            token_counts=np.array([len(each.ids) for each in completions], dtype=np.int32),
            ids=np.concatenate([each.ids for each in completions]),
            logprobs=np.concatenate([each.logprobs for each in completions]),
            finished=np.array([each.finished for each in completions]),
            rewards=group.rewards,
            reward_fingerprint=self.reward_fingerprint,
            tokenizer=self.tokenizer,
            temperature=self.temperature,
        )
