"""`mutualrl keys`: what it makes, what it says, and what it leaves alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from test_cli import call

from exchange.keys import HubKeys, WorkerKeys
from mutualrl import exit_codes


def test_keys_are_made_and_it_says_which_file_goes_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "keys", tmp_path / "keys", "alpha", "beta", "--observer", "watch") == 0
    shown = capsys.readouterr().out
    assert "the hub's machine needs hub.key_secret and every .key file" in shown
    assert "alpha's machine needs alpha.key_secret and hub.key" in shown
    hub, alpha = HubKeys.load(tmp_path / "keys"), WorkerKeys.load(tmp_path / "keys", "alpha")
    assert {holder.name: holder.observer for holder in hub.holders.values()} == {"alpha": False, "beta": False, "watch": True}
    for keys in (hub, alpha):
        assert keys.secret.decode() not in shown
    assert stat.S_IMODE((tmp_path / "keys" / "alpha.key_secret").stat().st_mode) == 0o600


def test_what_is_there_is_left_and_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "keys", tmp_path / "keys", "alpha") == 0
    before = {path: path.read_bytes() for path in (tmp_path / "keys").iterdir()}
    assert call(monkeypatch, "keys", tmp_path / "keys", "gamma", "alpha") == exit_codes.BAD_CONFIG
    shown = capsys.readouterr().err
    assert "never written over" in shown and "Traceback" not in shown
    assert {path: path.read_bytes() for path in (tmp_path / "keys").iterdir()} == before
    assert call(monkeypatch, "keys", tmp_path / "keys", "../gamma") == exit_codes.BAD_CONFIG
