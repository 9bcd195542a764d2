"""The HTML around figures and tables: one file, no outside resource, every text from data escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutualrl.manifest import write_atomically
from mutualrl.report.outcomes import Outcome
from mutualrl.report.records import RunRecord
from mutualrl.report.svg import series_variable
from mutualrl.report.verdict import percent, points

SPAN_LIMIT = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What the first screen says of one agent. skilled: whether own and peers' skills are told apart in this run."""

    agent: str
    description: str
    color: str
    outcomes: Sequence[Outcome]
    skilled: bool
    controlled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A plain table; the first cell of a row is its heading."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_page(path: Path, template: str, context: Mapping[str, object]) -> Path:
    """Render a template of this package into `path`; a reader never meets half a page."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mutualrl.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {"percent": percent, "points": points, "css": _css_percent, "visible": visible}
    html = environment.get_template(template).render(span_limit=SPAN_LIMIT, **context)
    write_atomically(path, html.encode("utf-8", errors="replace"))
    return path


def agent_cards(run: RunRecord, outcomes: Sequence[Outcome]) -> list[Card]:
    """One card per agent that was evaluated."""
    skilled = any(outcome.own_skill for outcome in outcomes)
    controlled = any(outcome.control is not None for outcome in outcomes)
    cards = []
    for index, agent in enumerate(run.agents):
        own = [outcome for outcome in outcomes if outcome.agent == agent]
        if own:
            cards.append(
                Card(
                    agent=agent,
                    description=_description(run, agent),
                    color=series_variable(index),
                    outcomes=own,
                    skilled=skilled,
                    controlled=controlled,
                )
            )
    return cards


def visible(text: str) -> str:
    """The text with spaces and control characters made visible, so that nothing in it can hide or steer the page."""
    return "".join(_VISIBLE.get(char, char) for char in text)


_VISIBLE = (
    {chr(code): chr(0x2400 + code) for code in range(32)}
    | {" ": "␣", "\n": "⏎", "\t": "⇥", "\x7f": "␡"}
    | {chr(code): "\ufffd" for code in (*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))}
)


def _description(run: RunRecord, agent: str) -> str:
    if run.config is None or agent not in run.config.agents:
        return ""
    config = run.config.agents[agent]
    policy = config.policy
    model = getattr(policy, "path", None) or f"{getattr(policy, 'arch', '')}, {getattr(policy, 'tokenizer', '')} tokenizer"
    return f"{model}; learns by {config.sharing.__struct_config__.tag}"


def _css_percent(value: float) -> str:
    return f"{100 * value:.2f}%"
