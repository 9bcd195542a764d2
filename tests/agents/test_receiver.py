"""The agent's receiver: a peer's text in own ids, refusals, and what translation cost, by hand."""

import numpy as np
import pytest

from agents.config import TinyPolicy
from agents.policies.policy import build_policy
from agents.policies.tokenizer import PolicyTokenizer
from agents.receiver import PeerReceiver
from agents.rewards.rewards import Rewards
from agents.sharing.rule import PeerText
from agents.testing import make_prompt
from tokenalign import TooLongError, TranslationError


@pytest.fixture(scope="module")
def tokenizer() -> PolicyTokenizer:
    """One token per printable ASCII character."""
    config = TinyPolicy(tokenizer="char", hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    return build_policy(config, seed=0, device="cpu", dtype="float32", threads=1).tokenizer


@pytest.fixture
def receiver(tokenizer: PolicyTokenizer) -> PeerReceiver:
    return PeerReceiver(tokenizer, Rewards(["exact_match"]), max_completion_length=5)


def peer(text: bytes, *ends: int, finished: bool = True, has_eos: bool = False) -> PeerText:
    return PeerText(text=text, token_ends=np.array(ends, dtype=np.int32), finished=finished, has_eos=has_eos)


@pytest.mark.parametrize("has_eos", [True, False])
def test_a_finished_text_ends_in_the_own_end_token_however_the_peer_ended(
    receiver: PeerReceiver, tokenizer: PolicyTokenizer, has_eos: bool
) -> None:
    ends = (2, 3, 3) if has_eos else (2, 3)
    ids = receiver.translate(peer(b"abc", *ends, has_eos=has_eos)).ids
    assert ids.tolist() == [*tokenizer.encode(b"abc"), tokenizer.eos_id]


def test_a_truncated_text_has_no_end_token(receiver: PeerReceiver, tokenizer: PolicyTokenizer) -> None:
    assert receiver.translate(peer(b"abc", 2, 3, finished=False)).ids.tolist() == list(tokenizer.encode(b"abc"))


def test_the_longest_text_fits_with_its_end_token_and_one_more_is_refused_and_counted(receiver: PeerReceiver) -> None:
    assert len(receiver.translate(peer(b"abcd", 4)).ids) == 5
    assert len(receiver.translate(peer(b"abcde", 5, finished=False)).ids) == 5
    assert receiver.take()["thl/refused"] == 0
    for _ in range(2):
        with pytest.raises(TooLongError, match="got 6 tokens with max_tokens=5"):
            receiver.translate(peer(b"abcde", 5))
    assert receiver.take() == {"thl/refused": 2, "thl/text_bytes_changed": 0}
    assert receiver.take()["thl/refused"] == 0


def test_a_text_that_the_own_tokenizer_cannot_spell_is_refused_with_its_bytes(receiver: PeerReceiver) -> None:
    with pytest.raises(TranslationError):
        receiver.translate(peer("aéb".encode(), 4))
    assert receiver.take() == {"thl/refused": 1, "thl/text_bytes_changed": 2}


def test_metrics_by_hand_and_reset_by_take(receiver: PeerReceiver) -> None:
    # ab|c|end -> a b c end: c and the end token are exact. ab|c|d, cut off -> a b c d: c and d are.
    receiver.translate(peer(b"abc", 2, 3, 3, has_eos=True))
    receiver.translate(peer(b"abcd", 2, 3, 4, finished=False))
    assert receiver.take() == {
        "thl/refused": 0,
        "thl/text_bytes_changed": 0,
        "thl/tokens_in": 6,
        "thl/tokens_out": 8,
        "thl/aligned_fraction": 4 / 8,
        "thl/residual": 4 / 8,
        "thl/tail_bytes": 0,
    }
    assert receiver.take() == {"thl/refused": 0, "thl/text_bytes_changed": 0}


def test_bytes_of_a_character_that_was_cut_in_two_are_counted(receiver: PeerReceiver, tokenizer: PolicyTokenizer) -> None:
    cut = "ab€".encode()[:-1]
    assert receiver.translate(peer(cut, 1, 2, 4, finished=False)).ids.tolist() == list(tokenizer.encode(b"ab"))
    assert receiver.take()["thl/tail_bytes"] == 2


def test_ids_of_an_equal_tokenizer_are_adopted_checked_and_counted(receiver: PeerReceiver, tokenizer: PolicyTokenizer) -> None:
    content = tokenizer.encode(b"abc")
    ended = np.append(content, np.int32(tokenizer.eos_id))
    for has_eos, given in ((True, ended), (False, content)):
        assert receiver.adopt(peer(b"abc", 1, 2, 3, has_eos=has_eos), given).tolist() == ended.tolist()
    assert receiver.adopt(peer(b"abc", 1, 2, 3, finished=False), content).tolist() == content.tolist()
    taken = receiver.take()
    assert (taken["thl/tokens_in"], taken["thl/tokens_out"], taken["thl/residual"]) == (10, 11, 0)
    with pytest.raises(TranslationError, match="must spell their text"):
        receiver.adopt(peer(b"abd", 1, 2, 3), content)
    with pytest.raises(TooLongError, match="has 6 tokens, allowed are 5"):
        receiver.adopt(peer(b"abcde", 1, 2, 3, 4, 5), tokenizer.encode(b"abcde"))
    assert receiver.take()["thl/refused"] == 2


async def test_own_rewards_judge_a_peers_texts(receiver: PeerReceiver) -> None:
    prompts = [make_prompt(answer="ab"), make_prompt(answer="cd")]
    assert (await receiver.verify(prompts, [b"ab", b"ab"])).tolist() == [1, 0]
    assert receiver.reward_fingerprint == Rewards(["exact_match"]).fingerprint
