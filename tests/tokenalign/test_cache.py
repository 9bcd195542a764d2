"""The cache on disk: what was stored or nothing, and never an error."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
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
    ]
    for change in wrong:
        cache.store_arrays(file.name, arrays | change)
        assert built(tokenizer) == first
        again = cache.load_arrays(file.name)
        assert again is not None
        assert {name: array.tolist() for name, array in again.items()} == {n: a.tolist() for n, a in arrays.items()}


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
