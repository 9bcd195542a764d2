"""What is logged of messages that cannot be read."""

from __future__ import annotations

import pytest

from exchange.bad_messages import BadMessages
from exchange.errors import WireError


def test_all_bad_messages_are_counted_and_few_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    bad = BadMessages("message to the hub")
    for number in range(10_000):
        bad.add(b"\1one", WireError(f"no. {number}"))
    assert bad.count == 10_000
    assert [record.getMessage().split(" (")[1].split(" ")[0] for record in caplog.records] == (
        ["1", "2", "3", *(str(2**power) for power in range(2, 14))]
    )
    bad.add(b"\1two", WireError("not magic"))
    assert "peer 0174776f (1 of this peer so far): not magic" in caplog.text, "one that is loud hides no other"


def test_peers_under_ever_new_names_fill_neither_log_nor_memory(caplog: pytest.LogCaptureFixture) -> None:
    bad = BadMessages("message to the hub")
    for number in range(100_000):
        bad.add(b"\1%d" % number, WireError("not magic"))
    assert len(caplog.records) < 256 + 20
    assert len(bad._counts) == 257
