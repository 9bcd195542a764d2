"""Spelling checked by words of eight bytes, against the tokens' bytes written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenalign import TokenTable
from tokenalign.testing import byte_bpe_tokenizer
from tokenalign.words import Words

# Words of every length around one and two machine words, alike at their beginnings and ends.
LONG = ["abcdefgh" * 3, *("abcdefghijklmnopqrstuvwxyz"[:width] for width in range(6, 20)), "abcdefghXXabcdefgh"]
TABLE = TokenTable.from_tokenizer(byte_bpe_tokenizer(LONG))
TEXT_IDS = np.flatnonzero(TABLE.widths > 0)
WORDS = Words(TABLE)


def through(ids: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], TABLE.ends(ids)])


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(TEXT_IDS.tolist()), max_size=12), st.data())
def test_only_the_very_bytes_are_spelled(chosen: list[int], data: st.DataObject) -> None:
    ids = np.array(chosen, np.int32)
    text = TABLE.bytes_of(ids)
    assert WORDS.spelled(text, ids, through(ids))
    assert not WORDS.spelled(text + b"a", ids, through(ids))
    if text:
        at = data.draw(st.integers(0, len(text) - 1))
        other = text[:at] + bytes([text[at] ^ data.draw(st.integers(1, 255))]) + text[at + 1 :]
        assert not WORDS.spelled(other, ids, through(ids))


@pytest.mark.parametrize("width", range(1, 25))
def test_every_byte_of_a_long_token_is_looked_at(width: int) -> None:
    alike = [token for token in TEXT_IDS.tolist() if TABLE.widths[token] == width]
    for token in alike:
        ids = np.array([token], np.int32)
        own = TABLE.bytes_of(ids)
        for at in range(width):
            changed = own[:at] + bytes([own[at] ^ 1]) + own[at + 1 :]
            assert not WORDS.spelled(changed, ids, through(ids))


def test_nothing_spells_nothing() -> None:
    none = np.empty(0, np.int32)
    assert WORDS.spelled(b"", none, np.zeros(1, np.int64))
    assert not WORDS.spelled(b"a", none, np.zeros(1, np.int64))
