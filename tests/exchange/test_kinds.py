"""Which own types can be registered, and which kinds a hub takes that it does not know."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hub_answers import accepted, gather, refusal, rows, two

import exchange
from exchange.kinds import Kinds
from exchange.message_base import MAX_KINDS
from exchange.messages import Publish, Rows
from exchange.testing import HubDriver, a_rollout_group, rewards_of
from exchange.types import AgentName
from exchange.wire import Encoded, encode_record


def an_own_type(tag: Any, base: type = exchange.PromptExperience, **options: Any) -> Any:
    return msgspec.defstruct("Critique", [("text", str)], bases=(base,), frozen=True, kw_only=True, tag=tag, **options)


def a_type_with(field: Any) -> Any:
    return msgspec.defstruct(
        "Scored", [("scores", field)], bases=(exchange.PromptExperience,), frozen=True, kw_only=True, tag="scored/1"
    )


def retagged(record: Encoded, **changes: object) -> Encoded:
    """A record as a newer or foreign program would have written it."""
    fields = msgspec.msgpack.decode(record.body)
    return Encoded(body=msgspec.msgpack.encode(fields | changes), frames=record.frames)


def publish(driver: HubDriver, seq: int, record: Encoded) -> Any:
    return driver.ask("alpha", Publish(seq=seq, body=record.body), record.frames)


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ([an_own_type("critiques")], r"tag='critiques'.*tag=\"critiques/1\""),
        ([an_own_type("Critiques/1")], r"'Critiques/1'"),
        ([an_own_type("critiques/0")], r"'critiques/0'"),
        ([an_own_type("critiques/1/2")], r"'critiques/1/2'"),
        ([an_own_type(7)], r"tag=7"),
        ([an_own_type("rollouts/2")], r"rollouts.*'rollouts/2'.*another name"),
        ([an_own_type("critiques/1"), an_own_type("critiques/1")], r"'critiques/1' twice"),
        ([an_own_type("critiques/1", array_like=True)], r"array_like=True"),
        ([an_own_type("critiques/1", tag_field="kind")], r"tag_field='kind'"),
        ([an_own_type("critiques/1", base=msgspec.Struct)], r"derives from Experience"),
        ([exchange.RolloutGroup], r"another name"),
        (["critiques/1"], r"derives from Experience"),
        ([a_type_with(np.ndarray)], r"`Scored.scores` must declare a dtype"),
        ([a_type_with(npt.NDArray[Any])], r"`Scored.scores` must declare a dtype"),
        ([a_type_with(npt.NDArray[np.str_] | None)], r"`Scored.scores` must declare a dtype"),
    ],
)
async def test_a_type_that_would_not_do_is_refused_with_what_to_do(own: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Kinds(own)
    async with exchange.memory() as hub:
        with pytest.raises(ValueError, match=told):
            hub.connect("alpha", types=own)


@pytest.mark.parametrize("scores", [np.zeros(3), [0.0], np.zeros(3, ">f8"), np.zeros(3, np.int32)])
async def test_what_no_reader_could_read_is_refused_where_it_is_published(scores: Any) -> None:
    own = a_type_with(npt.NDArray[np.float32] | None)
    async with exchange.memory() as hub, hub.connect("alpha", types=[own]) as alpha, hub.connect("beta", types=[own]) as beta:
        about: Any = {"agent": "alpha", "step": 0, "version": exchange.Version(0, 0), "prompt_id": "p", "task": "t"}
        with pytest.raises(ValueError, match=r"`scores` must be an array of float32, got scores of .*np.float32"):
            await alpha.publish(own(scores=scores, **about))
        for fine in (np.zeros(3, np.float32), np.zeros(3, ">f4"), None):
            await alpha.publish(own(scores=fine, **about))
        got = await beta.gather(kinds={"scored"}, min_count=3, deadline_s=5.0)
    assert len(got.rows) == 3
    assert not got.quarantined


async def test_a_filter_or_timeout_that_does_not_exist_is_an_error_and_not_ignored() -> None:
    unknown: Any = {"prompt_id": "p0"}
    async with exchange.memory() as hub, hub.connect("alpha") as alpha:
        with pytest.raises(TypeError, match=r"one of prompt_ids, agents.*got prompt_id"):
            await alpha.gather(kinds={"rewards"}, **unknown)
        with pytest.raises(TypeError, match=r"got prompt_id"):
            alpha.subscribe(kinds={"rewards"}, **unknown)
        with pytest.raises(TypeError, match=r"timeouts are request_timeout_s, connect_timeout_s, got prompt_id"):
            await hub.connect("beta", **unknown).__aenter__()


@pytest.mark.parametrize("name", ["kinds", "agents", "prompt_ids"])
async def test_a_bare_string_is_not_taken_for_its_letters(name: str) -> None:
    asked: Any = {"kinds": {"rewards"}} | {name: "rewards"}
    async with exchange.memory() as hub, hub.connect("alpha") as alpha:
        with pytest.raises(ValueError, match=rf"`{name}` must be a collection.*{name}={{'rewards'}}"):
            await alpha.gather(**asked)


def test_two_versions_of_an_own_kind_are_one_kind() -> None:
    kinds = Kinds([an_own_type("critiques/1"), an_own_type("critiques/2")])
    assert kinds.names == ("prompts", "rewards", "successes", "rollouts", "critiques")


def test_a_newer_version_of_a_shipped_kind_passes_an_older_hub_untouched() -> None:
    driver = two()
    later = retagged(a_rollout_group_record(), type="rollouts/2", ids=None, judged_by=["gamma", {"weight": 0.5}])
    accepted(publish(driver, 1, later))
    answer = driver.ask("beta", gather("rollouts", prompt_ids=("p",)))
    assert isinstance(answer, Rows)
    assert [row.body for row in answer.rows] == [later.body]
    assert driver.hub.stats().workers[AgentName("alpha")].accepted == {"rollouts": 1}


def a_rollout_group_record() -> Encoded:
    return encode_record(a_rollout_group("alpha", 1, "p"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"agent": "beta"}, "not_yours"),
        ({"step": -1}, "invalid"),
        ({"version": {"epoch": 1, "step": 1}}, "future"),
        ({"version": None}, "malformed"),
        ({"step": "one"}, "malformed"),
        ({"prompt_id": 7}, "malformed"),
        ({"type": 7}, "malformed"),
        ({"type": "rollouts"}, "unsupported"),
        ({"type": "rollouts/" + "9" * 99}, "unsupported"),
    ],
)
def test_unknown_kinds_pass_the_same_checks_of_origin(changes: dict[str, object], reason: str) -> None:
    driver = two()
    assert refusal(publish(driver, 1, retagged(a_rollout_group_record(), **({"type": "critiques/1"} | changes)))) == reason
    assert len(driver.hub.quarantine) == driver.hub.stats().quarantined == (reason in ("malformed", "unsupported"))
    accepted(publish(driver, 2, a_rollout_group_record()))


def test_what_the_hub_refuses_as_unreadable_is_kept_raw_with_its_reason() -> None:
    driver = two()
    record = retagged(a_rollout_group_record(), type="no tag")
    publish(driver, 1, record)
    ((raw, reason),) = driver.hub.quarantine
    assert raw[: len(record.body)] == record.body and "'no tag'" in reason


def test_an_experience_on_many_prompts_or_on_none_is_found_as_such() -> None:
    driver = two()
    alone = encode_record(rewards_of("alpha", 1, "p"))
    many = retagged(alone, type="tables/1", prompt_id=None, prompt_ids=["p", "q"])
    none = retagged(alone, type="tables/1", prompt_id=None)
    cursors = [accepted(publish(driver, seq, record)).cursor for seq, record in enumerate((many, none), start=1)]
    assert rows(driver.ask("beta", gather("tables", prompt_ids=("q",)))) == cursors[:1]
    assert rows(driver.ask("beta", gather("tables"))) == cursors


def test_strangers_cannot_fill_the_counts_by_kind() -> None:
    driver = two()
    record = encode_record(rewards_of("alpha", 1, "p"))
    answers = [publish(driver, seq, retagged(record, type=f"k{seq}/1")) for seq in range(1, MAX_KINDS + 1)]
    assert len([accepted(answer) for answer in answers]) == MAX_KINDS
    assert refusal(publish(driver, MAX_KINDS + 1, retagged(record, type="one.more/1"))) == "too_many"
    accepted(publish(driver, MAX_KINDS + 2, retagged(record, type="k1/2")))


async def test_the_quarantine_of_a_subscription_is_bounded() -> None:
    own, later = an_own_type("critiques/1"), an_own_type("critiques/2")
    rewards = rewards_of("alpha", 1, "p")
    critique = own(text="", **{name: getattr(rewards, name) for name in ("agent", "step", "version", "prompt_id", "task")})
    async with exchange.memory() as hub, hub.connect("alpha", types=[own]) as alpha, hub.connect("b", types=[later]) as beta:
        tail = beta.subscribe(kinds={"critiques", "rewards"})
        for _ in range(100):
            await alpha.publish(critique)
        await alpha.publish(rewards)
        await anext(tail)
        assert len(tail.quarantined) == 64 and beta.quarantined == {"critiques/1": 100}


async def test_a_lease_that_is_cancelled_on_its_way_to_its_holder_gives_everything_back() -> None:
    own, later = an_own_type("critiques/1"), an_own_type("critiques/2")
    rewards = rewards_of("alpha", 1, "p")
    critique = own(text="", **{name: getattr(rewards, name) for name in ("agent", "step", "version", "prompt_id", "task")})
    async with exchange.memory() as hub, hub.connect("alpha", types=[own]) as alpha, hub.connect("b", types=[later]) as beta:
        await alpha.publish(critique)
        await alpha.publish(rewards)

        async def work() -> None:
            async with beta.lease(group="judges", kinds={"critiques", "rewards"}, count=2):
                raise AssertionError

        task = asyncio.create_task(work())
        while not beta.quarantined:  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        group = (await alpha.stats()).groups["judges"]
        assert task.cancelled() and (group.leased, group.waiting) == (0, 2)
