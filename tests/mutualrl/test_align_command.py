"""`mutualrl align`: what it opens, prints and refuses."""

from __future__ import annotations

import io
import json
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from mutualrl import cli, exit_codes
from mutualrl.align import label
from tokenalign.testing import byte_bpe_tokenizer, char_tokenizer


class Align:
    """Calls the command with two toy tokenizers, a byte-level one above a lossy one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._monkeypatch, self._capsys = folder, monkeypatch, capsys
        for name, tokenizer in (("bytes", byte_bpe_tokenizer(["hello"])), ("letters", char_tokenizer())):
            (folder / name).mkdir()
            tokenizer.save(str(folder / name / "tokenizer.json"))
        self.tokenizers = ("--from", str(folder / "bytes"), "--to", str(folder / "letters" / "tokenizer.json"))

    def __call__(self, *arguments: object, stdin: bytes = b"") -> tuple[int, str]:
        """Exit code, and what was printed on standard output or, where it failed, on standard error."""
        self._monkeypatch.setattr(sys, "argv", ["mutualrl", "align", *map(str, arguments)])
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        shown = self._capsys.readouterr()
        return ended.value.code, shown.err if ended.value.code else shown.out


@pytest.fixture
def align(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Align:
    return Align(tmp_path, monkeypatch, capsys)


def test_the_picture(align: Align) -> None:
    code, shown = align("hello x世", *align.tokenizers)
    assert code == 0
    assert shown.split("\n")[:2] == ["bytes    hello    │·│x│\\xe4╎\\xb8╎\\x96│", "letters  h╎e╎l╎l╎o│·│x│≠∅            │"]
    assert "letters: 8 tokens; 0 bytes changed, 3 lost (has an unknown token)" in shown
    assert "\x1b" not in shown


def test_one_json_object(align: Align) -> None:
    code, shown = align("hello x世", *align.tokenizers, "--json")
    assert code == 0
    got = json.loads(shown)
    assert [(span["text"], span["exact"], span["changed_b"]) for span in got["spans"]] == [
        ("hello", False, False),
        (" ", True, False),
        ("x", True, False),
        ("世", False, True),
    ]
    assert got["spans"][3]["pieces_a"] == ["\\xe4", "\\xb8", "\\x96"]
    assert (got["residual"]["n_exact"], got["residual"]["struct"], got["b"]["lost_bytes"]) == (2, 0.75, 3)
    assert (got["a"]["losses"], got["b"]["losses"]) == ([], ["has an unknown token"])


@pytest.mark.parametrize("text", [b"hello\n", b"", "hel\u2028lo\x00\x1b".encode(), b"hello\xe4\xb8"])
def test_the_text_comes_from_standard_input_or_a_file_unchanged(align: Align, text: bytes) -> None:
    (align.folder / "text").write_bytes(text)
    piped = align("-", *align.tokenizers, "--json", stdin=text)
    assert piped == align("--file", align.folder / "text", *align.tokenizers, "--json")
    assert piped[0] == 0
    got = json.loads(piped[1])
    assert sum(span["end"] - span["start"] for span in got["spans"]) + got["residual"]["tail_bytes"] == len(text)


def test_a_long_text_has_a_short_picture_and_whole_json(align: Align) -> None:
    text = b"hello there " * 2_000
    _, shown = align("-", *align.tokenizers, stdin=text)
    assert len(shown.split("\n")) < 80
    assert "… the first" in shown
    _, shown = align("-", *align.tokenizers, "--json", stdin=text)
    assert json.loads(shown)["spans"][-1]["end"] == len(text)


def test_the_picture_as_svg(align: Align) -> None:
    code, _ = align("hello x", *align.tokenizers, "--svg", align.folder / "picture.svg")
    assert code == 0
    svg = xml.etree.ElementTree.parse(align.folder / "picture.svg")
    assert "hello" in "".join(svg.getroot().itertext())
    assert "url(http" not in (align.folder / "picture.svg").read_text().replace('"', "")
    code, shown = align("hello x", *align.tokenizers, "--svg", align.folder / "absent" / "picture.svg")
    assert (code, "cannot be written" in shown) == (exit_codes.BAD_CONFIG, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give one text"),
        (("x", "--file", "absent"), "give one text"),
        (("--file", "absent"), "cannot be read"),
        (("x", "--from", "no/such/file"), "there is no such file or folder, got 'no/such/file'"),
        (("x", "--from", "absent.json"), "there is no such file or folder, got 'absent.json'"),
        (("x", "--from", "garbage"), "this is no SentencePiece model"),
        (("x", "--from", "folder"), "the folder holds no tokenizer"),
        (("x", "--from", "ranks"), "`pattern`"),
        (("x", "--from", "gpt2", "--from-pattern", "a+"), "there is no such file or folder"),
        (("x", "--to-pattern", "a+"), "`pattern` goes with a file of tiktoken ranks"),
        (("--file", "garbage"), "the text is not UTF-8, got byte 0xff at offset 1 of 3"),
    ],
)
def test_what_cannot_be_used_ends_with_2_and_no_traceback(
    align: Align, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(align.folder)
    Path("garbage").write_bytes(b"a\xffb")
    Path("ranks").write_bytes(b"YQ== 0\nYg== 1\n")
    Path("folder").mkdir()
    code, shown = align(*align.tokenizers, *arguments)
    assert code == exit_codes.BAD_CONFIG
    assert says in shown
    assert "Traceback" not in shown


def test_ranks_open_with_their_pattern(align: Align) -> None:
    ranks = align.folder / "ranks"
    ranks.write_bytes(b"YQ== 0\nYg== 1\nYWI= 2\n")
    code, shown = align("abab", "--from", ranks, "--from-pattern", r"\w+", *align.tokenizers[2:], "--json")
    assert code == 0
    assert [span["pieces_a"] for span in json.loads(shown)["spans"]] == [["ab"], ["ab"]]


def test_a_name_on_the_hub_that_cannot_be_had(align: Align, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, shown = align("x", *align.tokenizers, "--from", "nobody/has-this")
    assert code == exit_codes.BAD_CONFIG
    assert "'nobody/has-this' is neither a path nor a family (bert, " in shown


def test_labels_tell_tokenizers_apart() -> None:
    assert label("/models/alpha/tokenizer.json") == "alpha"
    assert label("/models/alpha") == "alpha"
    assert label("tokenizer.json") == "tokenizer.json"
    assert label("Qwen/Qwen3-0.6B") == "Qwen3-0.6B"


def test_help_names_every_family(align: Align) -> None:
    from tokenalign.registry import FAMILIES

    code, shown = align("--help")
    assert code == 0
    assert ", ".join(sorted(FAMILIES)) in " ".join(shown.split())


@pytest.mark.real
@pytest.mark.slow
def test_families_by_name_and_a_text_that_one_of_them_rewrites(align: Align, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(align.folder)
    code, shown = align("costs 123 cafe\u0301", "--from", "gpt2", "--to", "qwen3")
    assert code == 0
    assert shown.split("\n")[:2] == ["gpt2   cost│s│·123   │·cafe╎\\xcc╎\\x81│", "qwen3  cost│s│·╎1╎2╎3│≠·café         │"]
    assert "qwen3: 7 tokens; 3 bytes changed, 0 lost (composes characters (NFC))" in shown
