"""How a gain over a control is judged: a paired bootstrap interval, and when a policy counts as harmed.

Shape legend: K tasks · A agents on one task · S seeds · N held-out prompts of one task and seed · B bootstrap replicates ·
V = 2A + 1 values of a sum over agents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

REPLICATES = 10_000
HARM_STANDARD_ERRORS = 2.0
NORMAL_95 = 1.959963984540054
# Differences of two accuracies are sums of floats: a tie must stay a tie.
TIE = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A mean gain in accuracy with its 95 % bootstrap interval; all three in -1..1."""

    mean: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether the whole interval lies above zero."""
        return self.low > 0


def paired_differences(answers: Sequence[tuple[Mapping[str, int], Mapping[str, int]]]) -> npt.NDArray[np.int8]:
    """treated − control of each agent on every prompt that all of them answered, in -1, 0, 1; shape [A, N], sorted by prompt.

    Args: one (treated, control) per agent, at least one; each prompt id -> 1 (correct) or 0. A prompt that any of them
    lacks is left out; N may be 0.
    """
    shared = sorted(set.intersection(*(set(each) for pair in answers for each in pair)))
    differences = [[treated[prompt] - control[prompt] for prompt in shared] for treated, control in answers]
    return np.array(differences, dtype=np.int8)


def paired_bootstrap(
    differences_KS: Sequence[Sequence[npt.NDArray[np.int8]]], *, rng: np.random.Generator, replicates: int = REPLICATES
) -> Gain | None:
    """95 % percentile interval of the mean paired difference, over prompts and, where there are several, over seeds.

    A replicate draws S seeds with replacement, the same for all tasks, and within each drawn seed and task N prompts with
    replacement, the same for all agents: what one agent finds hard its peers find hard too, so that their differences on
    a prompt are no independent evidence. The statistic is the mean over cells (agent, task) of the mean over seeds of the
    mean difference. Agents and tasks are what the experiment is about and are not resampled.

    Only the sum over agents counts, a whole number in -A..A, so that N draws with replacement are one multinomial draw
    of how often each sum occurs: the same distribution as indexing prompts, at a cost that does not grow with N.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapters 8 and 13. Deviations: none.
    Args: differences_KS [K][S] of arrays [A, N] with -1, 0, 1; A and N may differ between tasks, N also between seeds.
    Every task has the same S seeds.
    Returns: the observed mean and the 2.5 % and 97.5 % quantiles; None where there is nothing to compare.
    Degenerate: equal differences everywhere give an interval of zero width.
    Coverage with 3 to 5 seeds, simulated: about 97 to 98 % where seeds have no effect (the noise of prompts counts a
    second time, as a spread between seeds), about 86 to 91 % where seeds differ by more than prompts make them (a
    bootstrap over few understates their spread). One seed says nothing about others.
    """
    tasks = [[difference for difference in task if difference.shape[1]] for task in differences_KS]
    tasks = [task for task in tasks if task]
    if not tasks:
        return None
    seeds = min(len(task) for task in tasks)
    if any(len(task) != seeds for task in tasks):
        raise ValueError(f"every task needs the same seeds, got seeds per task={[len(task) for task in tasks]}")
    drawn_BS = rng.integers(seeds, size=(replicates, seeds))
    total_B = np.zeros(replicates)
    observed, cells = 0.0, 0
    for task in tasks:
        agents = len(task[0])
        sums_SN = [difference.sum(axis=0, dtype=np.int64) for difference in task]
        sizes_S = np.array([len(sums) for sums in sums_SN])
        counts_SV = np.stack([np.bincount(sums + agents, minlength=2 * agents + 1) for sums in sums_SN])
        counts_BSV = rng.multinomial(sizes_S[drawn_BS], (counts_SV / sizes_S[:, None])[drawn_BS])
        total_B += (counts_BSV @ np.arange(-agents, agents + 1) / sizes_S[drawn_BS]).mean(axis=1)
        observed += float(np.mean([sums.mean() for sums in sums_SN]))
        cells += agents
    low, high = np.quantile(total_B / cells, (0.025, 0.975))
    return Gain(mean=observed / cells, low=float(low), high=float(high))


def difference_standard_error(accuracy: float, count: int, other_accuracy: float, other_count: int) -> float:
    """Binomial standard error of the difference of two accuracies in 0..1 over `count` and `other_count` prompts.

    sqrt(p(1−p)/n + q(1−q)/m). The two runs meet the same prompts and their answers go together, so that the true error
    is smaller: the flag built on it errs on the quiet side.
    """
    return math.sqrt(accuracy * (1 - accuracy) / count + other_accuracy * (1 - other_accuracy) / other_count)


def is_harmed(accuracy: float, count: int, control_accuracy: float, control_count: int) -> bool:
    """Whether a policy ended below its isolated control by more than two standard errors of the difference.

    Args: accuracies in 0..1 over `count` and `control_count` held-out prompts. No prompts: nothing is known, so False.
    """
    if not count or not control_count:
        return False
    loss = control_accuracy - accuracy
    error = difference_standard_error(accuracy, count, control_accuracy, control_count)
    return loss > HARM_STANDARD_ERRORS * error + TIE


def difference_of_shares(hits: int, count: int, other_hits: int, other_count: int) -> Gain:
    """hits/count − other_hits/other_count of two independent samples, with its 95 % interval.

    Source: Newcombe, "Interval estimation for the difference between independent proportions" (Statistics in Medicine 1998),
    method 10: from the Wilson score intervals of both. Deviations: none. Both counts must be above 0.
    """
    (low, high), (other_low, other_high) = _wilson(hits, count), _wilson(other_hits, other_count)
    share, other = hits / count, other_hits / other_count
    below = math.hypot(share - low, other_high - other)
    above = math.hypot(high - share, other - other_low)
    return Gain(mean=share - other, low=share - other - below, high=share - other + above)


def _wilson(hits: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share."""
    share, z = hits / count, NORMAL_95
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return middle - half, middle + half
