"""Rows of a JSONL, JSON or Parquet file or a Hugging Face dataset as prompts with columns."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping
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


Reader = Callable[[Data], Iterator[tuple[str, object]]]
"""Reads rows, each with the place where it stands."""


def read_data(config: Data) -> list[Row]:
    """The first `limit` rows, in file order. Raises TaskError that names the file and the line (or row) at fault."""
    rows = [_row(raw, where, config) for where, raw in islice(_reader(config)(config), config.limit)]
    if not rows:
        raise TaskError(f"task {config.name!r}: no rows in path={config.path!r} (split={config.split!r})")
    return rows


def take_rows(raws: Iterable[object], config: Data) -> list[Row]:
    """Rows that are at hand (mappings of columns), in their order; `path` names them in errors. TaskError as `read_data`."""
    return [_row(raw, where, config) for where, raw in islice(_numbered(raws, config.path), config.limit)]


def _reader(config: Data) -> Reader:
    readers: dict[str, Reader] = {
        "jsonl": _read_jsonl,
        "json": _read_json,
        "parquet": _read_parquet,
        "datasets": _read_dataset,
    }
    if config.source != "auto":
        return readers[config.source]
    suffix = Path(config.path).suffix
    if suffix == ".json":
        return _read_json if _is_list(Path(config.path)) else _read_jsonl
    if suffix in (".jsonl", ".parquet"):
        return readers[suffix[1:]]
    return _read_jsonl if Path(config.path).is_file() else _read_dataset


def _is_list(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
    except OSError:  # said by who reads it
        return False


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


def _read_json(config: Data) -> Iterator[tuple[str, object]]:
    """A file with one list of rows."""
    try:
        rows = msgspec.json.decode(Path(config.path).read_bytes().removeprefix(codecs.BOM_UTF8))
    except OSError as error:
        raise TaskError(f"task {config.name!r}: cannot read path={config.path!r}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TaskError(f"task {config.name!r}: {config.path}: not a JSON value: {error}") from error
    if not isinstance(rows, list):
        raise TaskError(f"task {config.name!r}: {config.path}: must hold a list of rows, got {type(rows).__name__}")
    yield from _numbered(rows, config.path)


def _read_parquet(config: Data) -> Iterator[tuple[str, object]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise TaskError(
            f"task {config.name!r}: path={config.path!r} is a Parquet file, and reading it needs `pip install 'mutualrl[data]'`"
        ) from error
    try:
        with parquet.ParquetFile(config.path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            yield from _numbered(rows, config.path)
    except (OSError, pyarrow.ArrowException) as error:
        raise TaskError(f"task {config.name!r}: cannot read path={config.path!r}: {error}") from error


def _read_dataset(config: Data) -> Iterator[tuple[str, object]]:
    try:
        import datasets
    except ImportError as error:
        raise TaskError(
            f"task {config.name!r}: path={config.path!r} is no file, and reading it as a Hugging Face dataset needs "
            f"`pip install 'mutualrl[data]'`"
        ) from error
    try:
        if any((Path(config.path) / marker).is_file() for marker in ("dataset_dict.json", "state.json")):
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


def _row(raw: object, where: str, config: Data) -> Row:
    name = config.prompt_column
    if not isinstance(raw, dict):
        raise TaskError(f"{where}: a row must be an object with a `{name}`, got {type(raw).__name__}")
    if name not in raw:
        raise TaskError(
            f"{where}: no `{name}` column, got columns {', '.join(sorted(raw)) or '(none)'}; `prompt_column` names another"
        )
    taken = sorted(raw.keys() & GIVEN)
    if taken:
        raise TaskError(f"{where}: reward functions get {taken[0]!r} from the run; rename this column of the data")
    prompt = raw[name]
    columns = {column: value for column, value in raw.items() if column != name}
    match columns.get("reward_model"):
        case {"ground_truth": truth}:  # verl's layout
            columns.setdefault("ground_truth", truth)
    if isinstance(prompt, str):
        content = config.template.replace("{x}", prompt) if config.template else prompt
        return Row(messages=(Message(role="user", content=content),), columns=columns, conversational=False)
    try:
        messages = msgspec.convert(prompt, tuple[Message, ...])
    except msgspec.ValidationError as error:
        raise TaskError(f"{where}: `{name}` must be text or a list of messages with role and content: {error}") from error
    if not messages:
        raise TaskError(f"{where}: `{name}` has no messages")
    return Row(messages=messages, columns=columns, conversational=True)
