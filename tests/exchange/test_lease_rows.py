"""What a durable hub stores of leases, as it was first written: each file decodes for ever.

To write those that are missing: `python tests/exchange/test_lease_rows.py`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from exchange.errors import StorageError
from exchange.lease_messages import DeadLetter
from exchange.lease_rows import StoredGroup, StoredHeld, StoredLetters, decode_row, encode_row
from exchange.types import AgentName, Cursor

GOLDEN = Path(__file__).with_name("golden")
ROWS: dict[str, StoredGroup | StoredHeld | StoredLetters] = {
    "group-1": StoredGroup(
        kinds=("rewards", "rollouts"),
        agents=(AgentName("alpha"),),
        done=7,
        dead=1,
        lost=2,
        deliveries=19,
        taken=((AgentName("alpha"), "rewards", Cursor(17)), (AgentName("alpha"), "rollouts", Cursor(12))),
        settled_to=Cursor(12),
    ),
    "held-1": StoredHeld(kind="rollouts", deliveries=3),
    "letters-1": StoredLetters(
        letters=(
            DeadLetter(
                cursor=Cursor(9),
                kind="rollouts",
                agent=AgentName("alpha"),
                deliveries=5,
                reason="failed",
                detail="ValueError: no such tokenizer",
                worker=AgentName("judge"),
            ),
        )
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_stored_rows_decode_for_ever_and_may_grow(name: str) -> None:
    raw = (GOLDEN / f"{name}.row").read_bytes()
    assert decode_row(raw) == ROWS[name]
    grown = msgspec.msgpack.encode({"later": [1], **msgspec.msgpack.decode(raw)})
    assert decode_row(grown) == ROWS[name]
    assert encode_row(ROWS[name]) == raw, "a changed row needs a new tag and a new file"


@pytest.mark.parametrize("raw", [b"", b"\x80", msgspec.msgpack.encode({"type": "group/2"})])
def test_rows_of_another_version_are_refused(raw: bytes) -> None:
    with pytest.raises(StorageError, match="version that wrote it"):
        decode_row(raw)


if __name__ == "__main__":
    for missing in (name for name in ROWS if not (GOLDEN / f"{name}.row").exists()):
        (GOLDEN / f"{missing}.row").write_bytes(encode_row(ROWS[missing]))
