"""Real tiny agents that agree in nothing but the tasks: prompts and group size, learning rate, completion length."""

from pathlib import Path

import msgspec
import pytest
from test_agents_together import STRINGS, TINY, overlap, train

from mutualrl.config import Run

GRADED = f"{overlap.__module__}:{overlap.__name__}"
"""Half a reward for one letter of two, so that policies that know little have successes to share."""

ALPHA = {
    "policy": TINY | {"arch": "llama"},
    "rewards": [GRADED],
    "prompts_per_step": 8,
    "num_generations": 4,
    "learning_rate": 1e-3,
    "sampling": {"max_completion_length": 5},
    "warm_start": {"steps": 20, "mix": {"reverse": 1.0}, "batch_size": 16, "learning_rate": 1e-2},
}
BETA = {
    "policy": TINY | {"arch": "gpt_neox", "tokenizer": "char"},
    "rewards": [GRADED],
    "prompts_per_step": 5,
    "num_generations": 8,
    "learning_rate": 3e-4,
    "sampling": {"max_completion_length": 3},
    "warm_start": {"steps": 20, "mix": {"sort": 1.0}, "batch_size": 8, "learning_rate": 1e-2},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharing", "took_part"),
    [
        ({"rule": "sgt", "gate": "off", "threshold": 0.5}, "rows/rescue"),
        ({"rule": "prp"}, "rows/peer"),
        ({"rule": "xgrpo"}, "xgrpo/pooled_groups"),
    ],
)
async def test_agents_of_unequal_settings_learn_from_each_other(
    sharing: dict[str, object], took_part: str, tmp_path: Path
) -> None:
    body = {
        "tasks": [STRINGS | {"name": kind, "kind": kind} for kind in ("reverse", "sort")],
        "agents": {"alpha": ALPHA | {"sharing": sharing}, "beta": BETA | {"sharing": sharing}},
        "steps": 3,
        "mode": "lockstep",
        "evaluation": {"every": 0},
    }
    run = msgspec.convert(body, Run)
    await train(run, tmp_path)
    lines = [msgspec.json.decode(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
    for name, completions, longest, learning_rate in (("alpha", 8 * 4, 5, 1e-3), ("beta", 5 * 8, 3, 3e-4)):
        steps = [line for line in lines if f"{name}/reward" in line]
        assert [line["step"] for line in steps] == [1, 2, 3]
        assert all(line[f"{name}/rows/own"] == completions for line in steps)
        assert all(line[f"{name}/completions/max_length"] <= longest for line in steps)
        assert all(line[f"{name}/learning_rate"] == learning_rate for line in steps if f"{name}/learning_rate" in line)
        assert sum(line[f"{name}/{took_part}"] for line in steps) > 0, name
        assert all(line.get(f"{name}/non_finite", 0) == 0 for line in steps)
