"""`MutualTrainer`: a run from a program or a notebook, on the same code as `mutualrl up`, in one process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agents.callbacks import Callback, Callbacks
from agents.loop import Parts
from agents.rewards.rewards import Reference
from agents.tasks.config import TaskConfig
from mutualrl.embedded import run_embedded
from mutualrl.errors import MutualRLError
from mutualrl.given import Given
from mutualrl.load import build_run, merge
from mutualrl.progress import MetricsTail
from mutualrl.report import write_report
from mutualrl.rundir import RunDir, fresh_path, new_run_dir
from mutualrl.trainer_config import MutualConfig
from mutualrl.trainer_inputs import (
    DatasetInput,
    PolicyInput,
    RewardInput,
    read_datasets,
    read_policies,
    read_rewards,
)
from mutualrl.validate import validate

logger = logging.getLogger("mutualrl.trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPolicy:
    """What became of one policy.

    path: its final checkpoint, for `from_pretrained`; None where the run was stopped before the last step. log_history: every
    line of its metrics, in order, by TRL's names.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    path: Path | None
    log_history: Sequence[Mapping[str, float]]

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric."""
        return {name: value for line in self.log_history for name, value in line.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended. finished: all policies made all their steps. run_dir: as of `mutualrl up`; warnings: before it began."""

    finished: bool
    run_dir: Path
    warnings: tuple[str, ...]
    policies: Mapping[str, TrainedPolicy]


class MutualTrainer:
    """Trains several policies together. One instance trains once.

    policies: by name, or a list; each a path or hub name, a model or (model, tokenizer), a policy's config, or a dict of an
    agent's settings with one of these as its `policy`, which win over `args`. reward_funcs: one or several functions in TRL's
    signature, names or SandboxedReward, for all policies, or a dict by policy; None: exact match of the column `answer`.
    train_dataset: rows (datasets.Dataset, list of dicts) with a column `prompt`, a path or hub name, a task's config or
    several, or a dict of these by task's name. eval_dataset: the same but for configs of generated tasks; a dict's new
    names are only evaluated on. Without it there is no evaluation, but of tasks that hold out prompts of their own.

    run: the run's config, as `mutualrl up` would have it.
    Raises ConfigError with everything that is wrong, before anything is loaded.
    """

    def __init__(
        self,
        policies: Mapping[str, PolicyInput] | Sequence[PolicyInput],
        reward_funcs: RewardInput | Mapping[str, RewardInput] | None = None,
        args: MutualConfig | None = None,
        train_dataset: DatasetInput | Sequence[TaskConfig] | Mapping[str, DatasetInput] = (),
        eval_dataset: DatasetInput | Mapping[str, DatasetInput] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        agents, models = read_policies(policies)
        functions: Mapping[str, Sequence[Reference]] = {}
        if reward_funcs is not None:
            names, functions = read_rewards(reward_funcs, agents)
            agents = {name: table | {"rewards": names[name]} for name, table in agents.items()}
        tables, tasks = read_datasets(train_dataset, eval_dataset)
        settings = (args or MutualConfig()).tables
        self.run = build_run(merge(settings, {"agents": agents, "tasks": tables}), source="MutualTrainer")
        self._given = Given(tasks=tasks, rewards=functions, models=models, callback=Callbacks(callbacks))
        self._warnings = validate(self.run, self._given)
        self._ask_to_stop: Callable[[], object] = lambda: None
        self._asked = False
        self._begun = False

    def train(self) -> TrainResult:
        """Train to the end, on an event loop in a thread of its own, so that it works in notebooks too.

        Ctrl-C lets every policy finish what it computes and save, then raises KeyboardInterrupt.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="trainer") as threads:
            training = threads.submit(asyncio.run, self.train_async())
            try:
                return training.result()
            except KeyboardInterrupt:
                self.stop()
                training.result()
                raise

    async def train_async(self) -> TrainResult:
        """As `train`, on the running loop. Waits for the whole run; cancelled, it leaves checkpoints of the steps made."""
        if self._begun:
            raise RuntimeError("a MutualTrainer trains once; make another one")
        self._begun = True
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._ask_to_stop = lambda: loop.call_soon_threadsafe(stop.set)
        if self._asked:
            stop.set()
        for warning in self._warnings:
            logger.warning("%s", warning)
        threads = torch.get_num_threads()  # the policies' `threads` are torch's, of the whole process
        path = fresh_path(Path(self.run.output_dir), self.run.name, at=datetime.now())
        try:
            with new_run_dir(path) as run_dir:
                finished, parts = await run_embedded(self.run, run_dir, self._given, stop)
                await asyncio.to_thread(_report, run_dir)
                return self._result(run_dir, parts, finished=finished)
        finally:
            torch.set_num_threads(threads)

    def stop(self) -> None:
        """Let every policy finish its step and save; `train` then returns. May be called from any thread, or a callback."""
        self._asked = True
        self._ask_to_stop()

    def _result(self, run_dir: RunDir, parts: Mapping[str, Parts], *, finished: bool) -> TrainResult:
        rows = MetricsTail(run_dir.metrics).read()
        policies = {}
        for name, each in parts.items():
            final = run_dir.final_checkpoint(name)
            policies[name] = TrainedPolicy(
                model=each.policy.model,
                tokenizer=each.policy.tokenizer.hf,
                path=final if final.is_dir() else None,
                log_history=[
                    {key.removeprefix(f"{name}/"): value for key, value in row.items() if isinstance(value, int | float)}
                    for row in rows
                    if row.get("agent") == name
                ],
            )
        return TrainResult(finished=finished, run_dir=run_dir.path, warnings=tuple(self._warnings), policies=policies)


def _report(run_dir: RunDir) -> None:
    """Write the report; that there is none must not hide how the run ended."""
    try:
        write_report(run_dir.path)
    except (OSError, MutualRLError) as error:
        logger.warning("no report: %s", error)
