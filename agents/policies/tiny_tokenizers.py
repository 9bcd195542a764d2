"""The tiny policies' tokenizers, made from the corpus beside this file; equal settings give equal tokenizers anywhere."""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.resources import files

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from agents.errors import PolicyError

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
LONGEST_PIECE = 4


def read_corpus() -> list[str]:
    """The shipped corpus, one line each."""
    return files(__package__).joinpath("corpus.txt").read_text(encoding="utf-8").splitlines()


def byte_bpe(vocab_size: int) -> Tokenizer:
    """Byte-level BPE: all 256 bytes, and as many merges as `vocab_size` leaves room for. Spells every text."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + 3
    if vocab_size < smallest:
        raise PolicyError(
            f"`vocab_size` of a byte_bpe tokenizer must be >= {smallest} (256 bytes and 3 control tokens), got "
            f"vocab_size={vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, BOS, EOS], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(read_corpus(), trainer)
    return tokenizer


def char(vocab_size: int) -> Tokenizer:
    """One token for each printable ASCII character and the line feed; anything else becomes `<unk>`."""
    pieces = [PAD, EOS, UNK, "\n", *sorted(set(string.printable) - set(string.whitespace) | {" "})]
    if vocab_size < len(pieces):
        raise PolicyError(f"`vocab_size` of a char tokenizer must be >= {len(pieces)}, got vocab_size={vocab_size}")
    tokenizer = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (PAD, EOS, UNK)])
    return tokenizer


def unigram(vocab_size: int) -> Tokenizer:
    """A unigram model over printable ASCII and the corpus's most frequent pieces of up to 4 characters.

    Pieces are scored by their log share of the corpus, once, without the EM of the library's trainer, whose sums depend
    on the number of threads. Characters that the corpus lacks have a score below all others. Anything else is `<unk>`.
    """
    characters = ["\n", *sorted(set(string.printable) - set(string.whitespace) | {" "})]
    smallest = len(characters) + 4
    if vocab_size < smallest:
        raise PolicyError(f"`vocab_size` of a unigram tokenizer must be >= {smallest}, got vocab_size={vocab_size}")
    counts: Counter[str] = Counter()
    for line in read_corpus():
        for start in range(len(line)):
            for end in range(start + 1, min(start + LONGEST_PIECE, len(line)) + 1):
                if " " not in line[start + 1 : end]:
                    counts[line[start:end]] += 1
    longer = sorted((p for p in counts if len(p) > 1), key=lambda p: (-counts[p] * len(p), p))[: vocab_size - smallest]
    total = sum(counts.values())
    pieces = [(token, 0.0) for token in (PAD, BOS, EOS, UNK)]
    pieces += [(piece, math.log((counts[piece] or 0.5) / total)) for piece in (*characters, *longer)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3, byte_fallback=False))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (PAD, BOS, EOS, UNK)])
    return tokenizer


TOKENIZERS: Mapping[str, Callable[[int], Tokenizer]] = {"byte_bpe": byte_bpe, "char": char, "unigram": unigram}
"""TinyPolicy.tokenizer -> builder, by most tokens."""
