"""The report as a page: what it answers, what it survives, what it never lets through."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from synthetic_run import ALONE, SKILLS, TAUGHT, make_config, write_lines, write_run

from agents.sharing.config import Isolated
from mutualrl.errors import ReportError
from mutualrl.report import write_report
from mutualrl.report.comparison import COMPARISON_FILE
from mutualrl.report.curves import smooth
from mutualrl.report.flow import flows
from mutualrl.report.outcomes import Outcome, Pair, judge
from mutualrl.report.page import visible
from mutualrl.report.records import load_record
from mutualrl.report.run import choose_rescues, is_shared, run_warnings
from mutualrl.report.sampled import sampled_table
from mutualrl.report.svg import spread
from mutualrl.report.verdict import percent, points, run_verdict
from mutualrl.statistics import Gain

HOSTILE = "</span><script>alert('x')</script><img src=x onerror=alert(1)>\u202e\x00"


class Outline(HTMLParser):
    """Tags, attributes and the headline of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.headline = ""
        self._inside: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._inside.append(tag)

    def handle_data(self, data: str) -> None:
        if self._inside and self._inside[-1] == "h1":
            self.headline += data.strip()
        self.text += data


def outcome(agent: str, task: str, *, gain: Gain | None, harmed: int | None = 0) -> Outcome:
    return Outcome(
        agent=agent,
        task=task,
        own_skill=SKILLS[agent] == task,
        heldout=72,
        seeds=1,
        before=0.03,
        after=0.8,
        control=None if gain is None else 0.3,
        gain=gain,
        harmed=None if gain is None else harmed,
        mean_length=4.0,
        eos_rate=1.0,
    )


CLEAR, UNCLEAR = Gain(mean=0.5, low=0.36, high=0.6), Gain(mean=0.02, low=-0.03, high=0.07)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a taught run, its report, and its control."""
    directory = tmp_path_factory.mktemp("comparison")
    write_run(directory / "isolated-seed0", ALONE, make_config(Isolated()))
    write_report(write_run(directory / "sgt-seed0", TAUGHT))
    return directory


@pytest.fixture(scope="module")
def page(comparison: Path) -> Outline:
    return Outline(comparison / "sgt-seed0" / "report.html")


@pytest.mark.slow
def test_first_screen_answers_with_numbers(comparison: Path, page: Outline) -> None:
    assert page.headline == "They taught each other, and nobody was hurt."
    run, control = load_record(comparison / "sgt-seed0"), load_record(comparison / "isolated-seed0")
    after, alone = run.curve("alpha", "sort")[-1].accuracy, control.curve("alpha", "sort")[-1].accuracy
    gained = round(100 * (after - alone))
    assert f"alpha ended at {percent(after)} on sort, {gained} points above training alone" in page.text
    assert "not harmed" in page.text


def test_page_stands_alone(comparison: Path, page: Outline) -> None:
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    outside = [(name, value) for name, value in page.attributes if name in ("src", "href", "xlink:href", "srcset")]
    assert all(value.startswith("#") for _, value in outside)
    styles = re.findall(r"url\(([^)]*)\)", (comparison / "sgt-seed0" / "report.html").read_text())
    assert all(target.startswith("#") for target in styles)
    assert page.tags.count("svg") >= 9


def test_ids_inside_the_figures_do_not_meet(page: Outline) -> None:
    shared = {"figure_1", "axes_1", "patch_1", "text_1", "matplotlib.axis_1", "xtick_1", "ytick_1", "line2d_1"}
    ids = [value for name, value in page.attributes if name == "id"]
    referred = {value.removeprefix("#") for name, value in page.attributes if name in ("href", "xlink:href")}
    assert referred.isdisjoint(shared)
    assert all(ids.count(name) == 1 for name in referred)


@pytest.mark.slow
def test_nothing_from_data_becomes_markup(tmp_path: Path) -> None:
    rescue = {
        "agent": "alpha",
        "step": 1,
        "peer": "beta",
        "task": "sort",
        "prompt_id": "1",
        "prompt": HOSTILE,
        "text": HOSTILE,
        "spans": [{"text": HOSTILE, "source": [HOSTILE], "receiver": [HOSTILE], "exact": False}],
        "residual": 0.5,
    }
    directory = write_run(
        tmp_path / "run", TAUGHT, make_config(steps=20), rescues=[rescue, {**rescue, "prompt_id": "2", "spans": []}]
    )
    hostile_task = {"agent": "<b>alpha", "step": 0, "task": "$x^2$ <script>", "accuracy": 0.5, "mean_length": 2.0}
    with (directory / "evals.jsonl").open("a") as file:
        file.write(f'{{"torn\n{str(hostile_task).replace(chr(39), chr(34))}\n')
    page = Outline(write_report(directory))
    assert not {"script", "img"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "<script>alert('x')</script>" in page.text
    assert "\u202e" not in page.text and "\x00" not in page.text
    assert "<b>alpha on $x^2$ <script>" in page.text


def test_control_characters_and_spaces_become_visible() -> None:
    assert visible("a b\n\x00\x1b\u202e") == "a␣b⏎␀␛\ufffd"


def test_rescues_show_both_tokenizations_span_by_span(comparison: Path) -> None:
    html = (comparison / "sgt-seed0" / "report.html").read_text()
    spans = re.findall(r'<div class="span( cut)?">(.*?)</div>', html)
    pieces = [(bool(cut), re.findall(r"<bdi>(.*?)</bdi>", inside)) for cut, inside in spans]
    assert all(len(set(texts)) == 1 and len(texts) == 2 for cut, texts in pieces if not cut)
    assert all(len(texts) == 3 and "".join(sorted(texts, key=len)[:2]) == max(texts, key=len) for c, texts in pieces if c)
    assert {cut for cut, _ in pieces} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("kept", [("evals.jsonl",), ("metrics.jsonl", "rescues.jsonl")])
def test_files_may_be_missing(tmp_path: Path, kept: tuple[str, ...]) -> None:
    directory = write_run(tmp_path / "run", TAUGHT, make_config(steps=20))
    for name in {"config.json", "manifest.json", "exchange.json", "evals.jsonl", "metrics.jsonl", "rescues.jsonl"} - set(kept):
        (directory / name).unlink()
    assert "alpha" in Outline(write_report(directory)).text


def test_an_empty_run_directory_gets_a_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert Outline(write_report(tmp_path)).headline == "Nothing to judge yet."


def headline_of(directory: Path) -> str:
    run = load_record(directory)
    return run_verdict(judge([Pair(run=run, control=None)]), shared=is_shared(run)).headline


def test_without_a_control_nothing_is_claimed(tmp_path: Path) -> None:
    headline = headline_of(write_run(tmp_path / "run", TAUGHT))
    assert headline == "They got better at each other’s skills; there is no control to compare with."


def test_several_attempts_are_told_where_completions_were_sampled(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", TAUGHT)
    assert sampled_table(load_record(run)) is None
    lines = [msgspec.json.decode(line) for line in (run / "evals.jsonl").read_bytes().splitlines()]
    last = max(line["step"] for line in lines)
    for line in lines:
        if line["agent"] == "alpha" and line["step"] in (0, last):
            line["pass_at_k"] = {"1": 0.25, "8": 0.75} if line["step"] else {"1": 0.125, "8": 0.5}
    (run / "evals.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    text = Outline(write_report(run)).text
    assert "alpha on reverse" in text and "50\u00a0% → 75\u00a0%" in text


def test_one_agent_alone_and_isolated_agents_share_nothing(tmp_path: Path) -> None:
    of_alpha = {key: value for key, value in ALONE.items() if key[0] == "alpha"}
    alone = write_run(tmp_path / "one", of_alpha, make_config(agents=["alpha"]))
    isolated = write_run(tmp_path / "two", ALONE, make_config(Isolated()))
    assert headline_of(alone) == "One agent trained alone."
    assert headline_of(isolated) == "Each agent trained alone; nothing was shared."


def test_unfinished_runs_and_lost_lines_are_told(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", TAUGHT, status="failed")
    with (directory / "evals.jsonl").open("a") as file:
        file.write('{"agent":"al')
    unfinished, unreadable = run_warnings(load_record(directory), [])
    assert "not finished (status: failed)" in unfinished
    assert unreadable.endswith("left out: 1.")
    assert run_warnings(load_record(write_run(tmp_path / "whole", TAUGHT)), []) == []


def test_seldom_met_peers_are_told(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", TAUGHT)
    line = {"agent": "alpha", "step": 1, "alpha/peer/beta/hit_rate": 0.1, "alpha/peer/beta/prompts": 32}
    write_lines(directory / "metrics.jsonl", [line])
    run = load_record(directory)
    [warning] = run_warnings(run, flows(run))
    assert warning == f"alpha seldom met beta: a row was at hand for {percent(0.1)} of its prompts."


def test_edges_carry_what_the_hub_delivered(tmp_path: Path) -> None:
    run = load_record(write_run(tmp_path / "run", TAUGHT))
    to_alpha, to_beta = flows(run)
    assert (to_alpha.learner, to_alpha.teacher, to_beta.learner) == ("alpha", "beta", "beta")
    assert to_alpha.label.startswith("1,733 successes\n")
    assert to_alpha.rescues == sum(value for _, value in run.series("alpha", "rescues"))


def test_rescued_prompts_are_chosen_for_different_cuts_and_told_once(tmp_path: Path) -> None:
    run = load_record(write_run(tmp_path / "run", TAUGHT))
    chosen = choose_rescues((*run.rescues, *run.rescues), limit=5)
    assert len(chosen) == 10
    assert len({(row.agent, row.prompt_id) for row in chosen}) == 10
    assert all(any(not span.exact for span in row.spans) for row in chosen)


def test_verdicts() -> None:
    def headline(*outcomes: Outcome) -> str:
        return run_verdict(outcomes, shared=True).headline

    taught = [outcome("alpha", "sort", gain=CLEAR), outcome("beta", "reverse", gain=CLEAR)]
    half = [outcome("alpha", "sort", gain=CLEAR), outcome("beta", "reverse", gain=UNCLEAR)]
    none = [outcome("alpha", "sort", gain=UNCLEAR), outcome("beta", "reverse", gain=UNCLEAR)]
    hurt = outcome("beta", "sort", gain=UNCLEAR, harmed=1)
    assert headline(*taught, hurt) == "They taught each other, but beta was hurt on sort."
    assert headline(*half) == "alpha learned from peers, beta did not clearly, and nobody was hurt."
    assert headline(*none) == "No clear sign that they taught each other; nobody was hurt."
    assert headline(*none, hurt) == "No clear sign that they taught each other, and beta was hurt on sort."
    assert run_verdict([*taught, hurt], shared=True).tone == "bad"
    slipped = outcome("beta", "sort", gain=Gain(mean=-0.1, low=-0.18, high=-0.03))
    assert headline(*taught, slipped) == "They taught each other, but beta lost ground on sort."
    assert run_verdict([*taught, slipped], shared=True).sentences[-1].startswith("beta lost 10 points on sort")


def test_points_keep_their_sign_and_hide_no_zero() -> None:
    assert [points(value) for value in (0.478, -0.05, 0.004, -0.004)] == ["+48", "−5", "±0", "±0"]


def test_labels_keep_their_order_and_distance_and_stay_near() -> None:
    assert spread([0.0, 1.0, 0.5], 0.1, high=1.0) == [0.0, 1.0, 0.5]
    assert spread([0.5, 0.5], 0.2, high=1.0) == pytest.approx([0.4, 0.6])
    assert spread([0.8, 0.81, 0.82, 0.1], 0.1, high=1.0) == pytest.approx([0.71, 0.81, 0.91, 0.1])
    assert spread([1.0, 0.95, 0.5], 0.2, high=1.0) == pytest.approx([1.0, 0.8, 0.5])


def test_smoothing_keeps_constants_and_every_step() -> None:
    flat = [(step, 2.0) for step in range(1, 21)]
    assert smooth(flat) == flat
    ramp = [(step, float(step)) for step in range(1, 21)]
    assert smooth(ramp)[10] == pytest.approx((11, 11.0))
    assert smooth(ramp)[0] == pytest.approx((1, 3.0))  # the mean of steps 1 to 5


def test_a_comparison_directory_gets_the_comparison(tmp_path: Path) -> None:
    write_run(tmp_path / "isolated-seed0", ALONE, make_config(Isolated()))
    write_run(tmp_path / "sgt-seed0", TAUGHT)
    (tmp_path / COMPARISON_FILE).write_text('{"rows": []}')
    with pytest.raises(FileNotFoundError, match="no runs to compare"):
        write_report(tmp_path)


def test_a_report_without_its_libraries_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("mutualrl.report.LIBRARIES", ("jinja2", "no_such_library"))
    with pytest.raises(ReportError, match=r"needs no_such_library: pip install"):
        write_report(tmp_path)
