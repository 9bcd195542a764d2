"""How a gain over a control is judged: a paired bootstrap interval, and when a policy counts as harmed.

Shape legend: C cells (agent, task) · S seeds · N held-out prompts of one cell and seed · B bootstrap replicates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

REPLICATES = 10_000
HARM_STANDARD_ERRORS = 2.0
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


def paired_differences(treated: Mapping[str, int], control: Mapping[str, int]) -> npt.NDArray[np.int8]:
    """treated − control on every prompt that both answered, in -1, 0, 1; shape [N], sorted by prompt id.

    Args: prompt id -> 1 (correct) or 0. Prompts that only one of the two has are left out; N may be 0.
    """
    shared = sorted(treated.keys() & control.keys())
    return np.array([treated[prompt] - control[prompt] for prompt in shared], dtype=np.int8)


def paired_bootstrap(
    differences_CS: Sequence[Sequence[npt.NDArray[np.int8]]], *, rng: np.random.Generator, replicates: int = REPLICATES
) -> Gain | None:
    """95 % percentile interval of the mean paired difference, over prompts and, where there are several, over seeds.

    A replicate draws S seeds with replacement, the same for all cells, and within each drawn seed N prompts with
    replacement; the statistic is the mean over cells of the mean over seeds of the mean difference. Agents and tasks are
    what the experiment is about and are not resampled.

    A difference is -1, 0 or 1, so that N draws with replacement are one multinomial draw of three counts: the same
    distribution as indexing prompts, at a cost that does not grow with N.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapters 8 and 13. Deviations: none.
    Args: differences_CS [C][S] of arrays [N] with -1, 0, 1, N may differ; every cell has the same S seeds.
    Returns: the observed mean and the 2.5 % and 97.5 % quantiles; None where there is nothing to compare.
    Degenerate: equal differences everywhere give an interval of zero width; with few seeds (2, 3) the spread between
    seeds is understated, as with any bootstrap over so few.
    """
    cells = [[difference for difference in cell if len(difference)] for cell in differences_CS]
    cells = [cell for cell in cells if cell]
    if not cells:
        return None
    seeds = min(len(cell) for cell in cells)
    if any(len(cell) != seeds for cell in cells):
        raise ValueError(f"every cell needs the same seeds, got seeds per cell={[len(cell) for cell in cells]}")
    drawn_BS = rng.integers(seeds, size=(replicates, seeds))
    total_B = np.zeros(replicates)
    observed = 0.0
    for cell in cells:
        sizes_S = np.array([len(difference) for difference in cell])
        shares_S3 = np.array([[np.mean(difference == value) for value in (-1, 0, 1)] for difference in cell])
        counts_BS3 = rng.multinomial(sizes_S[drawn_BS], shares_S3[drawn_BS])
        means_BS = (counts_BS3[..., 2] - counts_BS3[..., 0]) / sizes_S[drawn_BS]
        total_B += means_BS.mean(axis=1)
        observed += float(np.mean([difference.mean() for difference in cell]))
    low, high = np.quantile(total_B / len(cells), (0.025, 0.975))
    return Gain(mean=observed / len(cells), low=float(low), high=float(high))


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
