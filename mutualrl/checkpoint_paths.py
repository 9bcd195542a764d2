"""What `mutualrl eval` takes for a checkpoint: a run's directory, a Hugging Face directory or a hub name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agents.config import AgentConfig, HFPolicy
from mutualrl.errors import InputError
from mutualrl.rundir import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """One policy to be evaluated. label: what tables call it. agent: the config it was trained by, where it is a run's."""

    label: str
    path: str
    agent: AgentConfig | None = None

    @property
    def is_adapter(self) -> bool:
        """Whether it is a LoRA adapter without its base."""
        folder = Path(self.path)
        return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()

    def policy(self, prompt_format: str | None) -> HFPolicy:
        """How it is loaded: prompts as in training, where that is known and nothing else is asked for."""
        trained = self.agent.policy if self.agent is not None else None
        known = trained if isinstance(trained, HFPolicy) else HFPolicy(path=self.path)
        return HFPolicy(
            path=self.path,
            prompt_format=prompt_format or known.prompt_format,
            max_context=known.max_context,
            attn_implementation=known.attn_implementation,
            trust_remote_code=known.trust_remote_code,
        )


def is_run(path: Path) -> bool:
    """Whether a run has left its config here."""
    return (path / "manifest.json").is_file() and (path / "config.json").is_file()


def find_checkpoints(given: str) -> Iterator[CheckpointSource]:
    """The policies that an argument stands for: all agents' final checkpoints of a run, else itself.

    Raises InputError for a directory that holds neither, and for a run that has not ended.
    """
    path = Path(given)
    if not path.is_dir():
        if path.exists() or given.startswith((".", "/", "~")):
            raise InputError(f"no checkpoint at {given!r}: it is a run's directory, a Hugging Face one, or a hub name")
        yield CheckpointSource(label=given, path=given)
        return
    if not is_run(path):
        if not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise InputError(f"no checkpoint in {given!r}: it has neither config.json nor adapter_config.json")
        yield CheckpointSource(label=given, path=given)
        return
    run_dir = RunDir(path)
    for name, agent in run_dir.read_config().agents.items():
        final = run_dir.final_checkpoint(name)
        if not final.is_dir():
            raise InputError(
                f"{name} has no final checkpoint in {given!r}: the run has not made all its steps; name one of "
                f"{run_dir.checkpoints / name}/step-*, or `mutualrl resume {given}`"
            )
        yield CheckpointSource(label=f"{given}:{name}", path=str(final), agent=agent)
