"""Which prompts an agent's batches take, and that an interruption changes none of them."""

from __future__ import annotations

import pytest

import exchange
from agents.config import Objective
from agents.drawing import Drawing
from agents.peers import PeerFeed
from agents.sharing.config import Isolated
from agents.sharing.isolated import IsolatedRule
from agents.testing import ScriptedReceiver, make_prompt
from exchange.client import Client
from exchange.types import PromptId

TRAIN = [make_prompt(f"p{index}") for index in range(7)]


def drawing(client: Client) -> Drawing:
    """Three of seven prompts a step, so that an epoch of each slot ends behind step 6."""
    feed = PeerFeed(
        client,
        IsolatedRule(Isolated(), Objective(), ScriptedReceiver(lambda prompt, text: 0.0)),
        teachers=[],
        prompts={prompt.id: prompt for prompt in TRAIN},
        lockstep=False,
        step_timeout_s=5.0,
        seams=(),
    )
    return Drawing(TRAIN, feed, seed=3, schedule="seed", count=3)


async def use(source: Drawing, count: int) -> list[list[PromptId]]:
    used = []
    for _ in range(count):
        drawn = await source.next()
        source.use(drawn)
        used.append([prompt.id for prompt in drawn.prompts])
    return used


@pytest.mark.parametrize("interrupted", [1, 6, 7, 8, 14])
async def test_an_interruption_also_at_the_end_of_an_epoch_repeats_and_skips_no_prompt(interrupted: int) -> None:
    async with exchange.memory() as hub, hub.connect("alpha") as client:
        whole = await use(drawing(client), 21)
        assert whole[:7] != whole[7:14], "epochs are shuffled anew"
        for slot in range(3):
            assert len({prompts[slot] for prompts in whole[:7]}) == 7
        before = drawing(client)
        head = await use(before, interrupted)
        after = drawing(client)
        after.restore(sorted(before.met))
        assert head + await use(after, 21 - interrupted) == whole


async def test_batches_that_were_drawn_ahead_and_never_used_are_drawn_again() -> None:
    async with exchange.memory() as hub, hub.connect("alpha") as client:
        whole = await use(drawing(client), 10)
        before = drawing(client)
        ahead = [await before.next() for _ in range(7)]
        for drawn in ahead[:5]:
            before.use(drawn)
        after = drawing(client)
        after.restore(sorted(before.met))
        assert await use(after, 5) == whole[5:]
