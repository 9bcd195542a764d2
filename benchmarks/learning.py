"""One learning step with rows that no loss component reads left out, against the same step with every row forwarded.

    python benchmarks/learning.py [--repeats 5] [--json]

A tiny policy, 32 groups of 6 completions, of which a share has equal rewards (early in training that is most of them).
The reference is the same policy-gradient term, made to read every row. Prints median seconds and their ratio
(above 1: leaving rows out is faster). `--json` gives one object per line.
"""

from __future__ import annotations

import os
import sys

# Python puts a script's own folder first on the path, where `exchange` would be the benchmark of that name.
sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]  # noqa: PTH100, PTH120

import argparse
import json
import statistics

import numpy as np

from agents.config import Objective, TinyPolicy
from agents.learner import Learner, LearnerSettings
from agents.objectives.component import Component
from agents.objectives.grpo import GRPOSurrogate
from agents.policies.policy import build_policy
from agents.rows import Row, Stream

GROUPS, SIZE, PROMPT_TOKENS, TOKENS = 32, 6, 12, 5


def make_rows(dead_share: float) -> list[Row]:
    rng = np.random.default_rng(0)
    rows = []
    for group in range(GROUPS):
        live = group >= dead_share * GROUPS
        for index in range(SIZE):
            ids = rng.integers(3, 100, TOKENS, dtype=np.int32)
            prompt = rng.integers(3, 100, PROMPT_TOKENS, dtype=np.int32)
            advantage = (1.0 if index % 2 else -1.0) if live else 0.0
            rows.append(Row(stream=Stream.OWN, prompt_ids=prompt, ids=ids, advantage=advantage))
    return rows


class EveryRow(GRPOSurrogate):
    """The policy-gradient term as a usual trainer has it: no row is left out."""

    def reads(self, row: Row) -> bool:
        return True


def make_learner(component: Component) -> Learner:
    policy = build_policy(TinyPolicy(), seed=0, device="cpu", dtype="float32", threads=1)
    settings = LearnerSettings(
        temperature=1.0,
        pad_id=policy.tokenizer.pad_id,
        micro_batch_size=256,
        num_iterations=1,
        learning_rate=1e-5,
        weight_decay=0.0,
        max_grad_norm=1.0,
    )
    return Learner(policy.model, [component], settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    objective = Objective()
    learners = {
        "live": make_learner(GRPOSurrogate(objective, TOKENS)),
        "every": make_learner(EveryRow(objective, TOKENS)),
    }
    for dead_share in (0.0, 0.5, 0.75):
        rows = make_rows(dead_share)
        times: dict[str, list[float]] = {name: [] for name in learners}
        for repeat in range(arguments.repeats + 1):  # in turn, so that both meet the same machine
            for name, learner in learners.items():
                seconds = learner.step(rows, prompts=GROUPS)["learn_time"]
                if repeat:
                    times[name].append(seconds)
        live_only, every = (statistics.median(times[name]) for name in ("live", "every"))
        row = {"dead_share": dead_share, "live_only_s": live_only, "every_row_s": every, "ratio": every / live_only}
        if arguments.json:
            print(json.dumps(row))
        else:
            print(f"dead {dead_share:.0%}  live rows {live_only:.3f} s  every row {every:.3f} s  ratio {row['ratio']:.2f}")


if __name__ == "__main__":
    main()
