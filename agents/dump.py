"""A dumped training step: all that the learner was given, and what came of it, in one safetensors file.

The metadata under `step` is JSON: the agent, the step (as metrics count it, from 1), how many prompts it had, what each row
is beside its arrays, and the names of the metrics. Arrays are named by row and field: `12.ids`, `12.spans.logprobs`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from agents.errors import CheckpointError
from agents.parts import step_name
from agents.rows import Row, Spans, Stream

SPANS = "spans."


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDump:
    """One step of one agent. metrics: what the learner said of it; empty for a step that ended the run."""

    agent: str
    step: int
    prompts: int
    rows: Sequence[Row]
    metrics: Mapping[str, float] = field(default_factory=dict)


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    agent: str
    step: int
    prompts: int
    rows: list[dict[str, Any]]
    metrics: list[str]


def dump_path(directory: Path, agent: str, step: int) -> Path:
    """Where the dump of an agent's step lies below a run's directory of dumps."""
    return directory / agent / f"{step_name(step)}.safetensors"


def write_dump(directory: Path, dump: StepDump) -> Path:
    """Write a dump in place of an earlier one of its step, and return where."""
    path = dump_path(directory, dump.agent, dump.step)
    arrays: dict[str, npt.NDArray[Any]] = {"metrics": np.array(list(dump.metrics.values()), dtype=np.float64)}
    plain: list[dict[str, Any]] = [{} for _ in dump.rows]
    for index, row in enumerate(dump.rows):
        values = {each.name: getattr(row, each.name) for each in dataclasses.fields(row) if each.name != "spans"}
        if row.spans is not None:
            values |= {f"{SPANS}{each.name}": getattr(row.spans, each.name) for each in dataclasses.fields(row.spans)}
        for name, value in values.items():
            if isinstance(value, np.ndarray | float):  # JSON has no NaN and no infinity, which a step that fails may have
                arrays[f"{index}.{name}"] = np.asarray(value, order="C")
            else:
                plain[index][name] = value
    head = _Head(agent=dump.agent, step=dump.step, prompts=dump.prompts, rows=plain, metrics=list(dump.metrics))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(arrays, partial, metadata={"step": msgspec.json.encode(head).decode()})
    partial.replace(path)
    return path


def read_dump(path: Path) -> StepDump:
    """What `write_dump` wrote. Raises CheckpointError when it cannot be read."""
    try:
        with safe_open(path, framework="np") as file:
            head = msgspec.json.decode(file.metadata()["step"], type=_Head)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} is no dump of a step: {error}") from error
    fields: list[dict[str, Any]] = [dict(plain) for plain in head.rows]
    for name, value in arrays.items():
        index, _, key = name.partition(".")
        if key:
            fields[int(index)][key] = value
    metrics = dict(zip(head.metrics, arrays["metrics"].tolist(), strict=True))
    return StepDump(
        agent=head.agent, step=head.step, prompts=head.prompts, rows=[_row(each) for each in fields], metrics=metrics
    )


def _row(values: dict[str, Any]) -> Row:
    values = {
        name: value.item() if isinstance(value, np.ndarray) and not value.ndim else value for name, value in values.items()
    }
    spans = {name.removeprefix(SPANS): values.pop(name) for name in list(values) if name.startswith(SPANS)}
    stream = Stream(values.pop("stream"))
    return Row(**values, stream=stream, spans=Spans(**spans) if spans else None)
