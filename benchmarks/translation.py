"""What translating a peer's text costs beyond encoding it.

    python benchmarks/translation.py [--repeats 7] [--json]

A text of words, code and several scripts is cut by one tokenizer and translated to another (byte-level BPE to characters of
SentencePiece kind). The reference is what nobody can save: the receiver's own encoding of the text. Prints medians over the
repeats in microseconds per thousand receiver tokens, and their ratio to the encoding alone: `encode` (the `tokenizers`
library), `translate` (encode, spell-check, align, residual), `align` and `sum_spans`. `--json` gives one object per line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from tokenalign import Encoder, TokenTable, Translator, align, sum_spans
from tokenalign.testing import EOS_ID, byte_bpe_tokenizer, spm_bpe_tokenizer

LINE = "the reverse of hello is there: def f(x): return 12 世界 éè 😀\n"


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    source, receiver = byte_bpe_tokenizer(), spm_bpe_tokenizer()
    source_table, table, encoder = TokenTable.from_tokenizer(source), TokenTable.from_tokenizer(receiver), Encoder(receiver)
    translator = Translator(encoder, table, eos_id=EOS_ID)
    translate = partial(translator.translate, finished=True, source_has_eos=False, max_tokens=1 << 30)
    for lines in (4, 64, 512):
        text = (LINE * lines).encode()
        source_ends = source_table.ends(Encoder(source).encode(text))
        ends = table.ends(encoder.encode(text))
        alignment = align(source_ends, ends)
        logprobs = np.full(len(source_ends), -1.0)
        works: dict[str, Callable[[], object]] = {
            "encode": partial(receiver.encode, text.decode(), add_special_tokens=False),
            "translate": partial(translate, text, source_ends),
            "align": partial(align, source_ends, ends),
            "sum_spans": partial(sum_spans, logprobs, alignment),
        }
        medians = {name: median_seconds(work, arguments.repeats) for name, work in works.items()}
        for name, seconds in medians.items():
            row = {
                "work": name,
                "tokens": len(ends),
                "us_per_1000_tokens": seconds / len(ends) * 1e9,
                "ratio_to_encode": seconds / medians["encode"],
            }
            if arguments.json:
                print(json.dumps(row))
            else:
                cost = f"{row['us_per_1000_tokens']:>8.0f} us/1000  ×{row['ratio_to_encode']:.2f}"
                print(f"{name:<10} {len(ends):>7} tokens  {cost}")


if __name__ == "__main__":
    main()
