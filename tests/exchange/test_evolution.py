"""What is written today is read tomorrow, and what is read today was written by any version before.

tests/golden holds records of every kind, tests/exchange/golden what peers ask and answer, one record as it stands in a
segment, and fields.json: the fields of every type, true where a writer has always set it. A type may grow by fields
with defaults; to note those, and new types: `python tests/exchange/test_evolution.py`.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import random
import struct
from pathlib import Path
from typing import Any, Union

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

import exchange
from exchange.index_rows import RecordMeta
from exchange.kinds import Kinds
from exchange.requests import PeerReply, PeerRequest
from exchange.segment_records import SegmentRecord, decode_stored, encode_stored
from exchange.testing import a_success
from exchange.types import AgentName, Cursor, Experience, PromptId, Version
from exchange.wire import StructDecoder, encode_record

HERE = Path(__file__).with_name("golden")
GOLDEN = sorted([*HERE.parents[1].joinpath("golden").glob("*.bin"), *HERE.glob("*.bin")])
STORED, FIELDS = HERE / "record-1.seg", HERE / "fields.json"
META = RecordMeta(
    kind="successes",
    agent=AgentName("alpha"),
    step=3,
    version=Version(0, 3),
    prompt_ids=(PromptId("4f0c"),),
    stored_at_ns=1_700_000_000_000_000_000,
    peer=b"\1" + bytes(15),
    seq=7,
)


def wire_structs() -> list[type[msgspec.Struct]]:
    """Every struct of the package that leaves its process; a hub's settings do not."""
    modules = [importlib.import_module(f"exchange.{module.name}") for module in pkgutil.iter_modules(exchange.__path__)]
    found = {each for module in modules for each in vars(module).values() if isinstance(each, type)} - {exchange.HubConfig}
    public = (kind for kind in found if issubclass(kind, msgspec.Struct) and not kind.__name__.startswith("_"))
    return sorted(public, key=lambda kind: (kind.__module__, kind.__name__))


def reader(path: Path) -> Any:
    """Today's reader of what a golden file holds."""
    if path.parent == HERE:
        shipped = [*PeerRequest.__subclasses__(), *PeerReply.__subclasses__()]
        asked = tuple(kind for kind in shipped if kind.__module__ == "exchange.requests")
        return StructDecoder(Union[asked])  # noqa: UP007  # made of values
    return Kinds()


def parts(path: Path) -> tuple[bytes, list[memoryview]]:
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<I", raw)
    return raw[4 : 4 + length], [memoryview(raw)[4 + length :]]


def assert_equal(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    for name in right.__struct_fields__:
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))


def written_fields() -> dict[str, dict[str, bool]]:
    """The fields of every type by its tag (a part of others has its name), and whether it has no default."""
    return {
        str(kind.__struct_config__.tag or kind.__name__): {
            field.encode_name: field.required for field in msgspec.structs.fields(kind)
        }
        for kind in wire_structs()
    }


def test_there_is_a_golden_file_of_every_stored_kind() -> None:
    tags = {kind.replace("/", "-") for kind in Kinds().tags}
    assert tags <= {path.stem for path in GOLDEN} and len(GOLDEN) >= 8


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 20), st.dictionaries(st.sampled_from(["later", "much later"]), st.lists(st.integers(0, 9))))
def test_order_and_unknown_fields_make_no_difference(path: Path, seed: int, later: dict[str, object]) -> None:
    body, frames = parts(path)
    fields = [*msgspec.msgpack.decode(body).items(), *later.items()]
    random.Random(seed).shuffle(fields)
    assert_equal(reader(path).decode(msgspec.msgpack.encode(dict(fields)), frames), reader(path).decode(body, frames))


def test_a_stored_record_is_read_for_ever() -> None:
    found = decode_stored(memoryview(STORED.read_bytes()))
    assert isinstance(found, SegmentRecord) and found.cursor == 17
    assert msgspec.msgpack.decode(found.meta, type=RecordMeta) == META
    assert_equal(Kinds().decode(found.body, [memoryview(frame) for frame in found.frames]), a_success("alpha", 3, "4f0c"))


def test_nothing_that_leaves_its_process_is_positional_or_closed() -> None:
    """Positions would be read wrongly in silence once fields are reordered; a closed type could never grow."""
    assert [kind for kind in wire_structs() if kind.__struct_config__.array_like] == []
    assert [kind for kind in wire_structs() if kind.__struct_config__.forbid_unknown_fields] == []


def test_every_type_of_its_own_is_tagged_from_its_first_day() -> None:
    """A struct without a tag cannot become one of several later."""
    wire = importlib.import_module("exchange.messages").Wire
    bases = (wire, Experience, PeerRequest, PeerReply)
    abstract = {*bases, exchange.PromptExperience}
    own = [kind for kind in wire_structs() if issubclass(kind, bases) and kind not in abstract]
    assert len(own) > 30
    assert [kind for kind in own if kind.__struct_config__.tag in (None, kind.__name__)] == []
    assert {kind.__struct_config__.tag_field for kind in own} == {"type"}
    assert RecordMeta.__struct_config__.tag == "record/1"


def test_types_only_grow_and_only_by_fields_with_defaults() -> None:
    noted: dict[str, dict[str, bool]] = json.loads(FIELDS.read_text())
    today = written_fields()
    assert set(noted) <= set(today), "what was once written must stay readable"
    for tag, fields in noted.items():
        gone = [name for name in fields if name not in today[tag]]
        required = [name for name, needed in today[tag].items() if needed and not fields.get(name, False)]
        assert (tag, gone, required) == (tag, [], [])


if __name__ == "__main__":
    record = encode_record(a_success("alpha", 3, "4f0c"))
    stored = SegmentRecord(cursor=Cursor(17), meta=msgspec.msgpack.encode(META), body=record.body, frames=record.frames)
    if not STORED.exists():
        STORED.write_bytes(b"".join(encode_stored(stored)[0]))
    FIELDS.write_text(json.dumps(written_fields(), indent=1) + "\n")
