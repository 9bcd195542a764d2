"""Vocabulary maps between vocabularies in use: what they cover, and that every entry is what it says."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tokenalign.encoder import Encoder
from tokenalign.registry import family
from tokenalign.table import TokenKind, TokenTable
from tokenalign.topk import map_topk
from tokenalign.vocabulary_map import Match, VocabularyMap

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]
# Shares in percent of the source's entries, measured beforehand with another program.
COVERAGE = {
    ("llama3", "qwen3"): (85.4, 14.4, 0.20),
    ("qwen3", "llama3"): (72.2, 27.8, 0.01),
    ("llama3", "deepseek"): (55.1, 44.7, 0.20),
    ("gemma3", "llama3"): (33.0, 67.0, 0.00),
    ("llama3", "gemma3"): (67.4, 32.4, 0.20),
}
tokenizer = cache(family)


@cache
def table(name: str) -> TokenTable:
    return TokenTable.from_tokenizer(tokenizer(name))


def spelled(vocabulary: TokenTable, token_id: int) -> bytes:
    return vocabulary.blob[vocabulary.offsets[token_id] : vocabulary.offsets[token_id + 1]].tobytes()


@pytest.mark.parametrize("name_a, name_b", COVERAGE)
def test_coverage_as_measured(name_a: str, name_b: str) -> None:
    coverage = VocabularyMap.of(table(name_a), table(name_b)).coverage()
    shares = [100 * share for share in (coverage.equal, coverage.prefix, coverage.none)]
    assert shares == pytest.approx(COVERAGE[name_a, name_b], abs=0.1)


@pytest.mark.parametrize("name_a, name_b", COVERAGE)
def test_every_entry_spells_what_its_match_says(name_a: str, name_b: str) -> None:
    a, b = table(name_a), table(name_b)
    vmap = VocabularyMap.of(a, b)
    for token_id, (other, match) in enumerate(zip(vmap.to_b.tolist(), vmap.match.tolist(), strict=True)):
        token = spelled(a, token_id)
        if match == Match.NONE:
            assert other == -1 and (not token or token[0] in b.missing_bytes)
        else:
            begun = spelled(b, other)
            assert begun and token.startswith(begun) and (len(begun) == len(token)) == (match == Match.EQUAL)
    normal = {spelled(b, token_id) for token_id in np.flatnonzero(b.kinds == TokenKind.TEXT).tolist()}
    reached = np.unique(vmap.to_b[vmap.to_b >= 0])
    byte_pieces = [spelled(b, token_id) for token_id in reached[b.kinds[reached] == TokenKind.BYTE].tolist()]
    assert not normal & set(byte_pieces)


@pytest.mark.parametrize("name_a, name_b, share", [("llama3", "qwen3", 19.0), ("qwen3", "llama3", 4.6)])
def test_how_often_the_encoder_begins_with_less(name_a: str, name_b: str, share: float) -> None:
    longest = VocabularyMap.of(table(name_a), table(name_b))
    by_encoder = VocabularyMap.of(table(name_a), table(name_b), prefix="encoder", encoder_b=Encoder(tokenizer(name_b)))
    assert (by_encoder.match == longest.match).all()
    others = longest.match == Match.PREFIX
    assert 100 * np.mean(longest.to_b[others] != by_encoder.to_b[others]) == pytest.approx(share, abs=1)


def test_one_family_in_two_widths_is_the_identity() -> None:
    narrow, wide = (TokenTable.from_tokenizer(tokenizer("qwen3"), vocab_size=width) for width in (151_936, 152_064))
    vmap = VocabularyMap.of(wide, narrow)
    known = wide.kinds != TokenKind.HOLE
    assert (vmap.to_b == np.where(known, np.arange(len(wide)), -1)).all()
    assert vmap.coverage().equal == 1


def test_rows_of_a_whole_vocabulary_keep_their_mass() -> None:
    vmap = VocabularyMap.of(table("llama3"), table("deepseek"))
    ids = np.arange(len(vmap))[None]
    logits = np.random.default_rng(0).normal(0, 3, len(vmap))
    logprobs = logits - np.log(np.exp(logits).sum())
    mapped = map_topk(vmap, ids, logprobs[None])
    onto = np.bincount(np.where(vmap.to_b < 0, len(table("deepseek")), vmap.to_b), weights=np.exp(logprobs))
    filled = mapped.ids[0] >= 0
    assert mapped.probs[0, filled] == pytest.approx(onto[mapped.ids[0, filled]], rel=1e-6)
    assert mapped.residual[0] == pytest.approx(onto[len(table("deepseek"))], rel=1e-9)
    assert mapped.equal + mapped.prefix + mapped.residual + mapped.tail == pytest.approx(1, abs=1e-6)
