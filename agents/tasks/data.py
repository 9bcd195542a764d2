"""Rows of a JSONL file or a Hugging Face dataset as prompts with columns."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from agents.errors import TaskError
from agents.rewards.functions import GIVEN
from agents.tasks.config import Data
from exchange.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """messages: the prompt; a text prompt is one user message. columns: all other columns of the row, as they came.

    conversational: the prompt was given as messages.
    """

    messages: tuple[Message, ...]
    columns: Mapping[str, object]
    conversational: bool


def read_data(config: Data) -> list[Row]:
    """The first `limit` rows, in file order. Raises TaskError that names the file and the line (or row) at fault."""
    named_rows = _read_jsonl(config) if _is_jsonl(config) else _read_dataset(config)
    rows = [_row(raw, where, config.template) for where, raw in islice(named_rows, config.limit)]
    if not rows:
        raise TaskError(f"task {config.name!r}: no rows in path={config.path!r} (split={config.split!r})")
    return rows


def _is_jsonl(config: Data) -> bool:
    if config.source == "auto":
        return config.path.endswith((".jsonl", ".json")) or Path(config.path).is_file()
    return config.source == "jsonl"


def _read_jsonl(config: Data) -> Iterator[tuple[str, object]]:
    path = Path(config.path)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    yield where, msgspec.json.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise TaskError(f"task {config.name!r}: {where}: not a JSON value: {error}") from error
                except RecursionError as error:
                    raise TaskError(f"task {config.name!r}: {where}: lists or objects nested too deep to read") from error
    except OSError as error:
        raise TaskError(f"task {config.name!r}: cannot read path={config.path!r}: {error}") from error


def _read_dataset(config: Data) -> Iterator[tuple[str, object]]:
    try:
        import datasets
    except ImportError as error:
        raise TaskError(
            f"task {config.name!r}: path={config.path!r} is no .jsonl file, and reading it as a Hugging Face dataset needs "
            f"`pip install 'mutualrl[data]'`"
        ) from error
    try:
        if Path(config.path).is_dir():
            loaded = datasets.load_from_disk(config.path)
            if isinstance(loaded, datasets.DatasetDict):
                loaded = loaded[config.split]
        else:
            loaded = datasets.load_dataset(config.path, split=config.split)
    except (OSError, ValueError, KeyError) as error:
        raise TaskError(
            f"task {config.name!r}: cannot load path={config.path!r}, split={config.split!r} as a dataset: "
            f"{type(error).__name__}: {error}"
        ) from error
    yield from _numbered(loaded, config.path)


def _numbered(rows: Iterable[object], path: str) -> Iterator[tuple[str, object]]:
    for number, raw in enumerate(rows):
        yield f"{path}, row {number}", raw


def _row(raw: object, where: str, template: str | None) -> Row:
    if not isinstance(raw, dict):
        raise TaskError(f"{where}: a row must be an object with a `prompt`, got {type(raw).__name__}")
    if "prompt" not in raw:
        raise TaskError(f"{where}: no `prompt` column, got columns {', '.join(sorted(raw)) or '(none)'}")
    taken = sorted(raw.keys() & GIVEN)
    if taken:
        raise TaskError(f"{where}: reward functions get {taken[0]!r} from the run; rename this column of the data")
    prompt = raw["prompt"]
    columns = {name: value for name, value in raw.items() if name != "prompt"}
    if isinstance(prompt, str):
        content = template.replace("{x}", prompt) if template else prompt
        return Row(messages=(Message(role="user", content=content),), columns=columns, conversational=False)
    try:
        messages = msgspec.convert(prompt, tuple[Message, ...])
    except msgspec.ValidationError as error:
        raise TaskError(f"{where}: `prompt` must be text or a list of messages with role and content: {error}") from error
    if not messages:
        raise TaskError(f"{where}: `prompt` has no messages")
    return Row(messages=messages, columns=columns, conversational=True)
