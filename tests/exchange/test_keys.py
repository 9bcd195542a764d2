"""Key files: who may read and write them, what is refused, and what an address says."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
import zmq.auth
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq.utils import z85

import exchange
from exchange.doorkeeper import ZAP_DOMAIN, verdict
from exchange.errors import KeysError
from exchange.keys import Holder, HubKeys, WorkerKeys, address_of, holder_of, make_keys, routing_id_of
from exchange.types import AgentName

KEY = bytes(range(32))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["alpha", "beta"], observers=["watch"])
    return tmp_path / "keys"


def test_secrets_are_their_owners_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = make_keys(tmp_path / "keys", ["alpha"])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in made} == {
        "hub.key_secret": 0o600,
        "hub.key": 0o644,
        "alpha.key_secret": 0o600,
        "alpha.key": 0o644,
    }


def test_pairs_load_with_their_roles_and_pyzmq_reads_them_too(directory: Path) -> None:
    hub, alpha = HubKeys.load(directory), WorkerKeys.load(directory, "alpha")
    assert alpha.hub == hub.public
    assert hub.holders[alpha.public] == Holder(name=AgentName("alpha"))
    watch = WorkerKeys.load(directory, "watch")
    assert hub.holders[watch.public] == Holder(name=AgentName("watch"), observer=True)
    assert len(hub.holders) == 3
    assert zmq.auth.load_certificate(directory / "alpha.key_secret") == (alpha.public, alpha.secret)
    assert zmq.auth.load_certificate(directory / "alpha.key") == (alpha.public, None)


def test_each_machine_needs_its_own_secret_only(directory: Path, tmp_path: Path) -> None:
    for machine, names in {
        "hub": ["hub.key_secret", "alpha.key", "beta.key"],
        "alpha": ["alpha.key_secret", "hub.key"],
    }.items():
        (tmp_path / machine).mkdir(mode=0o700)
        for name in names:
            shutil.copy2(directory / name, tmp_path / machine)
    hub, alpha = HubKeys.load(tmp_path / "hub"), WorkerKeys.load(tmp_path / "alpha", "alpha")
    assert alpha.public in hub.holders and len(hub.holders) == 2


def test_keys_are_never_written_over_and_more_can_be_made(directory: Path) -> None:
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(KeysError, match=r"never written over, got path='.*alpha\.key"):
        make_keys(directory, ["gamma", "alpha"])
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert [path.name for path in make_keys(directory, ["gamma"])] == ["gamma.key_secret", "gamma.key"]
    assert (directory / "hub.key").read_bytes() == before["hub.key"]


@pytest.mark.parametrize("name", ["", "../alpha", "a/b", "hub", ".alpha", "a b", "ä", "x" * 65, "a\0b", "a\n"])
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(KeysError, match="got name="):
        make_keys(tmp_path / "keys", [name])
    assert not (tmp_path / "keys").exists()


def test_a_name_has_one_role(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="comes once"):
        make_keys(tmp_path / "keys", ["alpha"], observers=["alpha"])


def replaced(old: str, new: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("file", "change", "complaint"),
    [
        ("alpha.key_secret", Path.unlink, r"there is no key, .*alpha\.key_secret.*mutualrl keys"),
        ("hub.key", Path.unlink, r"there is no key, .*hub\.key"),
        ("alpha.key_secret", lambda path: path.chmod(0o640), "owner alone.*mode=640.*chmod 600"),
        ("alpha.key_secret", lambda path: path.chmod(0o604), "owner alone.*mode=604"),
        ("hub.key", lambda path: path.chmod(0o666), "not be writable for others.*hub.key.*mode=666"),
        ("hub.key", lambda path: path.parent.chmod(0o777), "not be writable for others.*mode=777"),
        ("alpha.key_secret", lambda path: path.write_bytes(b"\xff" * 100), "no file with a public-key"),
        ("alpha.key_secret", replaced("secret-key", "secret"), "no file with a secret-key"),
        ("alpha.key_secret", replaced('public-key = "', 'public-key = "x'), "no file with a public-key"),
        ("hub.key", lambda path: path.write_text(f'public-key = "{"~" * 40}"'), "no file with a public-key"),
        ("hub.key", lambda path: path.write_text(f'public-key = "{"#" * 40}"'), "no file with a public-key"),
        ("alpha.key_secret", lambda path: (path.unlink(), path.mkdir()), "cannot be read"),
    ],
)
def test_what_a_worker_cannot_use_is_named(
    directory: Path, file: str, change: Callable[[Path], object], complaint: str
) -> None:
    change(directory / file)
    with pytest.raises(KeysError, match=complaint):
        WorkerKeys.load(directory, "alpha")


def test_a_pair_that_does_not_fit_is_refused(directory: Path) -> None:
    public = WorkerKeys.load(directory, "beta").public.decode()
    replaced(WorkerKeys.load(directory, "alpha").public.decode(), public)(directory / "alpha.key_secret")
    with pytest.raises(KeysError, match="do not fit"):
        WorkerKeys.load(directory, "alpha")


def test_a_hub_refuses_two_names_for_one_key_and_roles_that_do_not_exist(directory: Path) -> None:
    shutil.copy2(directory / "alpha.key", directory / "mallory.key")
    with pytest.raises(KeysError, match=r"two names have one key.*mallory\.key"):
        HubKeys.load(directory)
    (directory / "mallory.key").unlink()
    replaced("role = worker", "role = root")(directory / "alpha.key")
    with pytest.raises(KeysError, match="role='root'"):
        HubKeys.load(directory)


def test_secrets_are_not_shown(directory: Path) -> None:
    for keys in (HubKeys.load(directory), WorkerKeys.load(directory, "alpha")):
        assert keys.secret.decode() not in repr(keys)


@given(
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    observer=st.booleans(),
    routing_id=st.binary(max_size=40),
)
@settings(max_examples=50, deadline=None)
def test_an_address_says_whose_key_it_is_whatever_the_routing_id(name: str, observer: bool, routing_id: bytes) -> None:
    holder = Holder(name=AgentName(name), observer=observer)
    assert holder_of(address_of(holder.user_id, routing_id)) == holder


def test_a_routing_id_is_not_an_address_and_cannot_be_guessed_from_an_identity(directory: Path) -> None:
    alpha, beta = WorkerKeys.load(directory, "alpha"), WorkerKeys.load(directory, "beta")
    identity = exchange.new_routing_id()
    assert holder_of(identity) is None and holder_of(b"\0\1\2\3\4") is None
    assert routing_id_of(identity, alpha) == routing_id_of(identity, alpha)
    assert len({identity, routing_id_of(identity, alpha), routing_id_of(identity, beta), routing_id_of(b"x", alpha)}) == 4


def question(**changes: bytes) -> list[bytes]:
    fields = {
        "version": b"1.0",
        "id": b"7",
        "domain": ZAP_DOMAIN,
        "address": b"",
        "identity": b"",
        "mechanism": b"CURVE",
        "key": KEY,
    }
    return [*(fields | changes).values()]


def test_an_admitted_key_gets_a_yes_under_its_holders_name() -> None:
    assert verdict(question(), {KEY: "worker:alpha"}) == [b"1.0", b"7", b"200", b"OK", b"worker:alpha", b""]


@pytest.mark.parametrize(
    "asked",
    [
        question(version=b"2.0"),
        question(domain=b""),
        question(mechanism=b"NULL"),
        question(mechanism=b"PLAIN"),
        question(key=b""),
        question(key=z85.encode(KEY)),
        [*question(), b""],
        question()[:-1],
        [],
    ],
)
def test_anything_else_gets_a_no(asked: list[bytes]) -> None:
    assert verdict(asked, {KEY: "worker:alpha"})[2] == b"400"


@given(st.lists(st.binary(max_size=40), max_size=9))
@settings(max_examples=50, deadline=None)
def test_no_question_stops_the_doorkeeper(asked: list[bytes]) -> None:
    assert verdict(asked, {KEY: "worker:alpha"})[2] == b"400"
