"""A dumped step comes back as it was, whatever its rows are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.dump import StepDump, dump_path, read_dump, write_dump
from agents.errors import CheckpointError
from agents.rows import Row, Spans, Stream

floats = st.floats(width=32)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    length = draw(st.integers(1, 4))
    logprobs = st.lists(floats, min_size=length, max_size=length)
    return Row(
        stream=draw(st.sampled_from(Stream)),
        prompt_ids=np.arange(draw(st.integers(0, 3)), dtype=np.int32),
        ids=np.array(draw(st.lists(st.integers(0, 99), min_size=length, max_size=length)), dtype=np.int32),
        advantage=draw(st.floats()),
        weight=draw(st.floats()),
        spans=draw(st.none() | st.just(Spans(span=np.arange(length, dtype=np.int32), logprobs=np.array([0.5, -np.inf])))),
        sampled_logprobs=draw(st.none() | logprobs.map(lambda values: np.array(values, dtype=np.float32))),
    )


def assert_same(left: object, right: object) -> None:
    """Equal in every field, to the bit, with equal types."""
    if dataclasses.is_dataclass(left) and not isinstance(left, type):
        assert type(left) is type(right)
        for field in dataclasses.fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name))
    elif isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray) and left.dtype == right.dtype and left.tobytes() == right.tobytes()
    elif isinstance(left, float):
        assert np.array_equal(left, right, equal_nan=True) and type(right) is float  # type: ignore[arg-type]
    else:
        assert left == right and type(left) is type(right)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(rows(), max_size=4), st.dictionaries(st.text(max_size=5), st.floats(), max_size=3))
def test_a_dump_comes_back(tmp_path_factory: pytest.TempPathFactory, given_rows: list[Row], metrics: dict[str, float]) -> None:
    directory = tmp_path_factory.getbasetemp()
    dump = StepDump(agent="alpha", step=3, prompts=2, rows=given_rows, metrics=metrics)
    path = write_dump(directory, dump)
    assert path == dump_path(directory, "alpha", 3)
    found = read_dump(path)
    assert (found.agent, found.step, found.prompts, len(found.rows)) == ("alpha", 3, 2, len(given_rows))
    for left, right in zip(dump.rows, found.rows, strict=True):
        assert_same(left, right)
    assert list(found.metrics) == list(metrics)
    for name, value in metrics.items():
        assert_same(value, found.metrics[name])


@pytest.mark.parametrize("content", [None, b"", b"x" * 100])
def test_what_is_no_dump_is_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "step-000001.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step-000001\.safetensors is no dump of a step"):
        read_dump(path)
