"""One of two processes that take learner steps together; rank 0 writes how they compare with those of a process alone.

python rank_process.py STORE RANK RESULT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import agents.ranks
from agents.config import AgentConfig, LoRA, Objective, TinyPolicy
from agents.learner import Learner
from agents.policies.lora import add_adapter
from agents.policies.policy import Policy, build_policy
from agents.ranks import Ranks, Sharded, whole
from agents.rows import Row, Stream
from mutualrl.wiring import build_learner

OBJECTIVE = Objective(beta=0.1, num_iterations=2)


def policy_of(case: str) -> Policy:
    config = TinyPolicy(arch="gpt_neox" if "neox" in case else "llama", hidden_size=32, num_hidden_layers=2)
    policy = build_policy(config, seed=0, device="cpu", dtype="bfloat16" if "half" in case else "float32", threads=1)
    if "lora" in case:
        add_adapter(policy.model, LoRA(r=4), seed=0)
    return policy


def learner_of(case: str, ranks: Ranks | None) -> Learner:
    policy = policy_of(case)
    config = AgentConfig(policy=TinyPolicy(), objective=OBJECTIVE, learning_rate=1e-3, micro_batch_size=1)
    return build_learner(config, policy, ranks)


def make_rows() -> list[Row]:
    """Three rows that are read and one that only counts."""
    rng = np.random.default_rng(0)
    lengths = [(5, 3, 1.0), (4, 6, -1.0), (5, 2, 0.5), (3, 4, 0.0)]
    return [
        Row(
            stream=Stream.OWN,
            prompt_ids=rng.integers(3, 200, prompt, dtype=np.int32),
            ids=rng.integers(3, 200, length, dtype=np.int32),
            advantage=advantage,
            sampled_logprobs=np.full(length, -5.0, dtype=np.float32),
        )
        for prompt, length, advantage in lengths
    ]


def step(learner: Learner) -> tuple[dict[str, float], list[torch.Tensor]]:
    """The step's metrics, and the gradients of its last update."""
    gradients: list[torch.Tensor] = []
    optimizer: Any = learner._optimizer
    update = type(optimizer).step

    def noting(loss: float) -> tuple[float, bool]:
        gradients[:] = [whole(parameter.grad).clone() for parameter in learner.model.parameters() if parameter.grad is not None]
        done: tuple[float, bool] = update(optimizer, loss)
        return done

    optimizer.step = noting
    return learner.step(make_rows(), prompts=2), gradients


def held(parameter: Any) -> int:
    """Numbers of a sharded weight that this process holds."""
    return int(parameter.to_local().numel())


def all_to_the_first(costs: Sequence[int], ranks: int) -> list[list[int]]:
    return [list(range(len(costs))), *([] for _ in range(ranks - 1))]


def compare(case: str, ranks: Ranks) -> dict[str, Any]:
    together, alone = learner_of(case, ranks), learner_of(case, None)
    (metrics, gradients), (expected, expected_gradients) = step(together), step(alone)
    scale = max(float(each.abs().max()) for each in expected_gradients)
    pairs = zip(gradients, expected_gradients, strict=True)
    state = {name: whole(tensor).clone() for name, tensor in together.state().tensors.items()}
    again = learner_of(case, ranks)
    again.restore(type(together.state())(tensors=state, steps=1, non_finite=0))
    kept = {name: whole(tensor) for name, tensor in again.state().tensors.items()}
    return {
        "gradient": max(float((one - other).abs().max()) for one, other in pairs) / scale,
        "metrics": {name: value for name, value in metrics.items() if name != "learn_time"},
        "expected": {name: value for name, value in expected.items() if name != "learn_time"},
        "held": sum(held(parameter) for parameter in together.model.parameters()),
        "of": sum(parameter.numel() for parameter in alone.model.parameters()),
        "restored": kept.keys() == state.keys() and all(torch.equal(kept[name], state[name]) for name in state),
        "same_names": state.keys() == alone.state().tensors.keys(),
    }


def main() -> None:
    store, rank, result = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    ranks = Sharded(store, rank=rank, size=2, device=torch.device("cpu"))
    results = {case: compare(case, ranks) for case in ("llama", "neox", "llama-lora", "llama-half")}
    agents.ranks.share_out = all_to_the_first
    results["three-and-none"] = compare("llama", ranks)
    if rank == 0:
        result.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
