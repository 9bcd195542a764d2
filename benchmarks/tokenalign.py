"""What carrying a trace to another vocabulary costs, against what others do with the same texts and offsets.

    python benchmarks/tokenalign.py [--json] [--repeats 9] [--only NAME]

One fixed batch: 64 texts of about 1,000 tokens each, English prose about a programming language and its code (the
standard library's own, so nothing is downloaded for it). Tokenizers come from package registries and are cached. Every
number is a median over the repeats, and the two sides of a ratio take turns. One line (with `--json` one object) each:

* align_vs_trl_gold: tokens aligned per second, source and receiver tokens counted, against TRL's GOLD trainer's byte-offset
  aligner on the same offsets.
* encode_vs_hf: the fast encoder's tokens per second against `tokenizers` on one thread, the same ids; per family, then
  their mean.
* translate_extra_us_per_token: microseconds per receiver token of a translation less those that it spends in the encoder,
  timed within the same call: traces checked, ends checked against the text, alignment, log-probs, advantages, mask,
  residual. The reference is the encoding.
* topk_us_per_position: microseconds for mapping one row of k = 64; the reference is sorting the rows.
* growth: time per token of one alignment of 10^6 tokens over that of 10^4.
* run_of_*: time for twice the text over time for the text, for runs of one character that have made tokenizers quadratic.
* table_s, map_s: seconds to read a token table and to match two vocabularies; the reference is loading the tokenizer.
* carries_*: texts at which the reference fails; value 1 where ours carries them, reference what TRL says.
"""

from __future__ import annotations

import os
import sys

# Python puts a script's own folder first on the path, where `tokenalign` would be this file.
sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]  # noqa: PTH100, PTH120
os.environ |= {
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MUTUALRL_CACHE": "",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}

import argparse
import json
import pydoc_data.topics
import statistics
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tokenalign import Encoder, TokenTable, Trace, Translator, VocabularyMap, align, align_batch, map_topk, mean_over_bytes
from tokenalign.registry import family

SOURCE, RECEIVER = "llama3", "qwen3"
FAMILIES = ("gpt2", "llama3", "qwen3", "tekken", "claude", "smollm2", "deepseek", "gemma3", "mistral")
N_TEXTS, N_TOKENS, TOP_K, POSITIONS = 64, 1000, 64, 4096
RUNS = {"spaces": " ", "letters": "a", "emoji": "\U0001f600", "newlines": "\n"}

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One result. reference: what value is divided by, or by which it is divided where more is better."""

    name: str
    value: float
    reference: float | str
    ratio: float
    what: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="parts whose name begins so: align, encode, topk, growth, …")
    arguments = parser.parse_args()
    for line in Bench(arguments.repeats).lines(arguments.only):
        if arguments.json:
            print(json.dumps(asdict(line)), flush=True)
        else:
            reference = line.reference if isinstance(line.reference, str) else f"{line.reference:.4g}"
            print(f"{line.name:<30}{line.value:>12.4g} / {reference:<10} = {line.ratio:<8.3g} {line.what}", flush=True)


class Bench:
    """The batch, the tokenizers as they are asked for, and one method per part."""

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        self._encoders: dict[str, Encoder] = {}

    def lines(self, only: str) -> Iterator[Line]:
        parts: dict[str, Callable[[], Iterator[Line]]] = {
            "align": self.align,
            "encode": self.encode,
            "translate": self.translate,
            "topk": self.topk,
            "growth": self.growth,
            "run_of": self.runs,
            "table": self.tables,
            "carries": self.carries,
        }
        for name, part in parts.items():
            if name.startswith(only):
                yield from part()

    def encoder(self, name: str) -> Encoder:
        if name not in self._encoders:
            self._encoders[name] = Encoder(family(name))
        return self._encoders[name]

    @cached_property
    def texts(self) -> list[bytes]:
        """64 texts of 1,000 of the source's tokens, cut at whole characters."""
        prose = "\n\n".join(pydoc_data.topics.topics.values()).encode()
        ends = self.encoder(SOURCE).spell([prose]).ends
        bounds = [0, *(int(ends[N_TOKENS * count - 1]) for count in range(1, N_TEXTS + 1))]
        return [prose[start:end] for start, end in pairwise(bounds)]

    @cached_property
    def traces(self) -> list[Trace]:
        """The texts as a source would send them, with a log-prob per token and a mask."""
        spelled = self.encoder(SOURCE).spell(self.texts)
        rng = np.random.default_rng(0)
        rows = [spelled.ends[start:end] for start, end in pairwise(spelled.cu.tolist())]
        return [
            Trace(
                text=text,
                ends=np.append(ends, ends[-1]),
                finished=True,
                has_eos=True,
                logprobs=-rng.random(len(ends) + 1, dtype=np.float32),
                mask=rng.random(len(ends) + 1) < 0.9,
            )
            for text, ends in zip(self.texts, rows, strict=True)
        ]

    def align(self) -> Iterator[Line]:
        from trl.experimental.gold.gold_trainer import ULDLoss

        trl_align: Callable[[Any, Any], Any] = ULDLoss._align_by_byte_offsets
        a, b = self.encoder(SOURCE).spell(self.texts), self.encoder(RECEIVER).spell(self.texts)
        offsets = [_offsets(side.ends, side.cu) for side in (a, b)]
        flags = {name: np.zeros(N_TEXTS, np.bool_) for name in ("eos_a", "eos_b", "open_end")}
        groups = [trl_align(*pair) for pair in zip(*offsets, strict=True)]
        ours = align_batch(a.ends, a.cu, b.ends, b.cu, **flags)
        assert len(ours) == sum(len(pair[0]) for pair in groups), "both must find the same spans"
        mine, trl = self._medians(
            lambda: align_batch(a.ends, a.cu, b.ends, b.cu, **flags),
            lambda: [trl_align(*pair) for pair in zip(*offsets, strict=True)],
        )
        n = len(a.ids) + len(b.ids)
        yield _line("align_vs_trl_gold", n / mine, n / trl, f"tokens aligned per second, {SOURCE} and {RECEIVER}")

    def encode(self) -> Iterator[Line]:
        ratios = []
        strings = [text.decode() for text in self.texts]
        for name in FAMILIES:
            encoder, reference = self.encoder(name), family(name)
            if encoder.slow_reason is not None:
                yield Line(name=f"encode_{name}", value=0, reference="-", ratio=1, what=f"no fast path: {encoder.slow_reason}")
                continue
            by_library = partial(_one_by_one, reference, strings)
            ids = encoder.encode_batch(self.texts)
            assert [each.tolist() for each in ids] == by_library(), f"{name}: the fast path must give the library's ids"
            fast, slow = self._medians(partial(encoder.encode_batch, self.texts), by_library)
            ratios.append(slow / fast)
            n = sum(map(len, ids))
            yield _line(f"encode_{name}", n / fast, n / slow, "tokens per second, one thread, same ids")
        mean = statistics.mean(ratios)
        yield Line(name="encode_vs_hf", value=mean, reference=1.0, ratio=mean, what=f"mean of {len(ratios)} families")

    def translate(self) -> Iterator[Line]:
        encoder = self.encoder(RECEIVER)
        encoding = _Stopwatch(encoder.encode)
        encoder.encode = encoding  # type: ignore[method-assign]
        translator = Translator(encoder, eos_id=min(encoder.table.roles["eos"], default=0))
        advantages = np.concatenate([np.full(len(np.asarray(trace.ends)), 0.5) for trace in self.traces])
        extra, alone = [], []
        for _ in range(2 * self._repeats + 1):
            encoding.seconds = 0.0
            started = time.perf_counter()
            translation = translator.translate_batch(self.traces, max_tokens=1 << 20)
            assert translation.alignment is not None
            mean_over_bytes(advantages, translation.alignment)
            extra.append((time.perf_counter() - started - encoding.seconds) / len(translation.ids) * 1e6)
            alone.append(encoding.seconds / len(translation.ids) * 1e6)
        del encoder.encode  # the class's own again
        medians = statistics.median(extra[1:]), statistics.median(alone[1:])
        yield _line("translate_extra_us_per_token", *medians, f"over the encoding within it, {SOURCE} to {RECEIVER}")

    def topk(self) -> Iterator[Line]:
        a, b = self.encoder(SOURCE).table, self.encoder(RECEIVER).table
        vocabulary_map = VocabularyMap.of(a, b)
        rng = np.random.default_rng(0)
        text_ids = np.flatnonzero(a.widths > 0)
        ids = np.stack([rng.choice(text_ids, TOP_K, replace=False) for _ in range(POSITIONS)])
        logits = -np.sort(rng.exponential(3.0, (POSITIONS, TOP_K)), axis=1)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)) - 0.05
        mapped, sorting = self._medians(lambda: map_topk(vocabulary_map, ids, logprobs), lambda: np.argsort(ids, axis=1))
        yield _line(
            "topk_us_per_position", mapped / POSITIONS * 1e6, sorting / POSITIONS * 1e6, f"k = {TOP_K}, over one argsort"
        )

    def growth(self) -> Iterator[Line]:
        """One long text of each length, cut as the two tokenizers cut the batch."""
        a, b = self.encoder(SOURCE).spell(self.texts), self.encoder(RECEIVER).spell(self.texts)
        small, large = (_repeated(a.ends, a.cu, b.ends, b.cu, n) for n in (10**4, 10**6))
        times = self._medians(lambda: [align(*small) for _ in range(10)], lambda: align(*large))
        per_token = times[1] / sum(map(len, large)), times[0] / 10 / sum(map(len, small))
        yield _line("growth", per_token[0] * 1e6, per_token[1] * 1e6, "microseconds per token at 10^6 over 10^4 tokens")

    def runs(self) -> Iterator[Line]:
        encoder = self.encoder(RECEIVER)
        for name, character in RUNS.items():
            one, two = character.encode() * 100_000, character.encode() * 200_000
            long, short = self._medians(partial(encoder.spell, [two]), partial(encoder.spell, [one]))
            yield _line(f"run_of_{name}", long, short, "seconds for 200,000 characters over 100,000")

    def tables(self) -> Iterator[Line]:
        for name in (SOURCE, "gemma3"):
            load, build = self._medians(partial(family, name), partial(TokenTable.from_tokenizer, family(name)), repeats=3)
            yield _line(f"table_s_{name}", build, load, "seconds to read the table, over loading the tokenizer")
        a, b = self.encoder(SOURCE).table, self.encoder(RECEIVER).table
        match, load = self._medians(partial(VocabularyMap.of, a, b), partial(family, SOURCE), repeats=3)
        yield _line("map_s", match, load, f"seconds to match {SOURCE} with {RECEIVER}, over loading a tokenizer")

    def carries(self) -> Iterator[Line]:
        """Texts at which TRL's byte offsets fail, translated by ours from single bytes."""
        composed = "a\u0301 e\u0301 é n\u0303 ñ combining vs precomposed"
        assert unicodedata.normalize("NFC", composed) != composed
        for name, receiver, text in (("nfc_text", "qwen3", composed), ("sentencepiece", "mistral", "two  spaces, ▁ and é")):
            encoder = self.encoder(receiver)
            raw = text.encode()
            trace = Trace(text=raw, ends=np.arange(1, len(raw) + 1), finished=False, has_eos=False)
            got = Translator(encoder, eos_id=None).translate(trace, max_tokens=1000)
            assert got.alignment is not None and got.ends[-1] == len(raw)
            what = f"{receiver}: {len(got.alignment)} spans, {got.residual.changed_bytes} of {len(raw)} bytes rewritten, 0 lost"
            yield Line(name=f"carries_{name}", value=1, reference=_trl_on(receiver, text), ratio=1, what=what)

    def _medians(
        self, work: Callable[[], Any], reference: Callable[[], Any], repeats: int | None = None
    ) -> tuple[float, float]:
        """Median seconds of both, measured in turns after one warming call each."""
        times: tuple[list[float], list[float]] = ([], [])
        for repeat in range((repeats or self._repeats) + 1):
            for side, each in zip(times, (work, reference), strict=True):
                started = time.perf_counter()
                each()
                if repeat:
                    side.append(time.perf_counter() - started)
        return statistics.median(times[0]), statistics.median(times[1])


class _Stopwatch:
    """A function that adds up the time spent in it."""

    def __init__(self, work: Callable[[bytes], Any]) -> None:
        self._work = work
        self.seconds = 0.0

    def __call__(self, text: bytes) -> Any:
        started = time.perf_counter()
        result = self._work(text)
        self.seconds += time.perf_counter() - started
        return result


def _one_by_one(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids by the library without offsets, its fastest call on one thread."""
    return [each.ids for text in texts for each in tokenizer.encode_batch_fast([text], add_special_tokens=False)]


def _trl_on(name: str, text: str) -> str:
    from trl.experimental.utils import encode_with_byte_offsets

    try:
        encode_with_byte_offsets(family(name), [text])
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    return "carried"


def _line(name: str, value: float, reference: float, what: str) -> Line:
    return Line(name=name, value=value, reference=reference, ratio=value / reference, what=what)


def _offsets(ends: Ints, cu: Ints) -> list[list[tuple[int, int]]]:
    """Start and end of each token, as TRL wants them."""
    rows = [ends[start:end].tolist() for start, end in pairwise(cu.tolist())]
    return [list(zip([0, *row], row, strict=False)) for row in rows]


def _repeated(ends_a: Ints, cu_a: Ints, ends_b: Ints, cu_b: Ints, n_tokens: int) -> Sequence[Ints]:
    """The batch's texts as one text, again and again up to about n_tokens of both sides together."""
    lengths = ends_a[cu_a[1:] - 1]
    base = np.cumsum(lengths) - lengths
    one_a, one_b = ends_a + np.repeat(base, np.diff(cu_a)), ends_b + np.repeat(base, np.diff(cu_b))
    times = -(-n_tokens // (len(one_a) + len(one_b)))
    shifts = np.arange(times) * lengths.sum()
    long_a, long_b = (np.add.outer(shifts, each).ravel() for each in (one_a, one_b))
    last = int(long_a[min(n_tokens // 2, len(long_a)) - 1])
    long_a, long_b = long_a[long_a <= last], long_b[long_b <= last]
    return long_a, np.append(long_b, last) if long_b[-1] < last else long_b


if __name__ == "__main__":
    main()
