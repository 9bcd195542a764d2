"""A project's own kinds of experience over every transport, and what happens where they are not known."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

import exchange
from exchange.testing import rewards_of
from exchange.types import AgentName, PromptId, Version


class Critique(exchange.PromptExperience, frozen=True, kw_only=True, tag="critiques/1"):
    """A judge's words on one group, and its marks."""

    text: str
    marks: npt.NDArray[np.float32]


class LaterCritique(exchange.PromptExperience, frozen=True, kw_only=True, tag="critiques/2"):
    """The same, of a later version."""

    sentences: tuple[str, ...]


class BrokenCritique(exchange.PromptExperience, frozen=True, kw_only=True, tag="critiques/1"):
    """What a peer with an error publishes under the tag of Critique."""

    text: int
    marks: npt.NDArray[np.float32]


MARKS = np.array([0.5, np.nan], np.float32)


def base(step: int, prompt: str = "p") -> dict[str, Any]:
    who = {"agent": AgentName("alpha"), "step": step, "version": Version(0, step)}
    return who | {"prompt_id": PromptId(prompt), "task": "reverse"}


def a_critique(step: int, prompt: str = "p") -> Critique:
    return Critique(**base(step, prompt), text="too short", marks=MARKS)


async def test_own_kinds_arrive_as_they_were_and_are_filtered_like_others(serving: Any) -> None:
    async with serving() as connect, connect("alpha", types=[Critique]) as alpha, connect("beta", types=[Critique]) as beta:
        await alpha.publish(rewards_of("alpha", 1, "p"))
        await alpha.publish(a_critique(1))
        await alpha.publish(a_critique(2, "q"))
        got = await beta.gather(kinds={"critiques"}, prompt_ids={PromptId("p")})
        assert [row.experience.step for row in got.rows] == [1]
        critique = got.rows[0].experience
        assert isinstance(critique, Critique) and critique.text == "too short"
        np.testing.assert_array_equal(critique.marks, MARKS)
        both = await beta.gather(kinds={"critiques", "rewards"})
        assert [type(row.experience).__name__ for row in both.rows] == ["GroupRewards", "Critique", "Critique"]
        assert (await beta.stats()).workers[AgentName("alpha")].accepted == {"rewards": 1, "critiques": 2}


async def test_edges_allow_own_kinds_by_name_whatever_their_version(serving: Any) -> None:
    edges, own = frozenset({("beta", "alpha", "critiques")}), [Critique, LaterCritique]
    async with serving(edges=edges) as connect, connect("alpha", types=own) as alpha:
        await alpha.publish(a_critique(1))
        await alpha.publish(LaterCritique(**base(2), sentences=("too short",)))
        async with connect("beta", types=own) as beta, connect("gamma", types=own) as gamma:
            assert [row.experience.step for row in (await beta.gather(kinds={"critiques"})).rows] == [1, 2]
            assert (await gamma.gather(kinds={"critiques"})).rows == []


async def test_what_a_reader_cannot_read_is_set_aside_and_the_rest_goes_on(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    own = [Critique, LaterCritique]
    async with serving() as connect, connect("alpha", types=own) as alpha, connect("beta", types=own[:1]) as beta:
        tail = beta.subscribe(kinds={"critiques"})
        for step in range(3):
            await alpha.publish(LaterCritique(**base(2 * step), sentences=("too short",)))
            await alpha.publish(a_critique(2 * step + 1))
        with caplog.at_level(logging.WARNING, logger="exchange.reading"):
            got = await beta.gather(kinds={"critiques"})
            async with asyncio.timeout(10):
                assert [(await anext(tail)).experience.step for _ in range(3)] == [1, 3, 5]
        assert [row.experience.step for row in got.rows] == [1, 3, 5]
        assert [row.tag for row in got.quarantined] == ["critiques/2"] * 3 == [row.tag for row in tail.quarantined]
        assert got.quarantined[0].cursor < got.rows[0].cursor < got.quarantined[1].cursor
        assert "critiques/1" in got.quarantined[0].reason and "types=[...]" in got.quarantined[0].reason
        later = msgspec.msgpack.decode(got.quarantined[0].body, type=LaterCritique)
        assert later == LaterCritique(**base(0), sentences=("too short",)), "its bytes are those that were published"
        assert beta.quarantined == {"critiques/2": 6}
        assert len(caplog.records) == 1, "one warning for a tag"
        assert (await beta.gather(kinds={"critiques"}, after=got.cursor)).quarantined == ()


async def test_a_row_that_does_not_decode_harms_no_other(serving: Any) -> None:
    async with (
        serving() as connect,
        connect("alpha", types=[BrokenCritique]) as broken,
        connect("beta", types=[Critique]) as beta,
    ):
        await broken.publish(rewards_of("alpha", 0, "p"))
        await broken.publish(BrokenCritique(**base(1), text=7, marks=MARKS))
        await broken.publish(rewards_of("alpha", 2, "p"))
        tail = beta.subscribe(kinds={"critiques", "rewards"})
        async with asyncio.timeout(10):
            assert [(await anext(tail)).experience.step for _ in range(2)] == [0, 2]
        assert [(row.tag, row.frames != ()) for row in tail.quarantined] == [("critiques/1", True)]
        assert "text" in tail.quarantined[0].reason


async def test_a_kind_that_this_client_does_not_know_is_refused_before_it_is_asked_for(serving: Any) -> None:
    async with serving() as connect, connect("beta", types=[Critique]) as beta, connect("alpha") as plain:
        with pytest.raises(ValueError, match=r"rewards.*critiques.*'critique'"):
            await beta.gather(kinds={"critique"})
        with pytest.raises(ValueError, match=r"types=\[\.\.\.\]"):
            plain.subscribe(kinds={"critiques"})
        with pytest.raises(ValueError, match=r"got a Critique"):
            await plain.publish(a_critique(1))
