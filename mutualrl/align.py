"""`mutualrl align`: one text in the tokens of two tokenizers."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from tokenizers import Tokenizer

from mutualrl.errors import InputError
from tokenalign import Encoder, TokenAlignError, open_tokenizer
from tokenalign.registry import FAMILIES, family
from tokenalign.show import Comparison, compare
from tokenalign.show_picture import Picture

MAX_BLOCKS = 20
"""Of two lines each; a picture is for people."""

# What can be a repository on the hub, "gpt2" and "Qwen/Qwen3-0.6B", and is not meant as a path.
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# A picture must not need the network; without it the viewer's own monospace font is taken.
_WEB_FONT = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
_FILE_SUFFIXES = (".json", ".model", ".tiktoken")


def read_text(text: str | None, file: Path | None) -> bytes:
    """The text given on the command line, on standard input ("-") or in a file. Raises InputError for both or neither,
    for a file that cannot be read, and for bytes that are no UTF-8 (an incomplete last character is let through)."""
    if (text is None) == (file is None):
        raise InputError('give one text: as an argument, as "-" for standard input, or with --file')
    try:
        if file is not None:
            content = file.read_bytes()
        elif text == "-":
            content = sys.stdin.buffer.read()
        else:
            content = os.fsencode(text or "")
    except OSError as error:
        raise InputError(f"the text cannot be read: {error}") from error
    try:
        content.decode()
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            raise InputError(
                f"the text is not UTF-8, got byte 0x{content[error.start]:02x} at offset {error.start} of {len(content)}; "
                f"convert it first"
            ) from error
    return content


def run_align(
    text: bytes, source: tuple[str, str | None], target: tuple[str, str | None], *, as_json: bool, svg: Path | None
) -> None:
    """Print the picture of a text in two tokenizers, or one JSON object.

    source, target: what to open, and the pattern for ranks. Raises InputError for what cannot be opened or encoded.
    """
    _let_any_output_pass()
    out = Console(highlight=False)
    names = label(source[0]), label(target[0])
    try:
        encoders = [Encoder(open_named(*each)) for each in (source, target)]
        max_spans = None if as_json else MAX_BLOCKS * out.width  # a span is at least one cell wide
        comparison = compare(text, *encoders, max_spans=max_spans)
    except TokenAlignError as error:
        raise InputError(str(error)) from error
    picture = Picture(comparison=comparison, names=names, max_blocks=MAX_BLOCKS)
    if svg is not None:
        _write_svg(picture, svg)
    if as_json:
        print(as_object(comparison, (source[0], target[0])))
    else:
        out.print(picture)


def as_object(comparison: Comparison, names: tuple[str, str]) -> str:
    """A comparison as one JSON object on one line."""
    sides = {
        side: {"name": name, **msgspec.to_builtins(getattr(comparison, side))}
        for side, name in zip(("a", "b"), names, strict=True)
    }
    residual = msgspec.to_builtins(comparison.residual) | {"struct": comparison.residual.struct}
    return msgspec.json.encode({**sides, "residual": residual, "spans": comparison.spans}).decode()


def open_named(name: str, pattern: str | None) -> Tokenizer:
    """The tokenizer at a path, of a family in tokenalign.registry, or of a repository on the Hugging Face hub: the first
    of these that the name is. Raises SourceError and InputError, with what to do."""
    if Path(name).exists() or pattern is not None:
        return open_tokenizer(name, pattern=pattern)
    entry = FAMILIES.get(name)
    if entry is not None:
        with _telling(f"{name}: package {entry.package} {entry.version} from {entry.registry}, downloaded once"):
            return family(name)
    if name.endswith(_FILE_SUFFIXES) or not _HUB_NAME.fullmatch(name):
        raise InputError(f"there is no such file or folder, got {name!r}")
    with _telling(f"{name}: asking the Hugging Face hub"):
        return _from_hub(name)


def label(name: str) -> str:
    """A short name of a tokenizer: of a path the last part that tells it from others."""
    parts = [part for part in Path(name).parts if part not in ("tokenizer.json", "tekken.json", "tokenizer.model", "/")]
    return parts[-1] if parts else name


def _from_hub(name: str) -> Tokenizer:
    try:
        return Tokenizer.from_pretrained(name)
    except Exception as error:  # the libraries below raise anything from OSError to bare Exception
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{name!r} is neither a path nor a family ({', '.join(sorted(FAMILIES))}), and the Hugging Face hub does not "
            f"give it: {reason}"
        ) from error


@contextlib.contextmanager
def _telling(what: str) -> Iterator[None]:
    """Say what is waited for, where a person looks on."""
    with Console(stderr=True).status(what) if sys.stderr.isatty() else contextlib.nullcontext():
        yield


def _let_any_output_pass() -> None:
    """Write escapes for what the output's encoding lacks, instead of failing."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def _write_svg(picture: Picture, path: Path) -> None:
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(picture)
    svg = _WEB_FONT.sub("", console.export_svg(title="mutualrl align"))
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise InputError(f"the picture cannot be written: {error}") from error
