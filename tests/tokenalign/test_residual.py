"""What a translation lost, by hand and in sums; batches against texts one by one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenalign import (
    AlignmentError,
    Encoder,
    Residual,
    TokenAlignError,
    Trace,
    Translator,
)
from tokenalign.testing import EOS_ID, TOY_TOKENIZERS, texts
from tokenalign.topk import TopKMass

QUICK = settings(max_examples=20, deadline=None)
ENCODERS = {name: Encoder(build()) for name, build in TOY_TOKENIZERS.items()}
TRANSLATORS = {name: Translator(ENCODERS[name], eos_id=EOS_ID) for name in TOY_TOKENIZERS}
KINDS = sorted(TOY_TOKENIZERS)


def test_residuals_add_up() -> None:
    one = Residual(n_tokens=4, n_exact=1, n_groups=2, tail_bytes=1, tail_tokens=1)
    two = Residual(n_tokens=6, n_exact=4, n_groups=5, changed_bytes=7, topk=TopKMass(rows=2, equal=1.5, tail=0.5))
    both = sum([one, two], start=Residual())
    expected = Residual(n_tokens=10, n_exact=5, n_groups=7, changed_bytes=7, tail_bytes=1, tail_tokens=1, topk=two.topk)
    assert both == expected
    assert [one.struct, two.struct, both.struct] == pytest.approx([0.75, 1 / 3, 0.5])
    assert Residual().struct == Residual().struct_bytes == Residual().struct_logprob == Residual().noncanonical == 0


def test_the_residual_by_hand() -> None:
    # Bytes:     h e l l o _ w x            source [h e][l l][o][_ w][x], log-probs -1 -2 -4 -8 -16, [x] not trained
    # Receiver (characters): [h][e][l][l][o][_][w][x]; common ends 2 4 5 7 8: spans of 1:2, 1:2, 1:1, 1:2, 1:1 tokens.
    text, ends = b"hello wx", np.array([2, 4, 5, 7, 8])
    trace = Trace(
        text=text, ends=ends, finished=False, has_eos=False, logprobs=[-1, -2, -4, -8, -16], mask=[True] * 4 + [False]
    )
    got = TRANSLATORS["char"].translate(trace, max_tokens=99)
    assert got.span_logprobs is not None and got.mask is not None
    assert got.span_logprobs.tolist() == [-1, -2, -4, -8, -16]
    assert got.mask.tolist() == [True] * 7 + [False]
    assert got.residual == Residual(
        n_tokens=8, n_exact=2, n_groups=5, one_to_one=2, split=3, n_bytes=8, exact_bytes=2, logprob=31, exact_logprob=20
    )
    # The other way: characters to words. [hello] takes five source tokens, the mask ends within it.
    letters = Trace(
        text=b"hello", ends=np.arange(1, 6), finished=True, has_eos=False, logprobs=-np.ones(5), mask=[True] * 4 + [False]
    )
    merged = TRANSLATORS["byte_bpe"].translate(letters, max_tokens=9)
    assert merged.mask is not None and merged.mask.tolist() == [False, False]
    assert merged.residual == Residual(n_tokens=1, n_exact=0, n_groups=1, merged=1, n_bytes=5, logprob=5, seam_bytes=5)


def test_a_control_token_within_a_text_is_counted() -> None:
    trace = Trace(text=b"ab", ends=[1, 1, 2], finished=False, has_eos=False)
    assert TRANSLATORS["char"].translate(trace, max_tokens=9).residual.role_tokens == 1


@st.composite
def batches(draw: st.DrawFn) -> list[Trace]:
    """Texts of a byte-level source that end by themselves, by a stop string, or within a character."""
    traces = []
    for text, how in draw(st.lists(st.tuples(texts(max_size=5), st.sampled_from(["eos", "stop", "cut"])), max_size=6)):
        content = text.encode()[: draw(st.integers(0, 60))] if how == "cut" else text.encode()
        cuts = draw(st.sets(st.integers(1, max(len(content), 1))))
        ends = [*sorted(cut for cut in cuts if cut < len(content)), *([len(content)] if content else [])]
        ends += [len(content)] * (how == "eos")
        logprobs = draw(st.lists(st.floats(-9, 0), min_size=len(ends), max_size=len(ends)))
        traces.append(
            Trace(
                text=content,
                ends=np.array(ends, np.int64),
                finished=how != "cut",
                has_eos=how == "eos",
                logprobs=np.array(logprobs),
                mask=np.array(logprobs) < -3,
            )
        )
    return traces


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(traces=batches())
@QUICK
def test_a_batch_is_its_texts_one_by_one(kind: str, traces: list[Trace]) -> None:
    whole = TRANSLATORS[kind].translate_batch(traces, max_tokens=60)
    assert len(whole) == len(traces)
    for text, trace in enumerate(traces):
        try:
            alone = TRANSLATORS[kind].translate(trace, max_tokens=60)
        except TokenAlignError as error:
            assert str(whole.errors[text]) == str(error)
            with pytest.raises(type(error)):
                whole[text]
            continue
        part = whole[text]
        assert text not in whole.errors
        assert part.ids.tolist() == alone.ids.tolist()
        assert part.ends.tolist() == alone.ends.tolist()
        assert part.residual.__class__ is Residual
        assert dataclasses.replace(part.residual, logprob=0, exact_logprob=0) == dataclasses.replace(
            alone.residual, logprob=0, exact_logprob=0
        )
        assert part.residual.logprob == pytest.approx(alone.residual.logprob, abs=1e-9)
        assert part.alignment is not None and alone.alignment is not None
        assert part.alignment.group_b.tolist() == alone.alignment.group_b.tolist()
        assert part.span_logprobs is not None and alone.span_logprobs is not None
        assert part.span_logprobs.tolist() == alone.span_logprobs.tolist()
        assert part.mask is not None and alone.mask is not None
        assert part.mask.tolist() == alone.mask.tolist()


def test_traces_that_do_not_go_together_are_refused() -> None:
    one = Trace(text=b"a", ends=[1], finished=False, has_eos=False)
    with pytest.raises(AlignmentError, match="got 1 of 2 with it"):
        TRANSLATORS["char"].translate_batch([one, dataclasses.replace(one, ends=None)], max_tokens=9)
    with pytest.raises(AlignmentError, match="`logprobs` must have one entry per token, got 2 for 1 ends"):
        TRANSLATORS["char"].translate(dataclasses.replace(one, logprobs=[0, 0]), max_tokens=9)
