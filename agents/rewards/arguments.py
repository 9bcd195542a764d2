"""The arguments of a reward function that have one value for each completion.

Shape legend: B completions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import numpy as np
import numpy.typing as npt

from agents.rewards.functions import Signature
from agents.types import Prompt


def row_arguments(
    signature: Signature,
    prompts: Sequence[Prompt],
    texts: Sequence[bytes],
    ids: Sequence[npt.NDArray[np.int32] | None] | None,
) -> dict[str, list[object]]:
    """What the function takes of all that it can ask for, [B] values each; a column that a row does not have is None there.

    Made anew for each call, every row's values copied: what a function does to them changes neither the data nor another
    row or function.
    """
    columns = dict.fromkeys(name for prompt in prompts for name in prompt.columns if signature.takes(name))
    columns |= dict.fromkeys(signature.requires)
    rows: dict[str, list[object]] = {
        name: [deepcopy(prompt.columns.get(_column(prompt, name, signature))) for prompt in prompts] for name in columns
    }
    given = _given_by_row(prompts, texts) if signature.by_row else _given(prompts, texts)
    rows |= {name: values() for name, values in given.items() if signature.takes(name)}
    if signature.takes("completion_ids"):
        rows["completion_ids"] = (
            [None] * len(texts) if ids is None else [None if each is None else each.tolist() for each in ids]
        )
    return rows


def _column(prompt: Prompt, name: str, signature: Signature) -> str:
    return (prompt.column_for(name) or name) if name in signature.requires else name


def _given(prompts: Sequence[Prompt], texts: Sequence[bytes]) -> dict[str, Callable[[], list[object]]]:
    return {
        "prompts": lambda: [_prompt_argument(prompt) for prompt in prompts],
        "completions": lambda: [_completion_argument(*pair) for pair in zip(prompts, texts, strict=True)],
    }


def _given_by_row(prompts: Sequence[Prompt], texts: Sequence[bytes]) -> dict[str, Callable[[], list[object]]]:
    def column_or(name: str, stand_in: Callable[[Prompt], object]) -> Callable[[], list[object]]:
        return lambda: [deepcopy(prompt.columns[name]) if name in prompt.columns else stand_in(prompt) for prompt in prompts]

    return {
        "prompt": lambda: [_prompt_argument(prompt) for prompt in prompts],
        "completion": lambda: [_completion_argument(*pair) for pair in zip(prompts, texts, strict=True)],
        "solution_str": lambda: [text.decode(errors="replace") for text in texts],
        "data_source": column_or("data_source", lambda prompt: prompt.task),
        "extra_info": column_or("extra_info", lambda prompt: None),
        "task": column_or("task", lambda prompt: prompt.task),
    }


def _prompt_argument(prompt: Prompt) -> object:
    if not prompt.conversational:
        return prompt.text
    return [{"role": message.role, "content": message.content} for message in prompt.messages]


def _completion_argument(prompt: Prompt, text: bytes) -> object:
    decoded = text.decode(errors="replace")
    return [{"role": "assistant", "content": decoded}] if prompt.conversational else decoded
