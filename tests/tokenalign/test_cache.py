"""The cache on disk: what was stored or nothing, and never an error."""

from __future__ import annotations

import io
import os
import stat
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer, models

from tokenalign import TokenTable, cache, table


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MUTUALRL_CACHE", str(tmp_path))
    return tmp_path / "tokenalign"


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """A vocabulary that counts as large."""
    monkeypatch.setattr(table, "_CACHED_FROM_BYTES", 10)
    return Tokenizer(models.WordLevel({f"word{n}": n for n in range(50)} | {"?": 50}, unk_token="?"))


def built(tokenizer: Tokenizer, vocab_size: int | None = None) -> tuple[bytes, list[int], object]:
    made = TokenTable.from_tokenizer(tokenizer, vocab_size=vocab_size, roles={"eos": [3]})
    return made.bytes_of([1, 2]), made.kinds.tolist(), (made.losses, made.fingerprint, made.roles, made.missing_bytes.tolist())


def test_what_was_stored_comes_back_and_only_under_its_name(place: Path) -> None:
    assert cache.load("a") is None
    cache.store("a", b"content")
    assert cache.load("a") == b"content"
    (place / "a").rename(place / "b")
    assert cache.load("b") is None
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert [path.name for path in place.iterdir()] == ["b"]


@pytest.mark.parametrize("damage", [0, 1, 31, 32, 33, -1])
def test_damaged_files_are_as_good_as_none(place: Path, damage: int) -> None:
    cache.store_arrays("a", {"x": np.arange(9)})
    assert cache.load_arrays("a") is not None
    (place / "a").write_bytes((place / "a").read_bytes()[:damage])
    assert cache.load_arrays("a") is None
    cache.store("a", b"no archive of arrays")
    assert cache.load_arrays("a") is None
    (place / "a").unlink()
    (place / "a").mkdir()
    assert cache.load("a") is None
    cache.store("a", b"a directory is in the way")


def test_objects_are_never_loaded(place: Path) -> None:
    """A pickle inside an archive could run code."""
    np.savez(place.parent / "evil.npz", x=np.array([{}], dtype=object), allow_pickle=True)
    cache.store("a", (place.parent / "evil.npz").read_bytes())
    assert cache.load_arrays("a") is None


def test_a_cached_table_is_the_built_one(place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    first, wide = built(tokenizer), built(tokenizer, 60)
    assert len(list(place.iterdir())) == 2
    monkeypatch.setattr(table, "_contents", None)
    assert (built(tokenizer), built(tokenizer, 60)) == (first, wide)


def test_a_table_of_wrong_arrays_is_built_anew(place: Path, tokenizer: Tokenizer) -> None:
    first = built(tokenizer)
    (file,) = place.iterdir()
    arrays = cache.load_arrays(file.name)
    assert arrays is not None
    wrong = [
        {"widths": arrays["widths"].astype(np.int32)},
        {"widths": arrays["widths"] + 1},
        {"kinds": arrays["kinds"][:-1]},
        {"kinds": arrays["kinds"] + 9},
        {"blob": arrays["blob"].reshape(1, -1)},
        {"blob": arrays["blob"][1:]},
        {"more": arrays["blob"]},
        {"losses": np.frombuffer(b"[1", np.uint8)},
        {"losses": np.frombuffer(b"[" * 100_000, np.uint8)},
        {"losses": np.frombuffer(b'["\xff"]', np.uint8)},
        {"widths": wrapping(arrays["widths"])},
        {"kinds": arrays["kinds"] * 0},
        {"kinds": np.full_like(arrays["kinds"], table.TokenKind.SPECIAL)},
        {"missing_bytes": arrays["missing_bytes"][::-1]},
        {"unk": np.array([1, 2], np.int64)},
    ]
    for change in wrong:
        cache.store_arrays(file.name, arrays | change)
        assert built(tokenizer) == first
        again = cache.load_arrays(file.name)
        assert again is not None
        assert {name: array.tolist() for name, array in again.items()} == {n: a.tolist() for n, a in arrays.items()}


def wrapping(widths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Others, of the same sum in 64 bits."""
    more = np.zeros_like(widths)
    more[:4] = 2**62
    return widths + more


def packed(method: int, *, corrupt: bool = False, flags: int = 0) -> bytes:
    """An archive of one array, written as `store_arrays` does not."""
    array, archive = io.BytesIO(), io.BytesIO()
    np.save(array, np.zeros(100_000, np.uint8))
    with zipfile.ZipFile(archive, "w", method if method in (0, 8) else 0) as file:
        file.writestr("x.npy", array.getvalue())
    content = bytearray(archive.getvalue())
    central = content.index(b"PK\x01\x02")
    for at in (6, central + 8):
        content[at] |= flags
    for at in (8, central + 10):
        content[at] = method
    if corrupt:
        content[60:90] = b"\xff" * 30
    return bytes(content)


@pytest.mark.parametrize(
    "content",
    [
        packed(8),
        packed(8, corrupt=True),
        packed(99),
        packed(0, flags=1),
        packed(0, corrupt=True),
        packed(0)[:200],
        b"\x93NUMPY\x01\x00" + b"(" * 100,
    ],
)
def test_archives_that_were_not_stored_here_are_as_good_as_none(place: Path, content: bytes) -> None:
    cache.store("a", content)
    assert cache.load("a") == content
    assert cache.load_arrays("a") is None


def test_only_regular_files_of_this_user_of_a_sane_size_are_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.store("a", b"content")
    (place / "link").symlink_to(place / "a")
    os.mkfifo(place / "pipe")
    (place / "folder").mkdir()
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    assert [cache.load(name) for name in ("link", "pipe", "folder")] == [None, None, None]
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_MOST_BYTES", 8)
        assert cache.load("a") is None
    assert cache.load("a") == b"content"
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert cache.load("a") is None


def test_small_vocabularies_are_not_cached(place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("MUTUALRL_CACHE", str(place.parent))
    built(tokenizer)
    assert not place.exists()


@pytest.mark.parametrize("where", ["", "/dev/null", "/proc/none"])
def test_no_place_is_no_cache(where: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUTUALRL_CACHE", where)
    assert built(tokenizer) == built(tokenizer)


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MUTUALRL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lost)
    assert cache.place() is None
    assert cache.load("a") is None
    cache.store("a", b"")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache.place() == Path("/x/mutualrl/tokenalign")
