"""The hit rate: share of own prompts for which a peer's row was at hand within the window."""

from agents.hits import HitCounter
from exchange.types import AgentName, PromptId

BETA, GAMMA = AgentName("beta"), AgentName("gamma")
A, B, C, D = (PromptId(each) for each in "abcd")


def test_a_prompt_counts_once_when_met_and_as_missed_when_its_window_closes() -> None:
    hits = HitCounter([BETA], window=2)
    hits.draw(0, [A, B, C, D])
    hits.meet(BETA, [A])
    hits.close(0)
    assert hits.take() == {"peer/beta/hit_rate": 1.0, "peer/beta/prompts": 1.0}
    hits.meet(BETA, [A, B])
    hits.close(1)
    assert hits.take() == {"peer/beta/hit_rate": 1.0, "peer/beta/prompts": 1.0}
    hits.close(2)
    assert hits.take() == {"peer/beta/hit_rate": 0.0, "peer/beta/prompts": 2.0}
    assert hits.take() == {}


def test_without_a_window_only_rows_of_the_same_step_count() -> None:
    hits = HitCounter([BETA], window=0)
    hits.draw(0, [A])
    hits.close(0)
    hits.meet(BETA, [A])
    assert hits.take() == {"peer/beta/hit_rate": 0.0, "peer/beta/prompts": 1.0}


def test_peers_are_counted_apart() -> None:
    hits = HitCounter([BETA, GAMMA], window=0)
    hits.draw(0, [A, B])
    hits.meet(BETA, [A, B])
    hits.close(0)
    assert hits.take() == {
        "peer/beta/hit_rate": 1.0,
        "peer/beta/prompts": 2.0,
        "peer/gamma/hit_rate": 0.0,
        "peer/gamma/prompts": 2.0,
    }


def test_the_end_of_a_run_closes_every_window() -> None:
    hits = HitCounter([BETA], window=8)
    hits.draw(0, [A, B])
    hits.meet(BETA, [A])
    hits.close()
    assert hits.take() == {"peer/beta/hit_rate": 0.5, "peer/beta/prompts": 2.0}
