"""Eight tokenizers in use, loaded once per run, small ones made in code, and texts crossed from one to another.

A source's text is what its own tokens spell, so that a lossy tokenizer is exact about its own text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokenalign import Encoder, Limits, TokenKind, TokenTable, Trace, Translation, Translator, open_roles
from tokenalign.registry import family, folder
from tokenalign.testing import EOS_ID, TOY_TOKENIZERS

FAMILIES = ("gpt2", "llama3", "qwen3", "deepseek", "mistral", "tekken", "gemma3", "smollm2")
PAIRS = [(a, b) for a in FAMILIES for b in FAMILIES]
TOY_PAIRS = [(a, b) for a in TOY_TOKENIZERS for b in TOY_TOKENIZERS]
MIXED = (Path(__file__).parent.parent / "data" / "mixed200.txt").read_bytes()
LINES = MIXED.splitlines(keepends=True)
Ids = npt.NDArray[np.int32]


@cache
def encoder(name: str) -> Encoder:
    """The encoder of a family, with the roles that its package tells, or of a toy."""
    toy = TOY_TOKENIZERS.get(name)
    tokenizer, roles = (toy(), {"eos": {EOS_ID}}) if toy else (family(name), open_roles(folder(name)))
    return Encoder(tokenizer, table=TokenTable.from_tokenizer(tokenizer, roles=roles))


@cache
def eos_ids(name: str) -> list[int]:
    """End-of-sequence tokens, rising."""
    return sorted(encoder(name).table.roles["eos"])


@cache
def translator(name: str) -> Translator:
    """To a receiver that ends in the last of its end-of-sequence tokens and refuses no loss."""
    return Translator(encoder(name), eos_id=eos_ids(name)[-1] if eos_ids(name) else None, limits=Limits(max_lost_bytes=None))


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Texts of a source at a receiver. ids: each text's tokens at the source, its end-of-sequence token included."""

    source: str
    receiver: str
    ids: Sequence[Ids]
    traces: Sequence[Trace]
    translation: Translation

    @cached_property
    def accepted(self) -> list[tuple[Trace, Translation]]:
        """What was not refused, text by text."""
        every = enumerate(self.traces)
        return [(trace, self.translation[text]) for text, trace in every if text not in self.translation.errors]

    @property
    def own(self) -> list[Ids]:
        """The source's tokens without ends of sequence."""
        return [ids[: len(ids) - trace.has_eos] for ids, trace in zip(self.ids, self.traces, strict=True)]

    @property
    def tables(self) -> tuple[TokenTable, TokenTable]:
        return encoder(self.source).table, encoder(self.receiver).table

    def to(self, receiver: str) -> Crossing:
        """The receiver's texts, crossed on."""
        return crossed(self.receiver, receiver, [self._content(text) for text in range(len(self.traces))])

    def _content(self, text: int) -> Ids:
        if text in self.translation.errors:
            return np.empty(0, np.int32)
        ids = self.translation[text].ids
        return ids[: len(ids) - self.traces[text].finished]


def crossed(source: str, receiver: str, ids: Sequence[Ids], *, seed: int = 0, finished: bool | None = None) -> Crossing:
    """Translate a source's texts, given by their tokens, in one batch, with random log-probs and masks of runs.

    finished: None ends the texts in turn by an end-of-sequence token (of the source's in turn), by a stop string, and
    broken off.
    """
    rng = np.random.default_rng(seed)
    traces, whole = [], []
    for text, content in enumerate(ids):
        way = (text % 3 if eos_ids(receiver) and eos_ids(source) else 2) if finished is None else 2 - 2 * finished
        ends_in = eos_ids(source)[text % len(eos_ids(source)) :][:1] if way == 0 else []
        own = np.append(content, np.array(ends_in, np.int32)).astype(np.int32)
        table = encoder(source).table
        traces.append(
            Trace(
                text=table.bytes_of(own),
                ends=table.ends(own),
                finished=way < 2,
                has_eos=way == 0,
                logprobs=-rng.exponential(2, len(own)),
                mask=np.cumsum(rng.random(len(own)) < 0.2) % 2 == 0,
            )
        )
        whole.append(own)
    translation = translator(receiver).translate_batch(traces, max_tokens=100_000)
    return Crossing(source=source, receiver=receiver, ids=whole, traces=traces, translation=translation)


def spoken(source: str, texts: Sequence[str]) -> list[Ids]:
    """The source's own tokens for texts."""
    return encoder(source).encode_batch([text.encode() for text in texts])


@cache
def lines_crossed(source: str, receiver: str) -> Crossing:
    """The mixed text, line by line."""
    return crossed(source, receiver, encoder(source).encode_batch(LINES))


@cache
def ids_by_bytes(name: str) -> dict[bytes, int]:
    """A token for each byte string that the vocabulary has, byte pieces included."""
    table = encoder(name).table
    kept = np.flatnonzero((table.kinds == TokenKind.TEXT) | (table.kinds == TokenKind.BYTE)).tolist()
    blob, offsets = table.blob.tobytes(), table.offsets.tolist()
    return {blob[offsets[token] : offsets[token + 1]]: token for token in kept}


def resegmented(name: str, ids: Ids, rng: random.Random) -> Ids:
    """The same bytes in other tokens: some tokens cut in two of the vocabulary, some into single bytes."""
    table, known = encoder(name).table, ids_by_bytes(name)
    pieces: list[int] = []
    for token in ids.tolist():
        spelled = table.bytes_of([token])
        cut = rng.randrange(1, max(len(spelled), 2))
        parts = [spelled[:cut], spelled[cut:]] if rng.random() < 0.5 else [bytes([byte]) for byte in spelled]
        replace = rng.random() < 0.5 and len(spelled) > 1 and all(part in known for part in parts)
        pieces += [known[part] for part in parts] if replace else [token]
    return np.array(pieces, np.int32)
