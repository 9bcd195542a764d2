"""Conversations cut into segments, and templates that rewrite history."""

from __future__ import annotations

import numpy as np
import pytest

from tokenalign import (
    AlignmentError,
    Encoder,
    TokenTable,
    Trace,
    Translator,
    fork_points,
    split_segments,
)
from tokenalign.testing import EOS_ID, byte_bpe_tokenizer

TABLE = TokenTable.from_tokenizer(byte_bpe_tokenizer())
TRANSLATOR = Translator(Encoder(byte_bpe_tokenizer(), table=TABLE), eos_id=EOS_ID)


def test_segments_are_seams_on_both_sides() -> None:
    """A conversation is cut where roles change; a word of the receiver never runs across."""
    # Source of characters: "hel" said by the user, "lo" and the end-of-turn token by the assistant.
    trace = Trace(text=b"hello", ends=[1, 2, 3, 4, 5, 5], finished=True, has_eos=True, logprobs=-np.arange(6.0))
    joint = TRANSLATOR.translate(trace, max_tokens=9)
    segments = split_segments(trace, [0, 0, 0, 1, 1, 1])
    apart = TRANSLATOR.translate_batch(segments, max_tokens=9)
    assert len(joint.ids) == 2  # "hello" is one token of the receiver
    assert [segment.text for segment in segments] == [b"hel", b"lo"]
    assert [segment.has_eos for segment in segments] == [False, True]
    assert TABLE.bytes_of(apart.ids) == b"hello"
    assert apart.cu[1] in (1, 2, 3)
    assert apart.span_logprobs is not None and joint.span_logprobs is not None
    assert apart.span_logprobs.sum() == joint.span_logprobs.sum() == -15
    with pytest.raises(AlignmentError, match=r"got shape=\(2,\) for 6 tokens"):
        split_segments(trace, [0, 1])


def test_a_segment_is_finished_only_by_an_end_token() -> None:
    # "hel" of the user is cut off by the role's change and gets no end of sequence; an end with a label of its own
    # belongs to what it ends.
    trace = Trace(text=b"hello", ends=[3, 5, 5], finished=True, has_eos=True)
    for labels in ([0, 1, 1], [0, 1, 2]):
        segments = split_segments(trace, labels)
        assert [(each.text, each.finished, each.has_eos) for each in segments] == [(b"hel", False, False), (b"lo", True, True)]
        ids = TRANSLATOR.translate_batch(segments, max_tokens=9).ids.tolist()
        assert ids.count(EOS_ID) == 1 and ids[-1] == EOS_ID
    twice = Trace(text=b"hello", ends=[3, 3, 5, 5], finished=True, has_eos=True)
    assert [each.has_eos for each in split_segments(twice, [0, 0, 1, 1])] == [True, True]


def test_a_template_that_rewrites_history_forks() -> None:
    """What comes before must stay what it was."""
    appended = [b"u1", b"u1 a1", b"u1 a1 u2"]
    assert fork_points(appended) == []
    # Thoughts of earlier turns are dropped from the third render on.
    assert fork_points([b"u1", b"u1 <t>a1", b"u1 a1 u2", b"u1 a1 u2 a2"]) == [2]
    assert fork_points([]) == fork_points([b"x"]) == []
