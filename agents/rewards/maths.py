"""`accuracy_reward`: mathematical equality of a completion's answer and the reference, by math-verify.

TRL's function of this name judges LaTeX alone; this one also takes a plain expression, as small models write.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from agents.rewards.built_in import text_of

try:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException
except ImportError as error:
    raise ImportError(f"it needs math-verify, `pip install 'mutualrl[data]'` ({error})") from error

ROW_TIMEOUT_S = 2
"""For parsing an answer, and again for comparing it; math-verify's own alarm, which works in a main thread only."""

# A boxed answer comes first, then other LaTeX, then a plain expression.
_ANSWER_FORMS = (
    LatexExtractionConfig(normalization_config=NormalizationConfig(units=True), boxed_match_priority=0),
    ExprExtractionConfig(),
)

logging.getLogger("math_verify").setLevel(logging.ERROR)  # a warning for every text without a formula


def accuracy_reward(completions: Sequence[object], solution: Sequence[object]) -> list[float | None]:
    """1.0 where the completion's answer equals `solution` (or `answer`, `ground_truth`) as mathematics, else 0.0.

    None where there is no reference, where math-verify finds no expression in it, or where the two cannot be
    compared in time.
    """
    return [
        None if right is None else _judge(text_of(completion), str(right))
        for completion, right in zip(completions, solution, strict=True)
    ]


def _judge(text: str, right: str) -> float | None:
    try:
        gold = parse(right, parsing_timeout=ROW_TIMEOUT_S, raise_on_error=True)
        found = _parse(text)
        return float(verify(gold, found, timeout_seconds=ROW_TIMEOUT_S, raise_on_error=True)) if gold else None
    except (Exception, TimeoutException):  # sympy fails in many ways; what could not be compared is not wrong
        return None


def _parse(text: str) -> list[object]:
    try:
        found: list[object] = parse(
            text,
            extraction_config=_ANSWER_FORMS,
            extraction_mode="first_match",
            parsing_timeout=ROW_TIMEOUT_S,
            raise_on_error=True,
        )
    except Exception:  # what sympy cannot read is no answer
        return []
    return found
