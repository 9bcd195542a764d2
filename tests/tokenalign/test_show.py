"""Spans and their rendering."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings

from tokenalign import Encoder, Span, TokenTable, TranslationError, show, spans
from tokenalign.testing import byte_bpe_tokenizer, char_tokenizer, plain_texts, spm_bpe_tokenizer

QUICK = settings(max_examples=30, deadline=None)
MIXED = (Path(__file__).parent.parent / "data" / "mixed200.txt").read_bytes()


TABLE, ENCODER = TokenTable.from_tokenizer(byte_bpe_tokenizer()), Encoder(byte_bpe_tokenizer())


def test_spans_by_hand() -> None:
    assert spans(b"hello w", [2, 4, 5, 7], [1, 4, 5, 7]) == [
        Span(text="hell", pieces_a=("he", "ll"), pieces_b=("h", "ell"), exact=False),
        Span(text="o", pieces_a=("o",), pieces_b=("o",), exact=True),
        Span(text=" w", pieces_a=(" w",), pieces_b=(" w",), exact=True),
    ]


def test_parts_of_a_character_are_written_as_escapes() -> None:
    assert spans("é".encode(), [2], [1, 2]) == [Span(text="é", pieces_a=("é",), pieces_b=("\\xc3", "\\xa9"), exact=False)]


@QUICK
@given(text=plain_texts())
def test_pieces_of_each_side_join_to_the_text(text: str) -> None:
    content = text.encode()
    cut = spans(content, TABLE.ends(ENCODER.encode(content)), range(1, len(content) + 1))
    assert "".join(span.text for span in cut) == text
    for span in cut:
        assert "".join(span.pieces_a) == "".join(span.pieces_b) == span.text
        assert span.exact == (len(span.pieces_a) == len(span.pieces_b) == 1)


def test_show_colours_by_exactness() -> None:
    shown = show("hello x", byte_bpe_tokenizer(["hello"]), spm_bpe_tokenizer(["he"]))
    assert shown.plain.split("\n") == ["a  hello│·│x│", "b  he╎l╎l╎o│·│x│"]
    coloured = {shown.plain[part.start : part.end]: part.style for part in shown.spans}
    assert coloured["hello"] == coloured["he╎l╎l╎o"] == "yellow"
    assert coloured["x"] == "green"


def test_show_refuses_what_a_side_cannot_spell() -> None:
    with pytest.raises(TranslationError, match="at offset 0"):
        show("世", byte_bpe_tokenizer(), char_tokenizer())


def test_show_writes_line_ends_as_signs_so_that_each_side_has_one_line() -> None:
    text = "\n".join(line for line in MIXED.decode().split("\n")[:40] if "▁" not in line)
    assert len(show(text, byte_bpe_tokenizer(), spm_bpe_tokenizer()).plain.split("\n")) == 2


def test_two_tokens_on_the_left_are_not_exact() -> None:
    assert [span.exact for span in spans(b"abc", [1, 2, 3], [2, 3])] == [False, True]
