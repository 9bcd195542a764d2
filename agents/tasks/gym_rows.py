"""reasoning-gym's data sets, made anew from their settings: a problem is fixed by (data set, settings, index).

Some data sets depend on the order of sets, so a process that makes them must have fixed hashes (PYTHONHASHSEED=0). As a
program it reads a Request from its standard input and writes the problems, or what is wrong, to its standard output.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import sys
from functools import lru_cache
from typing import Any

try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
    from reasoning_gym.utils import extract_answer
except ImportError as error:
    raise ImportError(f"it needs reasoning-gym, `pip install 'mutualrl[data]'` ({error})") from error


__all__ = ["dataset_of", "extract_answer", "main"]


@lru_cache(maxsize=64)
def dataset_of(name: str, settings: str) -> Any:
    """The data set; settings: its keyword arguments as JSON. Whatever the library raises for wrong ones."""
    return reasoning_gym.create_dataset(name, **json.loads(settings))


def main() -> None:
    """Answer one request with `{"problems": [...]}` or `{"error": "..."}`."""
    request = json.load(sys.stdin)
    name, settings = request["dataset"], request["settings"]
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS) or sorted(DATASETS)
        answer: dict[str, object] = {"error": f"reasoning-gym has no data set {name!r}; it has {', '.join(close)}"}
    else:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                answer = {"problems": list(dataset_of(name, json.dumps(settings)))}
        except Exception as error:  # each data set checks its settings in its own way
            answer = {"error": f"{name!r} with {settings} cannot be made: {type(error).__name__}: {error}"}
    json.dump(answer, sys.stdout, default=str, skipkeys=True)
