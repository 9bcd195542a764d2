"""What a worker has to send while its transport takes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from exchange.messages import Ping
from exchange.outbox import Outbox
from exchange.wire import JOINED_BYTES, Buffer, encode_message, hub_decoder, messages_in


class Line:
    """A transport that takes nothing before it is open."""

    def __init__(self) -> None:
        self.open = False
        self.sent: list[Sequence[Buffer]] = []

    async def send(self, frames: Sequence[Buffer]) -> None:
        self.sent.append(frames)

    def send_now(self, frames: Sequence[Buffer]) -> bool:
        if self.open:
            self.sent.append(frames)
        return self.open


@pytest.mark.slow
def test_what_was_held_back_arrives_whole_however_much_it_was() -> None:
    line = Line()
    outbox = Outbox(line)
    ping = encode_message(Ping(step=1))
    for number in range(5000):
        outbox.put(encode_message(Ping(step=1), number))
    assert not line.sent
    line.open = True
    for number in range(5000, 5000 + JOINED_BYTES // len(ping[0])):
        outbox.put(encode_message(Ping(step=1), number))
    frames = [frames for multipart in line.sent for frames in messages_in([memoryview(frame) for frame in multipart])]
    got = [hub_decoder().decode(message).request_id for message in frames]
    assert got[:5000] == list(range(5000))
