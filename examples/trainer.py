"""Two tiny policies of different tokenizers learn from each other, in one process: `python examples/trainer.py`."""

from __future__ import annotations

from itertools import product

from agents.config import TinyPolicy
from mutualrl import MutualConfig, MutualTrainer


def overlap(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Share of the answer's letters that are in their place."""
    return [sum(map(str.__eq__, text, right)) / len(right) for text, right in zip(completions, answer, strict=True)]


def main() -> None:
    rows = [{"prompt": f"reverse {a}{b}:", "answer": b + a} for a, b in product("abcdef", repeat=2)]
    trainer = MutualTrainer(
        policies={
            "alpha": TinyPolicy(hidden_size=64, num_hidden_layers=2),
            "beta": {  # its own settings win over `args`
                "policy": TinyPolicy(arch="gpt_neox", tokenizer="char", hidden_size=64),
                "num_generations": 8,
            },
        },
        reward_funcs=overlap,
        args=MutualConfig(
            max_steps=30,
            learning_rate=2e-3,
            num_generations=4,
            max_completion_length=4,
            warm_start={"steps": 100, "mix": {"train": 1.0}, "learning_rate": 1e-2, "batch_size": 16},
        ),
        train_dataset=rows[::2] + rows[1::4],
        eval_dataset=rows[3::4],
    )
    for name, policy in trainer.train().policies.items():
        first, last = policy.log_history[0]["eval/train/accuracy"], policy.metrics["eval/train/accuracy"]
        print(f"{name}: {first:.0%} of the held-out prompts before, {last:.0%} after; saved in {policy.path}")


if __name__ == "__main__":
    main()
