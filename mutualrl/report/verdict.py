"""The answer in words: did they teach each other, and did anyone get hurt?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mutualrl.report.outcomes import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """headline: one sentence. sentences: the numbers behind it, one per agent and task that matters. tone: of the page."""

    headline: str
    sentences: tuple[str, ...]
    tone: str


def run_verdict(outcomes: Sequence[Outcome], *, shared: bool) -> Verdict:
    """Judge one run, or several seeds of one rule.

    Args: outcomes from `judge`; shared: whether any agent's rule asked anything of a peer.
    """
    judged = [outcome for outcome in outcomes if outcome.after is not None]
    if not judged:
        return Verdict(headline="Nothing to judge yet.", sentences=("No evaluation after training was found.",), tone="open")
    agents = list(dict.fromkeys(outcome.agent for outcome in judged))
    if not shared:
        alone = "One agent trained alone." if len(agents) == 1 else "Each agent trained alone; nothing was shared."
        return Verdict(headline=alone, sentences=tuple(_growth(o) for o in judged), tone="open")
    others = [outcome for outcome in judged if not outcome.own_skill]
    if all(outcome.gain is None for outcome in judged):
        return Verdict(
            headline=_uncontrolled_headline(others),
            sentences=(*(_growth(o) for o in others), "Without an isolated run beside it, nobody can say what sharing did."),
            tone="open",
        )
    hurt = [outcome for outcome in judged if outcome.harmed]
    slipped = [outcome for outcome in judged if not outcome.harmed and outcome.gain is not None and outcome.gain.high < 0]
    taught = [outcome for outcome in others if outcome.gain is not None and outcome.gain.is_clear]
    return Verdict(
        headline=f"{_teaching(taught, others)}{_harm(hurt, slipped, taught)}",
        sentences=(*(_against_control(o) for o in others if o.gain is not None), *map(_loss, hurt), *map(_slip, slipped)),
        tone="bad" if hurt else "good" if taught and not slipped else "open",
    )


def percent(value: float) -> str:
    """0.806 -> "81 %", with a no-break space."""
    return f"{100 * value:.0f}\u00a0%"


def points(value: float) -> str:
    """A difference of accuracies in percentage points, signed: 0.478 -> "+48"; the sign is never lost to rounding."""
    rounded = round(100 * value)
    return f"{rounded:+d}".replace("-", "\u2212") if rounded else "\u00b10"


def _teaching(taught: Sequence[Outcome], others: Sequence[Outcome]) -> str:
    learners = list(dict.fromkeys(outcome.agent for outcome in taught))
    agents = list(dict.fromkeys(outcome.agent for outcome in others))
    if not others:
        return "There was no peer's skill to learn"
    if not learners:
        return "No clear sign that they taught each other"
    if len(learners) == len(agents):
        return "They taught each other" if len(agents) == 2 else "Every agent learned from its peers"
    rest = [agent for agent in agents if agent not in learners]
    return f"{_listed(learners)} learned from peers, {_listed(rest)} did not clearly"


def _harm(hurt: Sequence[Outcome], slipped: Sequence[Outcome], taught: Sequence[Outcome]) -> str:
    if not hurt and not slipped:
        return ", and nobody was hurt." if taught else "; nobody was hurt."
    places = [f"{outcome.agent} was hurt on {outcome.task}" for outcome in hurt]
    places += [f"{outcome.agent} lost ground on {outcome.task}" for outcome in slipped]
    return f"{', but' if taught else ', and'} {_listed(places)}."


def _uncontrolled_headline(others: Sequence[Outcome]) -> str:
    rises = [o for o in others if o.before is not None and o.after is not None and o.after > o.before]
    if others and len(rises) == len(others):
        return "They got better at each other\u2019s skills; there is no control to compare with."
    return "There is no control to compare with."


def _against_control(outcome: Outcome) -> str:
    assert outcome.gain is not None and outcome.after is not None
    gain = outcome.gain
    size = abs(round(100 * gain.mean))
    distance = f"{size} points {'above' if gain.mean > 0 else 'below'}" if size else "level with"
    return (
        f"{outcome.agent} ended at {percent(outcome.after)} on {outcome.task}, {distance} training alone "
        f"(95\u00a0% interval {points(gain.low)} to {points(gain.high)})."
    )


def _loss(outcome: Outcome) -> str:
    where = f" in {outcome.harmed} of {outcome.seeds} seeds" if outcome.seeds > 1 else ""
    return (
        f"{outcome.agent} ended {outcome.task} below its isolated run by more than two standard errors{where}: "
        f"{percent(outcome.after or 0.0)} against {percent(outcome.control or 0.0)}."
    )


def _slip(outcome: Outcome) -> str:
    assert outcome.gain is not None
    return (
        f"{outcome.agent} lost {abs(round(100 * outcome.gain.mean))} points on {outcome.task} against training alone "
        f"({points(outcome.gain.low)} to {points(outcome.gain.high)}): less than the two standard errors that count as harm."
    )


def _growth(outcome: Outcome) -> str:
    start = f"from {percent(outcome.before)} " if outcome.before is not None else ""
    return f"{outcome.agent} went {start}to {percent(outcome.after or 0.0)} on {outcome.task}."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
