"""Spans, comparisons and their picture."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from tokenizers import Tokenizer, normalizers

from tokenalign import Encoder, Span, TextError, align, show, spans
from tokenalign.show import compare
from tokenalign.show_picture import Picture
from tokenalign.testing import TOY_TOKENIZERS, byte_bpe_tokenizer, char_tokenizer, spm_bpe_tokenizer, texts, unigram_tokenizer

QUICK = settings(max_examples=12, deadline=None)
MIXED = (Path(__file__).parent.parent / "data" / "mixed200.txt").read_bytes()


def composing_tokenizer() -> Tokenizer:
    tokenizer = byte_bpe_tokenizer(["é"])
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


ENCODERS = {name: Encoder(make()) for name, make in (*TOY_TOKENIZERS.items(), ("nfc", composing_tokenizer))}
names = st.sampled_from(sorted(ENCODERS))


def drawn(picture: Picture, width: int = 80, *, colour: bool = False) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=colour, color_system="standard" if colour else None)
    with console.capture() as capture:
        console.print(picture)
    return capture.get()


def blocks(picture: Picture, width: int) -> list[tuple[str, str]]:
    """The pairs of lines, without their labels."""
    pairs = drawn(picture, width).split("\n\n")[:-1]
    return [(upper[3:], lower[3:]) for upper, lower in (pair.split("\n") for pair in pairs)]


def bare(start: int, text: str, a: str, b: str, *, exact: bool) -> Span:
    """A span of ASCII text; pieces parted by spaces."""
    pieces_a, pieces_b = tuple(a.split()), tuple(b.split())
    return Span(start=start, end=start + len(text), text=text, pieces_a=pieces_a, pieces_b=pieces_b, exact=exact)


def test_spans_by_hand() -> None:
    found = spans(b"hello-w", align([2, 4, 5, 7], [1, 4, 5, 7]))
    assert found == [
        bare(0, "hell", "he ll", "h ell", exact=False),
        bare(4, "o", "o", "o", exact=True),
        bare(5, "-w", "-w", "-w", exact=True),
    ]
    assert spans(b"hello-w", align([2, 4, 5, 7], [1, 4, 5, 7]), max_spans=1) == found[:1]


def test_shapes_have_the_names_of_the_residual() -> None:
    alignment = align([1, 2, 3, 5, 6], [1, 3, 4, 5, 6])
    assert [span.shape for span in spans(b"abcdef", alignment)] == ["one to one", "merged", "split", "one to one"]
    assert [span.shape for span in spans(b"abc", align([1, 3], [2, 3]))] == ["tangled"]


def test_tokens_without_a_group_and_ends_of_sequence_are_left_out() -> None:
    both = align([1, 2, 2], [2, 2], eos_a=True, eos_b=True)
    assert spans(b"ab", both) == [bare(0, "ab", "a b", "ab", exact=False)]
    lone = align([2], [2, 2], eos_b=True)
    assert spans(b"ab", lone) == [bare(0, "ab", "ab", "ab", exact=True)]
    held_back = align([1, 3], [1], open_end=True)
    assert spans(b"a\xe4\xb8", held_back) == [bare(0, "a", "a", "a", exact=True)]


def test_parts_of_a_character_are_written_as_escapes() -> None:
    (span,) = spans("é".encode(), align([2], [1, 2]))
    assert (span.text, span.pieces_a, span.pieces_b) == ("é", ("é",), ("\\xc3", "\\xa9"))


@QUICK
@given(text=texts(12), a=names, b=names)
def test_a_comparison_covers_the_text_and_agrees_with_its_residual(text: str, a: str, b: str) -> None:
    content = text.encode()
    compared = compare(content, ENCODERS[a], ENCODERS[b])
    cut = compared.spans
    assert [span.start for span in cut] == [0, *(span.end for span in cut[:-1])][: len(cut)]
    assert (cut[-1].end if cut else 0) == len(content)
    for span in cut:
        assert span.text == content[span.start : span.end].decode(errors="backslashreplace")
        assert not span.exact or (span.pieces_a == span.pieces_b == (span.text,))
        for pieces, changed in ((span.pieces_a, span.changed_a), (span.pieces_b, span.changed_b)):
            joined = "".join(pieces)
            assert changed or "\\" in joined + span.text or joined == span.text
    assert sum(len(span.pieces_a) for span in cut) == compared.a.n_tokens
    assert sum(len(span.pieces_b) for span in cut) == compared.b.n_tokens
    assert any(span.changed_b for span in cut) == (compared.b.changed_bytes + compared.b.lost_bytes > 0)
    assert any(span.changed_a for span in cut) == (compared.a.changed_bytes + compared.a.lost_bytes > 0)
    residual = compared.residual
    if residual.n_groups:
        counted = Counter(span.shape for span in cut)
        assert counted == Counter(
            {
                "one to one": residual.one_to_one,
                "merged": residual.merged,
                "split": residual.split,
                "tangled": residual.tangled,
            }
        )
        assert residual.n_exact == sum(span.exact for span in cut)


def test_a_token_rewritten_on_either_side_is_not_exact() -> None:
    decomposed = "e\u0301".encode()
    (there,) = compare(decomposed, ENCODERS["byte_bpe"], ENCODERS["nfc"]).spans
    assert (there.pieces_b, there.changed_a, there.changed_b, there.exact) == (("é",), False, True, False)
    back = compare(decomposed, ENCODERS["nfc"], ENCODERS["nfc"])
    assert [(span.exact, span.changed_a, span.changed_b) for span in back.spans] == [(False, True, True)]
    assert (back.residual.n_exact, back.residual.changed_bytes, back.a.changed_bytes) == (0, 3, 3)


def test_one_token_that_became_another_is_not_exact() -> None:
    small = byte_bpe_tokenizer()
    small.normalizer = normalizers.Lowercase()
    compared = compare(b"aB", ENCODERS["byte_bpe"], Encoder(small))
    assert [(span.pieces_b, span.exact) for span in compared.spans] == [(("a",), True), (("b",), False)]
    assert (compared.residual.one_to_one, compared.residual.n_exact) == (2, 1)


def test_the_first_spans_alone_are_those_of_all_with_the_whole_residual() -> None:
    every = compare(MIXED[:3000], ENCODERS["byte_bpe"], ENCODERS["nfc"])
    for most in (0, 1, 40, len(every.spans) + 1):
        first = compare(MIXED[:3000], ENCODERS["byte_bpe"], ENCODERS["nfc"], max_spans=most)
        assert first.spans == every.spans[:most]
        assert first.residual == every.residual


def test_what_a_side_cannot_spell_is_shown_as_lost() -> None:
    (span,) = compare("世".encode(), ENCODERS["byte_bpe"], ENCODERS["char"]).spans
    assert (span.pieces_b, span.changed_b) == (("",), True)
    assert "≠∅│" in drawn(show("世", byte_bpe_tokenizer(), char_tokenizer()))


def test_a_side_without_any_token_leaves_one_span() -> None:
    nothing = byte_bpe_tokenizer()
    nothing.normalizer = normalizers.Strip()
    compared = compare(b"  ", Encoder(byte_bpe_tokenizer()), Encoder(nothing))
    assert [(span.text, span.pieces_b, span.exact) for span in compared.spans] == [("  ", (), False)]
    assert compared.residual.lost_bytes == 2
    assert "exact:" not in drawn(Picture(comparison=compared))


def test_an_incomplete_character_is_held_back_and_other_stray_bytes_need_tokens() -> None:
    compared = compare(b"a\xe4\xb8", ENCODERS["byte_bpe"], ENCODERS["char"])
    assert (len(compared.spans), compared.residual.tail_bytes) == (1, 2)
    assert "held back: 2 bytes" in drawn(Picture(comparison=compared))
    assert compare(b"\xffa", ENCODERS["byte_bpe"], ENCODERS["spm_bpe"]).spans[0].text == "\\xff"
    with pytest.raises(TextError, match="0xff at offset 0"):
        compare(b"\xffa", ENCODERS["byte_bpe"], ENCODERS["char"])


def test_spans_stand_above_each_other() -> None:
    picture = show("hello x世", byte_bpe_tokenizer(["hello", "世"]), spm_bpe_tokenizer(["he"]))
    assert blocks(picture, 80) == [("hello   │·│x│世            │", "he╎l╎l╎o│·│x│\\xe4╎\\xb8╎\\x96│")]


@QUICK
@given(text=texts(12), a=names, b=names, width=st.integers(24, 90))
def test_every_line_fits_and_its_spans_are_of_equal_width(text: str, a: str, b: str, width: int) -> None:
    picture = Picture(comparison=compare(text.encode(), ENCODERS[a], ENCODERS[b]))
    n_closed = 0
    for upper, lower in blocks(picture, width):
        assert cell_len(upper) <= width - 3
        assert cell_len(upper) == cell_len(lower)
        bars = [[cell_len(line[:at]) for at, sign in enumerate(line) if sign == "│"] for line in (upper, lower)]
        assert bars[0] == bars[1]
        assert upper.isprintable()
        assert lower.isprintable()
        n_closed += len(bars[0])
    assert n_closed >= len(picture.comparison.spans)


def test_a_span_wider_than_the_console_goes_on_in_the_next_block() -> None:
    word = "abcdefghijklmnopqrstuvwxyz"
    pairs = blocks(show(word, byte_bpe_tokenizer([word]), char_tokenizer()), 24)
    assert len(pairs) > 2
    assert "".join(upper for upper, _ in pairs).replace(" ", "") == f"{word}│"
    assert "".join(lower for _, lower in pairs) == "╎".join(word) + "│"
    for width in range(len(word), len(word) + 8):
        pairs = blocks(show(word, byte_bpe_tokenizer([word]), byte_bpe_tokenizer([word])), width)
        assert "".join(upper.rstrip() for upper, _ in pairs) == f"{word}│"


def test_wide_characters_take_two_cells_and_accents_stand_on_a_circle() -> None:
    tokenizer = byte_bpe_tokenizer(["世界", "\u0301"])
    assert blocks(show("世界e\u0301", tokenizer, tokenizer), 80) == [("世界│e│◌\u0301│", "世界│e│◌\u0301│")]


def test_nothing_in_a_text_reaches_the_terminal_as_a_command() -> None:
    text = "\x1b[31m\x9b1m\u202e\x07\u2028\ufe0f"
    shown = drawn(show(text, byte_bpe_tokenizer(text), unigram_tokenizer()))
    assert "│".join(["\\x1b", "[", "3", "1", "m", "\\x9b"]) in drawn(show(text, *[byte_bpe_tokenizer(text)] * 2), width=200)
    assert not set(shown) & set("\x1b\x9b\u202e\x07\u2028\ufe0f")


def test_no_more_blocks_than_asked_and_a_note() -> None:
    text = MIXED.decode()[:2000]
    compared = compare(text.encode(), ENCODERS["byte_bpe"], ENCODERS["char"])
    picture = Picture(comparison=compared, max_blocks=2)
    assert drawn(picture).count("a  ") == 2
    assert f"of {len(compared.spans):,} spans" in drawn(picture)
    assert "the first" not in drawn(Picture(comparison=compared))


def test_colours_say_what_the_signs_say() -> None:
    picture = show("hello x世", byte_bpe_tokenizer(["hello"]), char_tokenizer())
    coloured = drawn(picture, colour=True)
    for style, shown in (("32", "x"), ("3;33", "h╎e╎l╎l╎o"), ("1;31", "≠∅")):
        assert f"\x1b[{style}m{shown}" in coloured
    assert "rewritten or lost" in drawn(picture)
    assert "several become one" not in drawn(picture)


def test_the_residual_in_words() -> None:
    shown = drawn(show("hello x世", byte_bpe_tokenizer(["hello"]), char_tokenizer()), width=120)
    assert "b: 8 tokens; 0 bytes changed, 3 lost (has an unknown token)" in shown
    assert "exact: 2 of 8 tokens of b (25%), 20% of the bytes" in shown
    assert "4 spans: 2 one to one, 1 merged, 1 split, 0 tangled" in shown


def test_random_bytes_are_covered() -> None:
    rng = np.random.default_rng(0)
    for length in range(30):
        text = rng.bytes(length)
        compared = compare(text, ENCODERS["byte_bpe"], ENCODERS["spm_bpe"])
        assert compared.residual.n_bytes + compared.residual.tail_bytes == length
