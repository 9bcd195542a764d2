"""The agent's receiver: a peer's text in own ids, refusals, and what translation cost, by hand."""

import msgspec
import numpy as np
import pytest

from agents.config import TinyPolicy, TranslationConfig
from agents.policies.policy import build_policy
from agents.policies.tokenizer import PolicyTokenizer
from agents.receiver import PeerReceiver
from agents.rewards.rewards import Rewards
from agents.testing import make_group, make_prompt
from tokenalign import AlignmentError, RoleError, TooLongError, Trace, Translation, TranslationError

NOTHING = {"thl/offered": 0, "thl/refused": 0, "thl/text_bytes_changed": 0, "thl/text_bytes_lost": 0}


@pytest.fixture(scope="module")
def tokenizer() -> PolicyTokenizer:
    """One token per printable ASCII character."""
    config = TinyPolicy(tokenizer="char", hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    return build_policy(config, seed=0, device="cpu", dtype="float32", threads=1).tokenizer


@pytest.fixture
def receiver(tokenizer: PolicyTokenizer) -> PeerReceiver:
    return PeerReceiver(tokenizer, Rewards(["exact_match"]), max_completion_length=5)


def peer(text: bytes, *ends: int, finished: bool = True, has_eos: bool = False) -> Trace:
    return Trace(text=text, ends=np.array(ends, dtype=np.int32), finished=finished, has_eos=has_eos)


def translate(receiver: PeerReceiver, trace: Trace) -> Translation:
    return receiver.translate([trace])[0]


@pytest.mark.parametrize("has_eos", [True, False])
def test_a_finished_text_ends_in_the_own_end_token_however_the_peer_ended(
    receiver: PeerReceiver, tokenizer: PolicyTokenizer, has_eos: bool
) -> None:
    ends = (2, 3, 3) if has_eos else (2, 3)
    ids = translate(receiver, peer(b"abc", *ends, has_eos=has_eos)).ids
    assert ids.tolist() == [*tokenizer.encode(b"abc"), tokenizer.eos_id]


def test_a_truncated_text_has_no_end_token(receiver: PeerReceiver, tokenizer: PolicyTokenizer) -> None:
    assert translate(receiver, peer(b"abc", 2, 3, finished=False)).ids.tolist() == list(tokenizer.encode(b"abc"))


def test_the_longest_text_fits_with_its_end_token_and_one_more_is_refused_and_counted(receiver: PeerReceiver) -> None:
    assert len(translate(receiver, peer(b"abcd", 4)).ids) == 5
    assert len(translate(receiver, peer(b"abcde", 5, finished=False)).ids) == 5
    assert receiver.take()["thl/refused"] == 0
    for _ in range(2):
        with pytest.raises(TooLongError, match="got 6 tokens with max_tokens=5"):
            translate(receiver, peer(b"abcde", 5))
    assert receiver.take() == {**NOTHING, "thl/offered": 2, "thl/refused": 2, "thl/refused/too_long": 2}
    assert receiver.take()["thl/refused"] == 0


def test_a_text_that_the_own_tokenizer_cannot_spell_is_refused_with_its_bytes(receiver: PeerReceiver) -> None:
    with pytest.raises(TranslationError):
        translate(receiver, peer("aéb".encode(), 4))
    assert receiver.take() == {**NOTHING, "thl/offered": 1, "thl/refused": 1, "thl/refused/lossy": 1, "thl/text_bytes_lost": 2}


def test_metrics_by_hand_and_reset_by_take(receiver: PeerReceiver) -> None:
    # ab|c|end -> a b c end: c and the end token are exact. ab|c|d, cut off -> a b c d: c and d are.
    translate(receiver, peer(b"abc", 2, 3, 3, has_eos=True))
    translate(receiver, peer(b"abcd", 2, 3, 4, finished=False))
    assert receiver.take() == {
        **NOTHING,
        "thl/offered": 2,
        "thl/tokens_in": 6,
        "thl/tokens_out": 8,
        "thl/aligned_fraction": 4 / 8,
        "thl/residual": 4 / 8,
        "thl/residual_bytes": 4 / 7,
        "thl/tangled_spans": 0,
        "thl/tail_bytes": 0,
        "thl/tail_tokens": 0,
        "thl/role_tokens": 0,
        "thl/seam_bytes": 0,
    }
    assert receiver.take() == NOTHING


def test_log_probs_outside_exact_spans_by_hand(receiver: PeerReceiver) -> None:
    # ab with -3 is no single own token; c with -1 is: three quarters of the log-prob lie in a span of two own tokens.
    trace = Trace(text=b"abc", ends=np.array([2, 3]), finished=False, has_eos=False, logprobs=[-3, -1])
    translate(receiver, trace)
    assert receiver.take()["thl/residual_logprob"] == pytest.approx(3 / 4)


def test_a_peers_text_is_refused_by_the_configured_limits(tokenizer: PolicyTokenizer) -> None:
    def limited(**limits: float) -> PeerReceiver:
        config = msgspec.convert(limits, TranslationConfig)
        return PeerReceiver(tokenizer, Rewards(["exact_match"]), max_completion_length=5, config=config)

    strict, lenient = limited(max_struct=0.4), limited(max_struct=0.6)
    # ab|c -> a b c end: of the three tokens that the peer has too, a and b lie in one of its tokens.
    assert len(translate(limited(max_struct=0.7), peer(b"abc", 2, 3)).ids) == 4
    for receiver in (strict, lenient):
        with pytest.raises(TranslationError, match=r"got struct=0\.66"):
            translate(receiver, peer(b"abc", 2, 3))
    assert strict.take()["thl/refused"] == 1
    with pytest.raises(TranslationError, match="got lost_bytes=2 with max_lost_bytes=1"):
        translate(limited(max_lost_bytes=1), peer("aéb".encode(), 4))


def test_refusing_most_of_what_comes_is_told_once(receiver: PeerReceiver, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        receiver.translate([peer(b"abcde", 5)] * 49)
        receiver.take()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "(too_long)" in told[0] and "max_tokens=5" in told[0]


def test_a_share_of_the_own_samples_is_checked_for_tokens_of_another_encoding() -> None:
    config = TinyPolicy(tokenizer="byte_bpe", hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    tokenizer = build_policy(config, seed=0, device="cpu", dtype="float32", threads=1).tokenizer
    text = b"reverse reverse"
    canonical = tokenizer.encode(text)
    single = np.concatenate([tokenizer.encode(bytes([byte])) for byte in text])
    assert len(canonical) < len(single) == len(text)
    always = PeerReceiver(
        tokenizer, Rewards(["exact_match"]), max_completion_length=99, config=TranslationConfig(checked_share=1.0)
    )
    rng = np.random.default_rng(0)

    def drift(*rows: np.ndarray) -> float:
        group = make_group(make_prompt(), [0.0] * len(rows), ids=[[*row, tokenizer.eos_id] for row in rows])
        always.check_sampled([group], rng)
        return always.take()["thl/noncanonical"]

    assert drift(canonical, canonical) == 0
    assert 0 < drift(single) < 1
    assert drift(canonical, single) < drift(single)
    never = PeerReceiver(
        tokenizer, Rewards(["exact_match"]), max_completion_length=99, config=TranslationConfig(checked_share=0.0)
    )
    never.check_sampled([make_group(make_prompt(), [0.0, 1.0])], rng)
    assert "thl/noncanonical" not in never.take()


def test_bytes_of_a_character_that_was_cut_in_two_are_counted(receiver: PeerReceiver, tokenizer: PolicyTokenizer) -> None:
    cut = "ab€".encode()[:-1]
    assert translate(receiver, peer(cut, 1, 2, 4, finished=False)).ids.tolist() == list(tokenizer.encode(b"ab"))
    assert receiver.take()["thl/tail_bytes"] == 2


def test_ids_of_an_equal_tokenizer_are_adopted_checked_and_counted(receiver: PeerReceiver, tokenizer: PolicyTokenizer) -> None:
    content = tokenizer.encode(b"abc")
    ended = np.append(content, np.int32(tokenizer.eos_id))
    for has_eos, given in ((True, ended), (False, content)):
        ends = (1, 2, 3, 3) if has_eos else (1, 2, 3)
        assert receiver.adopt(peer(b"abc", *ends, has_eos=has_eos), given).tolist() == ended.tolist()
    assert receiver.adopt(peer(b"abc", 1, 2, 3, finished=False), content).tolist() == content.tolist()
    taken = receiver.take()
    assert (taken["thl/tokens_in"], taken["thl/tokens_out"], taken["thl/residual"]) == (10, 11, 0)
    with pytest.raises(TranslationError, match="must spell their text"):
        receiver.adopt(peer(b"abd", 1, 2, 3), content)
    with pytest.raises(TooLongError, match="has 6 tokens, allowed are 5"):
        receiver.adopt(peer(b"abcde", 1, 2, 3, 4, 5), tokenizer.encode(b"abcde"))
    with pytest.raises(RoleError, match="a control token within a text"):
        receiver.adopt(peer(b"abc", 1, 2, 2, 3), np.insert(content, 2, tokenizer.eos_id))
    with pytest.raises(AlignmentError, match="`ends` must cover"):
        receiver.adopt(peer(b"abc", 1, 2), content)
    assert receiver.take()["thl/refused"] == 4


async def test_own_rewards_judge_a_peers_texts(receiver: PeerReceiver) -> None:
    prompts = [make_prompt(answer="ab"), make_prompt(answer="cd")]
    assert (await receiver.verify(prompts, [b"ab", b"ab"])).tolist() == [1, 0]
    assert receiver.reward_fingerprint == Rewards(["exact_match"]).fingerprint


async def test_rewards_that_ask_for_ids_get_a_peers_text_in_the_own_encoding(tokenizer: PolicyTokenizer) -> None:
    seen: list[object] = []

    def judge(completions: list[str], completion_ids: list[list[int] | None]) -> list[float]:
        seen.extend(completion_ids)
        return [1.0] * len(completions)

    receiver = PeerReceiver(tokenizer, Rewards([judge]), max_completion_length=5)
    await receiver.verify([make_prompt()] * 2, [b"ab", b"c"])
    assert seen == [tokenizer.encode(b"ab").tolist(), tokenizer.encode(b"c").tolist()]
