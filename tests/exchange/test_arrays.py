"""Arrays out of band: every layout arrives, nothing hostile does."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from exchange.arrays import ArrayReader, ArrayWriter
from exchange.errors import WireError
from exchange.testing import a_rollout_group, rewards_of
from exchange.types import RolloutGroup
from exchange.wire import RecordDecoder, encode_record


def there_and_back(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    writer = ArrayWriter()
    reference = writer.hook(array)
    reader = ArrayReader()
    reader.attach([memoryview(frame) for frame in writer.frames()])
    return reader.ext_hook(reference.code, memoryview(reference.data))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24).reshape(4, 6)[::2, ::-1],
        np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4)),
        np.arange(5, dtype=">i4"),
        np.array(7.5),
        np.empty((0, 3), np.int16),
        np.array([True, False]),
        np.array([1.5, np.nan, np.inf], np.float16),
        np.arange(1 << 18, dtype=np.float64),
    ],
    ids=["strided", "fortran", "big-endian", "0-d", "zero-size", "bool", "half", "own frame"],
)
def test_every_layout_arrives(array: npt.NDArray[Any]) -> None:
    got = there_and_back(array)
    np.testing.assert_array_equal(got, array)
    assert got.shape == array.shape
    assert got.dtype == array.dtype.newbyteorder("<")
    assert got.flags.aligned and got.flags.c_contiguous and not got.flags.writeable


@pytest.mark.parametrize(
    "array",
    [np.array([object()]), np.array(["text"]), np.array(["2020"], "M8[s]"), np.zeros(2, "f4,i4"), np.zeros((1,) * 9)],
    ids=["object", "text", "time", "structured", "9-d"],
)
def test_what_no_record_may_hold_is_not_sent(array: npt.NDArray[Any]) -> None:
    with pytest.raises(TypeError, match="array of a record"):
        ArrayWriter().hook(array)


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        (struct.pack("<4sBHQQQ", b"O\0\0\0", 1, 0, 0, 16, 2), "dtype"),
        (struct.pack("<4sBHQQQ", b"f4\0\0", 1, 0, 0, 16, 2), "shape"),
        (struct.pack("<4sBHQQQ", b"f4\0\0", 1, 0, 0, 2**64 - 4, 2**62 - 1), "outside"),
        (struct.pack("<4sBHQQQQ", b"f4\0\0", 2, 0, 0, 0, 2**33, 2**33), "shape"),
        (struct.pack("<4sBHQQQ", b"f4\0\0", 1, 1, 0, 8, 2), "outside"),
        (struct.pack("<4sBHQQQ", b"f4\0\0", 1, 0, 60, 8, 2), "outside"),
        (struct.pack("<4sBHQQQ", b"f4\0\0", 200, 0, 0, 8, 2), "reference"),
        (struct.pack("<4sBHQQ", b"f4\0\0", 1, 0, 0, 8), "reference"),
        (b"f4", "at least"),
    ],
)
def test_a_reference_that_lies_is_refused(reference: bytes, complaint: str) -> None:
    reader = ArrayReader()
    reader.attach([memoryview(bytes(64))])
    with pytest.raises(WireError, match=complaint):
        reader.ext_hook(1, memoryview(reference))


def test_an_unknown_extension_is_refused() -> None:
    with pytest.raises(WireError, match="code=5"):
        ArrayReader().ext_hook(5, memoryview(b""))


def test_a_misaligned_frame_gives_aligned_arrays() -> None:
    record = encode_record(a_rollout_group("alpha", 1, "p", tokens=4096))
    shifted = [memoryview(b"x" + frame)[1:] for frame in record.frames]
    got = RecordDecoder().decode(record.body, shifted)
    assert isinstance(got, RolloutGroup)
    for name in ("ids", "logprobs", "token_ends", "rewards"):
        array = getattr(got, name)
        assert array.flags.aligned and not array.flags.writeable
        np.testing.assert_array_equal(array, getattr(a_rollout_group("alpha", 1, "p", tokens=4096), name))


def test_a_small_array_does_not_pin_the_frame_that_it_came_in() -> None:
    writer = ArrayWriter()
    reference = writer.hook(np.arange(4))
    writer.hook(np.zeros(1 << 16))
    frame = memoryview(writer.frames()[0])
    reader = ArrayReader()
    reader.attach([frame])
    array = reader.ext_hook(reference.code, memoryview(reference.data))
    assert not np.shares_memory(array, np.frombuffer(frame, np.uint8))


def test_the_sender_may_write_into_its_array_at_once() -> None:
    experience = rewards_of("alpha", 1, "p", [1.0, 2.0])
    record = encode_record(experience)
    experience.rewards[:] = 9
    got = RecordDecoder().decode(record.body, [memoryview(frame) for frame in record.frames])
    np.testing.assert_array_equal(got.rewards, [1.0, 2.0])  # type: ignore[union-attr]


def test_a_field_takes_only_its_declared_dtype() -> None:
    wrong = rewards_of("alpha", 1, "p")
    wrong = type(wrong)(**{name: getattr(wrong, name) for name in wrong.__struct_fields__} | {"rewards": np.arange(2)})
    record = encode_record(wrong)
    with pytest.raises(WireError, match="float32"):
        RecordDecoder().decode(record.body, [memoryview(frame) for frame in record.frames])
