"""What peers ask and answer, as it was first written: each type's file decodes for ever.

tests/exchange/golden/*.bin hold body length u32, body, frame 0. A type that changes gets a new tag and a new file; the old
files stay. To write those that are missing: `python tests/exchange/test_golden.py`.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from exchange.requests import PeerReply, PeerRequest, SampleReply, SampleRequest, ScoreReply, ScoreRequest
from exchange.types import Message, Version
from exchange.wire import StructDecoder, encode_record

GOLDEN = Path(__file__).with_name("golden")
PROMPT = (Message(role="user", content="reverse abc:"),)
TEXTS = np.frombuffer("cbaħ".encode(), np.uint8)
LENGTHS = np.array([3, 2], np.int32)
TYPES: dict[str, PeerReply | PeerRequest[ScoreReply] | PeerRequest[SampleReply]] = {
    "scores-1": ScoreRequest(messages=PROMPT, texts=TEXTS, text_lengths=LENGTHS, top_k=2),
    "scored-1": ScoreReply(
        logprobs=np.array([-0.5, -1.0, -2.0], np.float32),
        token_ends=np.array([1, 3, 2], np.int32),
        token_counts=np.array([2, 1], np.int32),
        top_logprobs=np.array([[-0.5, -1.5], [-1.0, -3.0], [-0.25, -2.0]], np.float32),
        top_lengths=np.array([[1, 1], [2, 1], [2, 0]], np.int32),
        top_pieces=np.frombuffer("cxbayħ".encode(), np.uint8),
        version=Version(1, 7),
        tokenizer="bytes",
    ),
    "samples-1": SampleRequest(prompts=(PROMPT, PROMPT), n=4, max_tokens=64, temperature=0.5),
    "sampled-1": SampleReply(
        texts=TEXTS,
        text_lengths=LENGTHS,
        token_ends=np.array([1, 3, 2], np.int32),
        token_counts=np.array([2, 1], np.int32),
        logprobs=np.array([-0.5, -1.0, -2.0], np.float32),
        finished=np.array([True, False]),
        version=Version(1, 7),
        tokenizer="bytes",
    ),
}


def written(name: str) -> bytes:
    record = encode_record(TYPES[name])
    return struct.pack("<I", len(record.body)) + record.body + b"".join(record.frames)


@pytest.mark.parametrize("name", TYPES)
def test_golden_files_decode_for_ever(name: str) -> None:
    raw = (GOLDEN / f"{name}.bin").read_bytes()
    (length,) = struct.unpack_from("<I", raw)
    decoder: StructDecoder[object] = StructDecoder(type(TYPES[name]))
    got = decoder.decode(raw[4 : 4 + length], [memoryview(raw)[4 + length :]])
    for field in TYPES[name].__struct_fields__:
        np.testing.assert_array_equal(getattr(got, field), getattr(TYPES[name], field))
    assert written(name) == raw, "a changed type needs a new tag and a new file"


def test_every_type_that_is_shipped_has_its_file() -> None:
    shipped = [*PeerRequest.__subclasses__(), *PeerReply.__subclasses__()]
    tags = {str(kind.__struct_config__.tag) for kind in shipped if kind.__module__ == "exchange.requests"}
    assert {tag.replace("/", "-") for tag in tags} == set(TYPES) == {path.stem for path in GOLDEN.glob("*.bin")}


if __name__ == "__main__":
    for missing in (name for name in TYPES if not (GOLDEN / f"{name}.bin").exists()):
        (GOLDEN / f"{missing}.bin").write_bytes(written(missing))
