"""Addresses: what may be bound, what is refused, and what is left alone."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import exchange
from exchange.endpoints import check_endpoint, check_reachable, claim, loopback_of
from exchange.errors import EndpointError


@pytest.fixture
def directory() -> Iterator[Path]:
    path = exchange.private_ipc_dir()
    yield path
    for left in path.iterdir():
        left.unlink()
    path.rmdir()


@pytest.mark.parametrize(
    "endpoint",
    ["ipc:///tmp/x/hub", "tcp://127.0.0.1:5555", "tcp://127.9.9.9:0", "tcp://[::1]:5555", "tcp://localhost:5555"],
)
def test_loopback_and_ipc_are_allowed(endpoint: str) -> None:
    check_endpoint(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "advice"),
    [
        ("tcp://0.0.0.0:5555", "one machine only"),
        ("tcp://*:5555", "one machine only"),
        ("tcp://192.168.1.4:5555", "one machine only"),
        ("tcp://[::]:5555", "one machine only"),
        ("tcp://example.org:5555", "one machine only"),
        ("tcp://::1:5555", r"brackets.*tcp://\[::1\]:5555"),
        ("tcp://127.0.0.1", "ends with a port"),
        ("tcp://127.0.0.1:99999", "ends with a port"),
        ("udp://127.0.0.1:5555", "ipc:// or tcp://"),
        ("127.0.0.1:5555", "ipc:// or tcp://"),
        ("ipc://relative/hub", "absolute"),
        ("ipc:///" + "x" * 107, "102 bytes"),
    ],
)
async def test_anything_else_is_an_error_for_hub_and_worker(endpoint: str, advice: str) -> None:
    with pytest.raises(EndpointError, match=advice):
        await exchange.serve(endpoint, exchange.HubConfig(run_id="r"), stop=asyncio.Event())
    with pytest.raises(EndpointError, match=advice):
        async with exchange.connect(endpoint, name="alpha", run_id="r"):
            pass


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:0",
        "tcp://*:5555",
        "tcp://[::]:5555",
        "tcp://192.168.1.4:5555",
        "tcp://example.org:5555",
        "tcp://eth0:5555",
    ],
)
def test_with_keys_a_hub_may_listen_anywhere(endpoint: str) -> None:
    check_endpoint(endpoint, keyed=True)


@pytest.mark.parametrize(
    ("endpoint", "advice"),
    [
        ("tcp://:5555", "one machine only"),
        ("tcp://fe80::1:5555", "brackets"),
        ("tcp://example.org", "ends with a port"),
        ("example.org:5555", "ipc:// or tcp://"),
    ],
)
def test_with_keys_an_address_is_still_an_address(endpoint: str, advice: str) -> None:
    with pytest.raises(EndpointError, match=advice):
        check_endpoint(endpoint, keyed=True)


@pytest.mark.parametrize(
    ("bound", "loopback"),
    [
        ("tcp://0.0.0.0:7", "tcp://127.0.0.1:7"),
        ("tcp://[::]:7", "tcp://[::1]:7"),
        ("tcp://10.0.0.3:7", "tcp://10.0.0.3:7"),
        ("ipc:///tmp/x/hub", "ipc:///tmp/x/hub"),
    ],
)
def test_a_hub_reaches_itself_and_workers_name_a_host(bound: str, loopback: str) -> None:
    assert loopback_of(bound) == loopback
    check_reachable(loopback)
    if bound != loopback:
        with pytest.raises(EndpointError, match="name the hub's host"):
            check_reachable(bound)


def test_a_private_directory_is_private_whatever_the_umask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path) if len(str(tmp_path)) < 70 else tempfile.gettempdir())
    before = os.umask(0)
    try:
        path = exchange.private_ipc_dir()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert path.name.startswith("mrl-") and len(path.name) == 12
    path.rmdir()


def test_a_long_temporary_directory_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 150)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    path = exchange.private_ipc_dir()
    assert path.parent == Path("/tmp")
    check_endpoint(f"ipc://{path}/hub")
    path.rmdir()


def test_what_killed_hubs_left_behind_is_removed_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        dead, served, fresh, unclaimed = (exchange.private_ipc_dir() for _ in range(4))
        foreign = Path(base) / "mrl-mine"
        foreign.mkdir(mode=0o700)
        for path in (dead, fresh, foreign):
            (path / "lock").touch()
        with claim(f"ipc://{served}/hub"):
            for path in (dead, served, unclaimed, foreign):
                os.utime(path, (0, 0))
            new = exchange.private_ipc_dir()
        assert set(Path(base).iterdir()) == {served, fresh, unclaimed, foreign, new}


def test_only_directories_made_here_are_removed(directory: Path, tmp_path: Path) -> None:
    exchange.endpoints.remove_private_dir(f"ipc://{tmp_path}/hub")
    exchange.endpoints.remove_private_dir("tcp://127.0.0.1:5555")
    assert tmp_path.is_dir()
    made = exchange.private_ipc_dir()
    (made / "lock").touch()
    exchange.endpoints.remove_private_dir(f"ipc://{made}/hub")
    assert not made.exists()


def test_an_open_directory_is_no_place_for_a_hub(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(EndpointError, match="mode=755"), claim(f"ipc://{tmp_path}/hub"):
        pass
    with pytest.raises(EndpointError, match="must exist"), claim(f"ipc://{tmp_path}/none/hub"):
        pass


def test_a_file_at_the_path_is_never_deleted(directory: Path) -> None:
    (directory / "hub").write_text("precious")
    with pytest.raises(EndpointError, match="something else"), claim(f"ipc://{directory}/hub"):
        pass
    assert (directory / "hub").read_text() == "precious"


def test_a_link_in_place_of_the_lock_is_not_followed(directory: Path, tmp_path: Path) -> None:
    (directory / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="lock"), claim(f"ipc://{directory}/hub"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_second_hub_at_one_path_is_refused_and_a_third_after_it_not(directory: Path) -> None:
    endpoint = f"ipc://{directory}/hub"
    with claim(endpoint), pytest.raises(EndpointError, match="another hub"), claim(endpoint):
        pass
    with claim(endpoint):
        pass


async def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EndpointError, match=rf"{endpoint}.*port 0"):
            await exchange.serve(endpoint, exchange.HubConfig(run_id="r"), stop=asyncio.Event())


async def test_the_socket_is_gone_after_an_orderly_end(directory: Path) -> None:
    stop = asyncio.Event()
    stop.set()
    await exchange.serve(f"ipc://{directory}/hub", exchange.HubConfig(run_id="r"), stop=stop)
    assert not (directory / "hub").exists()
