"""Writes run directories in the formats of a real run, with seeded, plausible curves; no agent is trained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from agents.config import AgentConfig, TinyPolicy
from agents.sharing.config import SGT, SharingConfig
from agents.tasks.config import Reverse, Sort
from exchange.stats import HubStats, WorkerStats
from exchange.types import AgentName, Cursor, Version
from mutualrl.config import Run
from mutualrl.manifest import Manifest, Status

HELDOUT = 72
SKILLS = {"alpha": "reverse", "beta": "sort"}
Finals = Mapping[tuple[str, str], float]

TAUGHT: Finals = {("alpha", "reverse"): 0.97, ("alpha", "sort"): 0.81, ("beta", "sort"): 0.95, ("beta", "reverse"): 0.54}
ALONE: Finals = {("alpha", "reverse"): 0.97, ("alpha", "sort"): 0.33, ("beta", "sort"): 0.96, ("beta", "reverse"): 0.11}


def make_config(
    sharing: SharingConfig | None = None, *, agents: Sequence[str] = ("alpha", "beta"), seed: int = 0, steps: int = 100
) -> Run:
    """Two tiny agents, each skilled in one of two string tasks."""
    archs = {"alpha": TinyPolicy(), "beta": TinyPolicy(arch="gpt_neox", tokenizer="char")}
    return Run(
        name="synthetic",
        seed=seed,
        steps=steps,
        tasks=(Reverse(name="reverse", heldout=HELDOUT), Sort(name="sort", heldout=HELDOUT)),
        agents={
            name: AgentConfig(
                policy=archs[name],
                sharing=sharing or SGT(lambda_=1.0),
                skills=(SKILLS[name],),
                prompts_per_step=32,
                num_generations=6,
            )
            for name in agents
        },
    )


def prompt_ids(task: str, count: int = HELDOUT) -> list[str]:
    return [hashlib.sha256(f"{task} {index}".encode()).hexdigest()[:16] for index in range(count)]


def eval_line(agent: str, task: str, step: int, correct: Sequence[int], **changes: object) -> dict[str, object]:
    """One line of evals.jsonl."""
    line = {
        "agent": agent,
        "step": step,
        "wall_s": 0.8 * step,
        "task": task,
        "own_skill": SKILLS.get(agent) == task,
        "accuracy": sum(correct) / len(correct),
        "correct": list(correct),
        "prompt_ids": prompt_ids(task, len(correct)),
        "mean_length": 4.0 + 2.0 * 0.97**step,
        "eos_rate": min(1.0, 0.9 + step / 500),
    }
    return {**line, **changes}


def write_run(
    run_dir: Path,
    finals: Finals,
    config: Run | None = None,
    *,
    status: Status = "done",
    seed: int = 0,
    rescues: Sequence[Mapping[str, object]] | None = None,
) -> Path:
    """A finished run whose held-out accuracies end at `finals`, by (agent, task)."""
    config = config or make_config(seed=seed)
    rng = np.random.default_rng(seed)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.json").write_bytes(msgspec.json.encode(config))
    (run_dir / "manifest.json").write_bytes(msgspec.json.encode(make_manifest(status)))
    shares = not all(type(agent.sharing).__name__ == "Isolated" for agent in config.agents.values())
    evals, metrics, saved = [], [], []
    for (agent, task), final in finals.items():
        difficulty_N = rng.random(HELDOUT)
        start = 0.94 if SKILLS.get(agent) == task else 0.03
        for step in range(0, config.steps + 1, 20):
            reached = start + (final - start) * (1 - 0.955**step) / (1 - 0.955**config.steps)
            evals.append(eval_line(agent, task, step, [int(value) for value in difficulty_N < reached]))
    for agent in config.agents:
        peers = [peer for peer in config.agents if peer != agent] if shares else []
        metrics += [metric_line(agent, step, peers, rng) for step in range(1, config.steps + 1)]
        saved += rescue_lines(agent, peers, rng) if rescues is None else []
    write_lines(run_dir / "evals.jsonl", evals)
    write_lines(run_dir / "metrics.jsonl", metrics)
    write_lines(run_dir / "rescues.jsonl", saved if rescues is None else rescues)
    (run_dir / "exchange.json").write_bytes(msgspec.json.encode(make_stats(list(config.agents) if shares else [])))
    return run_dir


def metric_line(agent: str, step: int, peers: Sequence[str], rng: np.random.Generator) -> dict[str, object]:
    """One line of metrics.jsonl."""
    values: dict[str, float] = {
        "reward": 0.45 + 0.35 * (1 - 0.96**step) + 0.05 * float(rng.standard_normal()),
        "completions/mean_length": 4.1,
        "frac_reward_zero_std": 0.3,
        "entropy": 0.4,
        "num_tokens": 800,
        "tokens_per_s": 2000.0,
        "peer/staleness_mean": 0.4,
    }
    for peer in peers:
        values |= {
            f"peer/{peer}/hit_rate": min(1.0, 0.9 + 0.05 * float(rng.random())),
            f"peer/{peer}/prompts": 32,
            "rescues": int(rng.poisson(1 + 10 * 0.97**step)),
            "thl/residual": 0.41,
            "thl/refused": 0,
            "peer/share": 0.04,
            "thl/tokens_in": 40,
            "thl/tokens_out": 52,
        }
    return {"agent": agent, "step": step, "wall_s": 0.8 * step} | {f"{agent}/{key}": v for key, v in values.items()}


def rescue_lines(agent: str, peers: Sequence[str], rng: np.random.Generator) -> list[dict[str, object]]:
    """Lines of rescues.jsonl: answers cut by a byte-pair tokenizer on one side and by characters on the other."""
    lines: list[dict[str, object]] = []
    for step in range(24):
        text = "".join(rng.choice(list("abcdef"), 3))
        for peer in peers:
            whole = [text[:2], text[2]] if step % 3 else list(text)
            source, receiver = (whole, list(text)) if peer == "alpha" else (list(text), whole)
            spans = [
                {"text": text[:2], "source": source[:-1], "receiver": receiver[:-1], "exact": False},
                {"text": text[2], "source": [text[2]], "receiver": [text[2]], "exact": True},
            ]
            if not step % 3:
                spans = [{"text": char, "source": [char], "receiver": [char], "exact": True} for char in text]
            lines.append(
                {
                    "agent": agent,
                    "step": step,
                    "peer": peer,
                    "task": SKILLS.get(peer, "sort"),
                    "prompt_id": f"{agent}{step}",
                    "prompt": f"{SKILLS.get(peer, 'sort')} {text[::-1]}:",
                    "text": text,
                    "source_tokens": source,
                    "receiver_tokens": receiver,
                    "spans": spans,
                    "residual": 0.67 if step % 3 else 0.0,
                }
            )
    return lines


def make_stats(agents: Sequence[str]) -> HubStats:
    """What the hub counted over a run in which every agent published to every other."""
    workers = {
        AgentName(agent): WorkerStats(
            state="left",
            epoch=1,
            step=100,
            version=Version(1, 100),
            silent_s=0.1,
            since_progress_s=0.2,
            published=1900,
            accepted={"prompts": 100, "successes": 1800},
            accepted_bytes={"prompts": 61_000, "successes": 412_000},
            refused={},
            duplicates=0,
            delivered={AgentName(peer): {"prompts": 100, "successes": 1733} for peer in agents if peer != agent},
            delivered_bytes=455_000,
            withheld=0,
        )
        for agent in agents
    }
    return HubStats(
        run_id="synthetic",
        uptime_s=81.0,
        workers=workers,
        cursor=Cursor(3800),
        stored=3800,
        stored_bytes=946_000,
        evicted=0,
        expired=0,
        waiting_gathers=0,
        bad_frames=0,
        undeliverable=0,
    )


def make_manifest(status: Status) -> Manifest:
    return Manifest(
        run_id="synthetic", name="synthetic", status=status, pid=1, started="2026-01-01T00:00:00+00:00", endpoint="ipc:///tmp/x"
    )


def write_lines(path: Path, lines: Sequence[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
