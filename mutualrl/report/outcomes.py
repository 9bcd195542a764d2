"""What came of a run, per agent and task: before, after, the isolated control, the gain and its interval, harm.

One run against one control and several seeds against several controls are the same computation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutualrl.report.records import Eval, RunRecord
from mutualrl.statistics import Gain, is_harmed, paired_bootstrap, paired_differences

BOOTSTRAP_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A run and the isolated run of the same seed; control is None where there is none."""

    run: RunRecord
    control: RunRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One agent on one task, in the mean over seeds. Accuracies in 0..1, greedy, on `heldout` prompts per seed.

    before, after, control: None where no such evaluation was found. gain: after − control, paired over prompts; None
    without a control. harmed: in how many of the `seeds` the agent ended below its control by more than two standard
    errors; None without a control. own_skill: the agent mastered this task from the start.
    """

    agent: str
    task: str
    own_skill: bool
    heldout: int
    seeds: int
    before: float | None
    after: float | None
    control: float | None
    gain: Gain | None
    harmed: int | None
    mean_length: float | None
    eos_rate: float | None


def judge(pairs: Sequence[Pair]) -> list[Outcome]:
    """One outcome per (agent, task) that the runs were evaluated on, in the order of the first run."""
    if not pairs:
        return []
    first = pairs[0].run
    return [_outcome(agent, task, pairs) for agent in first.agents for task in first.tasks(agent)]


def mean_gain(pairs: Sequence[Pair], *, own_skill: bool) -> Gain | None:
    """The gain in the mean over agents, tasks and seeds, of own skills or of all others; None without controls.

    An agent's task that one of the seeds has no evaluation of is left out.
    """
    known = [pair for pair in pairs if pair.control is not None]
    if not known:
        return None
    agents_of: defaultdict[str, list[str]] = defaultdict(list)
    for agent, task in known[0].run.cells(own_skill=own_skill):
        if all(differences(pair, [agent], task).size for pair in known):
            agents_of[task].append(agent)
    by_task = [[differences(pair, agents, task) for pair in known] for task, agents in agents_of.items()]
    return paired_bootstrap(by_task, rng=np.random.default_rng(BOOTSTRAP_SEED))


def harmed_in(pair: Pair, agent: str, task: str) -> bool | None:
    """Whether the agent ended this task harmed in this run; None without a control."""
    after, control = last_eval(pair.run, agent, task), _control_eval(pair, agent, task)
    if after is None or control is None:
        return None
    return is_harmed(after.accuracy, len(after.correct), control.accuracy, len(control.correct))


def first_eval(run: RunRecord, agent: str, task: str) -> Eval | None:
    """The evaluation before the first step."""
    curve = run.curve(agent, task)
    return curve[0] if curve and curve[0].step == 0 else None


def last_eval(run: RunRecord, agent: str, task: str) -> Eval | None:
    """The last evaluation after some training."""
    curve = run.curve(agent, task)
    return curve[-1] if curve and curve[-1].step > 0 else None


def differences(pair: Pair, agents: Sequence[str], task: str) -> npt.NDArray[np.int8]:
    """After − control [A, N] on the held-out prompts that all the agents answered in both runs; N is 0 where one is missing."""
    return paired_differences(
        [(_answers(last_eval(pair.run, agent, task)), _answers(_control_eval(pair, agent, task))) for agent in agents]
    )


def _outcome(agent: str, task: str, pairs: Sequence[Pair]) -> Outcome:
    runs = [pair.run for pair in pairs]
    afters = [row for run in runs if (row := last_eval(run, agent, task)) is not None]
    controls = [row for pair in pairs if (row := _control_eval(pair, agent, task)) is not None]
    harms = [harm for pair in pairs if (harm := harmed_in(pair, agent, task)) is not None]
    by_seed = [differences(pair, [agent], task) for pair in pairs]
    return Outcome(
        agent=agent,
        task=task,
        own_skill=runs[0].curve(agent, task)[0].own_skill,
        heldout=max((len(row.correct) for row in afters), default=0),
        seeds=len(pairs),
        before=_mean([row.accuracy for run in runs if (row := first_eval(run, agent, task)) is not None]),
        after=_mean([row.accuracy for row in afters]),
        control=_mean([row.accuracy for row in controls]),
        gain=paired_bootstrap([by_seed], rng=np.random.default_rng(BOOTSTRAP_SEED)),
        harmed=sum(harms) if harms else None,
        mean_length=_mean([row.mean_length for row in afters if row.mean_length is not None]),
        eos_rate=_mean([row.eos_rate for row in afters if row.eos_rate is not None]),
    )


def _control_eval(pair: Pair, agent: str, task: str) -> Eval | None:
    return last_eval(pair.control, agent, task) if pair.control is not None else None


def _answers(row: Eval | None) -> Mapping[str, int]:
    return {} if row is None else row.by_prompt


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
