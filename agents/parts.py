"""What an agent's part of a checkpoint says of itself: part.json, readable without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from blake3 import blake3

from agents.errors import CheckpointError
from exchange.types import Version

PART_FILE = "part.json"
LEARNER_FILE = "learner.safetensors"
AGENT_FILE = "agent.msgpack"


class FileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """digest: BLAKE3, hexadecimal."""

    nbytes: int
    digest: str


class PartFacts(msgspec.Struct, frozen=True, kw_only=True):
    """part.json. step: steps made. version: of the weights. files: all others of the directory, by relative path."""

    step: int
    version: Version
    files: dict[str, FileFacts]

    @property
    def resumable(self) -> bool:
        """Whether an agent can go on from it."""
        return {LEARNER_FILE, AGENT_FILE} <= self.files.keys()


def step_name(step: int) -> str:
    """The name of what was saved behind this many steps."""
    return f"step-{step:06d}"


def files_of(directory: Path) -> dict[str, FileFacts]:
    """Every file below a directory, by relative path."""
    return {str(path.relative_to(directory)): _facts(path) for path in files_below(directory)}


def files_below(directory: Path) -> Iterator[Path]:
    """Every file below a directory, in the order of their paths."""
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def _facts(path: Path) -> FileFacts:
    hasher = blake3(max_threads=1)
    hasher.update_mmap(path)
    return FileFacts(nbytes=path.stat().st_size, digest=hasher.hexdigest())


def read_part(part: Path, *, check: bool = False) -> PartFacts:
    """What a part says of itself. check: read every file and compare it with its digest.

    Raises CheckpointError, naming the file, for one that is missing, cut or changed.
    """
    try:
        facts = msgspec.json.decode((part / PART_FILE).read_bytes(), type=PartFacts)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{part} is no whole part of a checkpoint: {error}") from error
    for name, told in facts.files.items() if check else ():
        try:
            found = _facts(part / name)
        except OSError as error:
            raise CheckpointError(f"{part / name} cannot be read: {error}") from error
        if found != told:
            raise CheckpointError(
                f"{part / name} is not as it was saved, got {found.nbytes} bytes with digest {found.digest[:16]}, saved were "
                f"{told.nbytes} with {told.digest[:16]}; take an earlier checkpoint"
            )
    return facts
