"""Tokenizers in use, read out of package registries: their ids as their own libraries give them, and what they lose.

References of the vectors: tiktoken over the packages' ranks (gpt2, llama3, tekken, qwen3 after NFC, claude after NFKC with
Anthropic's own ranks), the sentencepiece library (mistral), llama-tokenizer-js under Node (llama2), transformers (deepseek;
gemma3 from another package's GGUF). smollm2 and bert are what was read at first, smollm2 equal to transformers' GGUF reader
but for fractions, which that one does not part from words.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tokenalign import Encoder, TokenTable
from tokenalign.families import LLAMA3_PATTERN
from tokenalign.rank_files import read_ranks
from tokenalign.registry import FAMILIES, family, folder
from tokenalign.sources import open_roles, open_tokenizer

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]
MIXED = (Path(__file__).parent.parent / "data" / "mixed200.txt").read_bytes()
LINES = MIXED.decode().split("\n")
TEXTS = (
    "hello world",
    "Hello,   world!\n\n    def f(x):\n\t\treturn x  # 12345",
    "日本語 mixed 한국어, emoji 👍🏽 and 👩\u200d👩\u200d👧!",
    "naïve café e\u0301 ﬁ ½ it's  \r\n ",
)
ANSWERS = {
    "gpt2": (
        "31373 995",
        "15496 11 220 220 995 0 628 220 220 220 825 277 7 87 2599 198 197 197 7783 2124 220 1303 17031 2231",
        "33768 98 17312 105 45739 252 7668 220 47991 250 166 113 255 168 244 112 11 44805 50169 235 8582 237 121 290 "
        "50169 102 447 235 41840 102 447 235 41840 100 0",
        "2616 38776 40304 304 136 223 27332 105 223 25208 340 338 220 220 201 198 220",
    ),
    "llama2": (
        "22172 3186",
        "15043 29892 259 3186 29991 13 13 1678 822 285 29898 29916 1125 13 12 12 2457 921 29871 396 29871 29896 29906 "
        "29941 29946 29945",
        "29871 30325 30346 30968 12849 29871 30877 31293 31129 29892 953 29877 2397 29871 243 162 148 144 243 162 146 192 "
        "322 29871 243 162 148 172 30722 243 162 148 172 30722 243 162 148 170 29991",
        "1055 30085 345 274 28059 321 30103 29871 31017 29871 30226 372 29915 29879 29871 6756 13 29871",
    ),
    "llama3": (
        "15339 1917",
        "9906 11 256 1917 2268 262 711 282 2120 997 197 862 865 220 674 220 4513 1774",
        "102433 102158 9709 104008 32179 11 43465 62904 235 9468 237 121 323 62904 102 102470 9468 239 102 102470 9468 "
        "239 100 0",
        "3458 38672 588 53050 384 54939 33595 71831 220 27154 433 596 10636 220",
    ),
    "mistral": (
        "7080 29477 2294",
        "23325 29493 1027 2294 29576 781 781 3055 1569 1053 29500 29512 2097 781 780 780 1575 2086 29473 1190 29473 29508 "
        "29518 29538 29549 29550",
        "29473 29910 29887 31089 10198 29473 30050 31547 30201 29493 1645 28581 29473 30963 31775 1072 29473 1011 930 916 "
        "940 30042 1011 930 916 940 30042 1011 930 916 938 29576",
        "2647 29688 1101 29113 1085 29717 29473 30928 29473 29807 1146 29510 29481 29473 2070 781 29473",
    ),
    "tekken": (
        "29706 4304",
        "22177 1044 1256 4304 5338 1293 2121 1284 4790 3640 1009 3739 2460 1032 2569 1032 1049 1050 1051 1052 1053",
        "10008 15199 12830 38243 2897 1044 1873 26303 119685 1145 1141 1240 1159 1143 1189 1321 119685 1145 1169 29568 "
        "1240 1159 1145 1169 29568 1240 1159 1145 1167 1033",
        "2302 7884 1672 35858 1324 1204 1129 42120 1172 1129 1032 28504 1494 1681 1256 1013 1010 1032",
    ),
    "deepseek": (
        "33310 2058",
        "19923 14 262 2058 2596 361 1351 285 4042 3395 200 5562 1527 223 1823 223 6895 1883",
        "88768 11168 51345 9227 14 980 82644 102527 40965 124 305 52780 105 46088 25730 105 46088 25730 103 3",
        "2720 91223 57664 312 17793 28137 223 23951 436 734 262 204 201 223",
    ),
    "qwen3": (
        "14990 1879",
        "9707 11 256 1879 2219 262 707 282 2075 982 197 853 856 220 671 220 16 17 18 19 20",
        "101059 102819 9519 130092 31079 11 42365 61804 235 145375 323 61804 102 378 235 145233 378 235 145665 0",
        "3376 37572 586 51950 3958 32495 70731 220 26062 432 594 10419 220",
    ),
    "gemma3": (
        "23391 1902",
        "9259 236764 139 12392 236888 108 140 2063 517 236769 236781 1473 107 255969 2060 1123 138 236865 236743 236770 "
        "236778 236800 236812 236810",
        "94951 9726 50413 237430 236764 64334 103712 242713 532 236743 243767 237243 243767 237243 244814 236888",
        "1789 238527 560 33443 545 238288 97940 47041 625 236789 236751 138 251 107 236743",
    ),
    "claude": (
        "9381 2253",
        "10002 16 261 2253 5 414 424 288 12 92 345 600 202 1172 679 225 379 64499",
        "12956 12163 23598 257 10647 59192 34593 260 23861 16 37060 41270 244 240 6617 242 126 329 41270 244 107 477 240 "
        "53965 107 477 240 53965 105 5",
        "2626 33350 357 54057 4964 15987 355 4652 22 444 562 261 3524",
    ),
    "smollm2": (
        "28120 905",
        "19556 28 256 905 17 1004 753 275 24 104 727 3354 197 5406 1792 216 907 216 33 34 35 36 37",
        "23274 115 40993 179 120 248 6468 216 33085 246 181 130 251 183 240 129 28 649 33777 15107 235 231 10813 233 138 "
        "284 15107 235 119 321 231 10813 235 119 321 231 10813 235 117 17",
        "3546 46494 37366 297 151 219 40367 216 16738 357 506 256 23799",
    ),
    "bert": (
        "7592 2088",
        "7592 1010 2088 999 13366 1042 1006 1060 1007 1024 2709 1060 1001 13138 19961",
        "1864 1876 1950 3816 1469 30006 30021 29991 30014 30020 29999 30008 1010 7861 29147 2072 100 1998 100 999",
        "15743 7668 1041 1984 1092 2009 1005 1055",
    ),
}
# Tokens of the whole mixed text: with the control and added tokens that it spells read as such, and read as text.
TOKENS = {
    "gpt2": (4107, 4112),
    "llama2": (4091, 4092),
    "llama3": (3135, 3135),
    "mistral": (4038, 4041),
    "tekken": (3586, 3593),
    "deepseek": (3084, 3088),
    "qwen3": (3281, 3299),
    "gemma3": (3329, 3334),
    "claude": (3407, 3407),
    "smollm2": (4163, 4180),
    "bert": (3063, 3063),
}
LOSSES = {
    "qwen3": ("composes characters (NFC)",),
    "claude": ("replaces compatibility characters (NFKC)",),
    "llama2": ("reads U+2581 as a space",),
    "mistral": ("reads U+2581 as a space",),
    "gemma3": ("reads U+2581 as a space",),
    "smollm2": ("has no token for 8 bytes of valid UTF-8: 0x04 0x06 0x13 0x14 ...",),
    "bert": (
        "drops control characters",
        "drops spaces between words",
        "makes letters small",
        "drops accents",
        "has an unknown token",
    ),
}
# Per cent of the row's token ends that are also ends of the column's.
LOSSLESS = ("gpt2", "llama3", "deepseek", "tekken")
COMMON_ENDS = {
    "gpt2": [100.0, 71.6, 70.6, 74.5],
    "llama3": [93.9, 100.0, 93.2, 95.8],
    "deepseek": [94.1, 94.6, 100.0, 97.0],
    "tekken": [85.3, 83.6, 83.4, 100.0],
}
_OPENED: dict[str, Tokenizer] = {}


def opened(name: str) -> Tokenizer:
    """One load per family and run."""
    if name not in _OPENED:
        _OPENED[name] = family(name)
    return _OPENED[name]


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def test_every_family_has_an_answer() -> None:
    assert set(ANSWERS) == set(TOKENS) == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_known_answers(name: str) -> None:
    """T20."""
    assert [ids(opened(name), text) for text in TEXTS] == [[int(i) for i in answer.split()] for answer in ANSWERS[name]]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_of_the_mixed_text(name: str) -> None:
    """T20, T21: the package of `bert` has a tokenizer that cuts at 128 tokens."""
    tokenizer = opened(name)
    assert (len(ids(tokenizer, MIXED.decode())), len(Encoder(tokenizer).encode(MIXED))) == TOKENS[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_losses(name: str) -> None:
    """T01: a table without losses spells the whole mixed text."""
    tokenizer = opened(name)
    table = TokenTable.from_tokenizer(tokenizer)
    assert table.losses == LOSSES.get(name, ())
    assert table.lossless == (name in LOSSLESS)
    if table.lossless:
        assert table.bytes_of(Encoder(tokenizer).encode(MIXED)) == MIXED


def test_smollm2_lacks_bytes() -> None:
    """T31: 21 of 256, 8 of them in valid UTF-8."""
    missing = TokenTable.from_tokenizer(opened("smollm2")).missing_bytes.tolist()
    assert len(missing) == 21
    assert missing[:4] == [0x04, 0x06, 0x13, 0x14]


def test_shares_of_common_ends() -> None:
    ends = {}
    for name in LOSSLESS:
        table = TokenTable.from_tokenizer(opened(name))
        ends[name] = table.ends(Encoder(opened(name)).encode(MIXED))
    shares = {a: [round(100 * float(np.isin(ends[a], ends[b]).mean()), 1) for b in LOSSLESS] for a in LOSSLESS}
    assert shares == COMMON_ENDS


@pytest.mark.parametrize(
    "name, roles",
    [
        ("gpt2", {"bos": {50256}, "eos": {50256}}),
        ("llama3", {"bos": {128000}, "eos": {128001, 128008, 128009}, "pad": {128004}}),
        ("tekken", {"bos": {1}, "eos": {2}, "pad": {11}, "unk": {0}}),
        ("qwen3", {"eos": {151645}, "pad": {151643}}),
        ("gemma3", {"bos": {2}, "eos": {106}, "pad": {0}, "unk": {3}}),
        ("smollm2", {"bos": {1}, "eos": {0, 2}, "pad": {2}}),
        ("bert", {}),
    ],
)
def test_roles(name: str, roles: dict[str, set[int]]) -> None:
    assert open_roles(folder(name)) == roles


def test_equal_vocabularies_of_other_formats() -> None:
    """T20: `mistral` and sentencepiece, `llama3` and tiktoken, line by line."""
    sentencepiece, tiktoken = pytest.importorskip("sentencepiece"), pytest.importorskip("tiktoken")
    model = str(folder("mistral") / "mistral_instruct_tokenizer_240323.model.v3")
    processor, mistral = sentencepiece.SentencePieceProcessor(model_file=model), open_tokenizer(model)
    mistral.encode_special_tokens = True
    assert [line for line in LINES if ids(mistral, line) != processor.encode(line)] == []
    file = folder("llama3") / "tokenizer.model"
    ranks = read_ranks(file.read_bytes())
    encoding = tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={})
    for llama3 in (open_tokenizer(file, pattern=LLAMA3_PATTERN), open_tokenizer(encoding)):
        assert [line for line in LINES if ids(llama3, line) != encoding.encode_ordinary(line)] == []


def test_gemma3_space_runs_are_spaces() -> None:
    """T32: added tokens of U+2581."""
    table = TokenTable.from_tokenizer(opened("gemma3"))
    tokenizer = opened("gemma3")
    assert table.bytes_of(ids(tokenizer, "a      b")) == b"a      b"
    assert len(table) == 262145
