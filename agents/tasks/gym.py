"""Tasks of reasoning-gym: a data set of that library as prompts with columns."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from agents.errors import TaskError
from agents.tasks.config import ReasoningGym
from agents.tasks.data import Row
from exchange.types import Message

_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from agents.tasks.gym_rows import main; main()"


def read_gym(config: ReasoningGym, *, seed: int) -> list[Row]:
    """All problems of the data set, in its order. Waits for another process, which has fixed hashes.

    columns: `answer` (None where there are many), `metadata`, and `reasoning_gym`, with which the reward of this name makes
    the problem anew. Raises TaskError when the library, the data set or one of its settings is not there.
    """
    settings = config.config | {"size": config.size, "seed": seed}
    done = subprocess.run(
        [sys.executable, "-c", _BOOT, *sys.path],
        input=json.dumps({"dataset": config.dataset, "settings": settings}),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONHASHSEED": "0"},
    )
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise TaskError(f"task {config.name!r}: dataset={config.dataset!r} cannot be made: {last_line}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise TaskError(f"task {config.name!r}: {answer['error']}")
    rows = []
    for index, problem in enumerate(answer["problems"]):
        question = str(problem["question"])
        content = config.template.replace("{x}", question) if config.template else question
        source = {"dataset": config.dataset, "settings": settings, "index": index}
        columns = {"answer": problem["answer"], "metadata": problem["metadata"], "reasoning_gym": source}
        rows.append(Row(messages=(Message(role="user", content=content),), columns=columns, conversational=False))
    return rows
