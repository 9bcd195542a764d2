"""No record is lost without a trace: for each producer and kind, what was accepted is stored, evicted or expired."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hub_answers import gather, hello, rows, two
from hypothesis import example, given, settings

from exchange.messages import Bye
from exchange.testing import a_rollout_group, a_success, rewards_of, step_prompts
from exchange.types import AgentName

KINDS = ("prompts", "rewards", "successes", "rollouts")
OPERATIONS = st.tuples(
    st.sampled_from([*KINDS, "rollouts", "twice", "forged", "wait", "gather", "come back"]),
    st.sampled_from(["alpha", "beta"]),
    st.integers(0, 40),
)


BUSY = [("rollouts", "alpha", 40), ("rewards", "beta", 0)] * 12
AGED = [("successes", "alpha", 9), ("wait", "alpha", 40), ("rewards", "alpha", 0), ("wait", "alpha", 40)]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@example(script=BUSY)
@example(script=AGED)
@example(script=[*BUSY, *AGED, ("come back", "alpha", 0), *BUSY])
@given(st.lists(OPERATIONS, max_size=60))
def test_the_accounts_add_up_for_every_producer_and_kind(script: list[tuple[str, str, int]]) -> None:
    driver = two(memory_bytes=1 << 15, max_age_s=60.0)
    epochs, delivered = Counter[str](), Counter[str]()
    for step, (operation, name, number) in enumerate(script):
        epoch = epochs[name]
        match operation:
            case "prompts":
                driver.publish(step_prompts(name, step, "p", "q", epoch=epoch))
            case "rewards" | "twice":
                driver.publish(rewards_of(name, step, "p", epoch=epoch), seq=1 if operation == "twice" else None)
            case "successes":
                driver.publish(a_success(name, step, "p", "x" * number, epoch=epoch))
            case "rollouts":
                driver.publish(a_rollout_group(name, step, "p", tokens=2 * number, epoch=epoch))
            case "forged":
                driver.publish(rewards_of(name, step, "p", epoch=epoch + 1))
            case "wait":
                driver.clock.advance(number)
            case "gather":
                delivered[name] += len(rows(driver.ask(name, gather(*KINDS))))
            case "come back":
                driver.ask(name, Bye())
                driver.ask(name, hello(name))
    driver.clock.advance(len(script))
    driver.hub.tick()
    stats = driver.hub.stats()
    for name, worker in stats.workers.items():
        assert worker.published == sum(worker.accepted.values()) + sum(worker.refused.values()) + worker.duplicates
        shares = stats.records.get(name, {})
        assert {kind: s.stored + s.evicted + s.expired for kind, s in shares.items()} == worker.accepted
        for kind, share in shares.items():
            there = driver.ask("beta", gather(kind, agents=[name], max_bytes=1 << 26))
            assert share.stored == len(rows(there)), "counted as they are found"
        given_to = sum(sum(kinds.values()) for kinds in worker.delivered.values())
        assert name != AgentName("alpha") or given_to == delivered[name]
    every = [share for kinds in stats.records.values() for share in kinds.values()]
    totals = (sum(s.stored for s in every), sum(s.evicted for s in every), sum(s.expired for s in every))
    assert totals == (stats.stored, stats.evicted, stats.expired)
