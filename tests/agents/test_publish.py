"""Records: only what a learner needs crosses, and it describes the completions exactly."""

import numpy as np
import pytest

from agents.publish import Producer
from agents.sharing.texts import unpack
from agents.testing import make_group, make_prompt
from agents.types import Completion, Group
from exchange.types import AgentName, GroupRewards, Kind, RolloutGroup, VerifiedSuccesses, Version


def producer(*kinds: Kind) -> Producer:
    return Producer(
        agent=AgentName("alpha"),
        kinds=frozenset(kinds),
        tokenizer="alpha's",
        reward_fingerprint="reward",
        temperature=1.0,
        success_threshold=1.0,
    )


def completion(text: bytes, cuts: list[int], *, finished: bool = True, eos: bool = True) -> Completion:
    """A completion cut into tokens behind the given bytes, with an end token where it has one."""
    ends = cuts + ([len(text)] if eos else [])
    return Completion(
        ids=np.arange(len(ends), dtype=np.int32),
        logprobs=-np.arange(1, len(ends) + 1, dtype=np.float32),
        ends=np.array(ends, dtype=np.int32),
        text=text,
        finished=finished,
        has_eos=eos,
    )


def group(*completions: Completion, rewards: list[float]) -> Group:
    return Group(
        prompt=make_prompt(),
        prompt_ids=np.array([1], dtype=np.int32),
        completions=completions,
        step=4,
        version=Version(1, 4),
        rewards=np.array(rewards, dtype=np.float32),
    )


MIXED = group(
    completion(b"abc", [2, 3]),
    completion(b"xy", [1, 2], finished=False, eos=False),
    completion(b"de", [2], eos=False),
    completion(b"", []),
    rewards=[1, 1, 1, 0],
)


def test_nothing_that_nobody_needs_is_made() -> None:
    assert producer().records(MIXED) == []


def test_rewards_are_all_that_xgrpo_shows() -> None:
    (record,) = producer("rewards").records(MIXED)
    assert isinstance(record, GroupRewards)
    np.testing.assert_array_equal(record.rewards, [1, 1, 1, 0])
    assert record.version == Version(1, 4) and record.step == 4


def test_successes_are_the_finished_and_rewarded_ones_without_their_end_tokens() -> None:
    (record,) = producer("successes").records(MIXED)
    assert isinstance(record, VerifiedSuccesses)
    texts = unpack(record)
    assert [(each.text, np.asarray(each.ends).tolist(), each.has_eos) for each in texts] == [
        (b"abc", [2, 3], False),
        (b"de", [2], False),
    ]


def test_a_group_without_a_success_publishes_none() -> None:
    assert producer("successes").records(group(completion(b"abc", [3]), rewards=[float("nan")])) == []


def test_rollouts_are_whole_groups() -> None:
    (record,) = producer("rollouts").records(MIXED)
    assert isinstance(record, RolloutGroup)
    texts = unpack(record)
    assert [each.text for each in texts] == [b"abc", b"xy", b"de", b""]
    assert [each.finished for each in texts] == [True, False, True, True]
    assert [each.has_eos for each in texts] == [True, False, False, True]
    assert record.messages == MIXED.prompt.messages, "what the completions were sampled under"
    np.testing.assert_array_equal(record.logprobs, np.concatenate([each.logprobs for each in MIXED.completions]))


def test_an_unscored_group_is_refused() -> None:
    unscored = make_group(make_prompt(), [1, 0])
    object.__setattr__(unscored, "rewards", None)
    with pytest.raises(ValueError, match="must be scored"):
        producer("rewards").records(unscored)
