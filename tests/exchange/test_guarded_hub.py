"""A hub with keys: who gets in, under which name, and what becomes of everybody else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

import exchange
from exchange import doorkeeper, guard, sockets
from exchange.blob_messages import Get
from exchange.endpoints import lane_endpoint, lane_port
from exchange.errors import ConnectError, EndpointError, GuardError
from exchange.hub import Hub
from exchange.keys import Holder, HubKeys, WorkerKeys, address_of, make_keys, routing_id_of
from exchange.messages import AskStats, Bye, Gather, Hello, Ping, Publish, Refused, ToWorker, Unknown, Welcome
from exchange.sockets import Channel, GuardedChannel, bind_channel, connect_channel
from exchange.testing import rewards_of
from exchange.types import AgentName
from exchange.wire import Incoming, encode_message, encode_record, worker_decoder

LOOPBACK = "tcp://127.0.0.1:0"
IDENTITY = b"\1alpha's identity"


class Keys:
    """A hub's keys and its workers', made for one test. By name: alpha, beta, watch (an observer), and mallory, whom it does
    not know."""

    def __init__(self) -> None:
        public, secret = zmq.curve_keypair()
        pairs = {name: zmq.curve_keypair() for name in ("alpha", "beta", "watch", "mallory")}
        holders = {pair[0]: Holder(name=AgentName(name), observer=name == "watch") for name, pair in pairs.items()}
        del holders[pairs["mallory"][0]]
        self.hub = HubKeys(public=public, secret=secret, holders=holders)
        self.of: Mapping[str, WorkerKeys] = {
            name: WorkerKeys(public=pair[0], secret=pair[1], hub=public) for name, pair in pairs.items()
        }


@pytest.fixture
def keys() -> Keys:
    return Keys()


@asynccontextmanager
async def hub_at(
    endpoint: str, keys: HubKeys | None, directory: Path | None = None, *, heartbeat_s: float = 2.0
) -> AsyncIterator[str]:
    """A hub around a block that ends when the hub does."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    config = exchange.HubConfig(run_id="r", heartbeat_s=heartbeat_s)
    hub = asyncio.create_task(
        exchange.serve(endpoint, config, stop=stop, on_ready=ready.set_result, keys=keys, directory=directory)
    )
    await asyncio.wait((hub, ready), return_when=asyncio.FIRST_COMPLETED)
    if hub.done():
        hub.result()
    block = asyncio.current_task()
    assert block is not None
    hub.add_done_callback(lambda _: None if stop.is_set() else block.cancel())
    try:
        yield ready.result()
    finally:
        stop.set()
        await hub


@asynccontextmanager
async def visitor(
    endpoint: str, keys: WorkerKeys, routing_id: bytes = b"\1visitor", *, watched: bool = False
) -> AsyncIterator[Channel]:
    """Someone who connects and keeps to no rules."""
    link = connect_channel(endpoint, routing_id=routing_id, credit_messages=4, keys=keys, watched=watched)
    try:
        yield link
    finally:
        link.close()


async def works(endpoint: str, keys: Keys) -> None:
    """Whether alpha can do what it is there for, on both lanes."""
    async with exchange.connect(endpoint, name="alpha", run_id="r", keys=keys.of["alpha"]) as alpha:
        await alpha.publish(rewards_of("alpha", 1, "p", epoch=alpha.epoch))
        assert (await alpha.fetch_blob(await alpha.send_blob(b"weights"))).tobytes() == b"weights"


async def asked(link: Channel, message: Any, *payload: bytes) -> ToWorker:
    """What the hub answers to a visitor."""
    await link.send(encode_message(message, 1, payload))
    async with asyncio.timeout(10):
        return worker_decoder().decode(await link.receive()).message


def lane_of(endpoint: str, welcome: Welcome, lane: str) -> str:
    """Where a hub's lane listens, as it has told."""
    assert welcome.data_port and welcome.bulk_port
    if lane == "control":
        return endpoint
    return (
        lane_endpoint(endpoint, "data", welcome.data_port)
        if lane == "data"
        else lane_endpoint(endpoint, "bulk", welcome.bulk_port)
    )


@pytest.mark.parametrize(
    ("key", "name", "observer", "complaint"),
    [
        ("alpha", "beta", False, r"not_yours.*key is that of 'alpha', got name='beta'"),
        ("alpha", "alpha", True, "role.*observer=False"),
        ("watch", "watch", False, "role.*observer=True, got observer=False"),
        ("watch", "alpha", False, "not_yours"),
    ],
)
async def test_a_key_joins_under_its_own_name_and_role(keys: Keys, key: str, name: str, observer: bool, complaint: str) -> None:
    async with hub_at(LOOPBACK, keys.hub) as endpoint:
        with pytest.raises(ConnectError, match=complaint):
            async with exchange.connect(endpoint, name=name, run_id="r", observer=observer, keys=keys.of[key]):
                pass
        async with exchange.connect(endpoint, name="watch", run_id="r", observer=True, keys=keys.of["watch"]) as watch:
            assert (await watch.stats()).workers == {}


async def test_who_is_turned_away_learns_why_at_once(keys: Keys) -> None:
    other = WorkerKeys(public=keys.of["alpha"].public, secret=keys.of["alpha"].secret, hub=zmq.curve_keypair()[0])
    async with hub_at(LOOPBACK, keys.hub) as guarded, hub_at(LOOPBACK, None) as unguarded:
        for endpoint, own, cause in [
            (guarded, keys.of["mallory"], "does not know this key"),
            (guarded, other, "has another key than the one in hub.key"),
            (guarded, None, "wants keys, or it is no hub"),
            (unguarded, keys.of["alpha"], "or uses no keys"),
        ]:
            async with asyncio.timeout(10):
                with pytest.raises(ConnectError, match=f"{cause}.*{endpoint}"):
                    async with exchange.connect(endpoint, name="alpha", run_id="r", keys=own, connect_timeout_s=60):
                        pass
        await works(guarded, keys)


async def test_keys_may_be_files(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["alpha"])
    async with (
        hub_at(LOOPBACK, HubKeys.load(tmp_path / "keys")) as endpoint,
        exchange.connect(endpoint, name="alpha", run_id="r", keys=tmp_path / "keys") as alpha,
    ):
        await alpha.publish(rewards_of("alpha", 1, "p"))


def test_a_routing_id_that_comes_with_another_key_is_another_peer() -> None:
    hub = Hub(exchange.HubConfig(run_id="r"))
    alpha, beta = Holder(name=AgentName("alpha")), Holder(name=AgentName("beta"))
    owner, thief = (address_of(holder.user_id, IDENTITY) for holder in (alpha, beta))

    def ask(peer: bytes, message: Any) -> ToWorker:
        (answer,) = hub.handle(peer, Incoming(message=message, request_id=1, payload=()))
        return answer.message

    assert isinstance(ask(owner, Hello(name=alpha.name, run_id="r")), Welcome)
    record = encode_record(rewards_of("alpha", 1, "p"))
    for message in (Publish(seq=1, body=record.body), Gather(kinds=frozenset({"rewards"})), Ping(), AskStats(), Bye()):
        assert ask(thief, message) == Unknown()
    refusal = ask(thief, Hello(name=alpha.name, run_id="r"))
    assert isinstance(refusal, Refused) and refusal.reason == "not_yours"
    assert hub.present(owner) and not hub.present(thief)
    welcome = ask(thief, Hello(name=beta.name, run_id="r"))
    assert isinstance(welcome, Welcome) and hub.present(owner) and hub.present(thief)


@pytest.mark.slow
async def test_whose_routing_id_was_taken_gets_it_back(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    # It notices by the heartbeat of the transport.
    monkeypatch.setattr(sockets, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(sockets, "HEARTBEAT_TIMEOUT_MS", 400)
    own = keys.of["alpha"]
    async with (
        hub_at(LOOPBACK, keys.hub, heartbeat_s=0.1) as endpoint,
        exchange.connect(endpoint, name="alpha", run_id="r", identity=IDENTITY, keys=own) as alpha,
    ):
        await alpha.publish(rewards_of("alpha", 1, "p"))
        async with visitor(endpoint, keys.of["beta"], routing_id_of(IDENTITY, own)) as thief:
            assert await asked(thief, AskStats()) == Unknown()
        await alpha.publish(rewards_of("alpha", 2, "p"))
        workers = (await alpha.stats()).workers
        assert alpha.epoch == 0
        assert {name: sum(worker.accepted.values()) for name, worker in workers.items()} == {"alpha": 2}


async def test_the_bulk_lane_knows_whose_routing_id_it_is(keys: Keys) -> None:
    own = keys.of["alpha"]
    async with (
        hub_at(LOOPBACK, keys.hub, heartbeat_s=0.1) as endpoint,
        exchange.connect(endpoint, name="alpha", run_id="r", identity=IDENTITY, keys=own, request_timeout_s=1.0) as alpha,
        visitor(endpoint, keys.of["beta"]) as beta,
    ):
        ref = await alpha.send_blob(b"weights")
        welcome = await asked(beta, Hello(name=AgentName("beta"), run_id="r"))
        assert isinstance(welcome, Welcome)
        async with visitor(lane_of(endpoint, welcome, "bulk"), keys.of["beta"], routing_id_of(IDENTITY, own)) as thief:
            refusal = await asked(thief, Get(id=ref.id, offset=0, nbytes=7))
            assert isinstance(refusal, Refused) and refusal.reason == "stranger"
        assert (await alpha.fetch_blob(ref)).tobytes() == b"weights"


async def test_an_identity_that_others_know_is_of_no_use_to_them(keys: Keys) -> None:
    async with hub_at(LOOPBACK, keys.hub) as endpoint:
        connecting = [
            exchange.connect(endpoint, name=name, run_id="r", identity=IDENTITY, keys=keys.of[name])
            for name in ("alpha", "beta")
        ]
        async with connecting[0] as alpha, connecting[1] as beta:
            await alpha.publish(rewards_of("alpha", 1, "p"))
            await beta.publish(rewards_of("beta", 1, "p"))
            assert len((await alpha.gather(kinds={"rewards"})).rows) == 1


async def test_a_worker_with_keys_is_known_to_the_next_hub(keys: Keys, tmp_path: Path) -> None:
    for first_seq in (1, 2):
        async with hub_at(LOOPBACK, keys.hub, tmp_path / "records") as endpoint:
            own = keys.of["alpha"]
            async with exchange.connect(
                endpoint, name="alpha", run_id="r", identity=IDENTITY, first_seq=first_seq, keys=own
            ) as alpha:
                assert alpha.epoch == 0
                await alpha.publish(rewards_of("alpha", first_seq, "p"), ack="durable")


@pytest.mark.parametrize("answer", [b"200", b"400"])
async def test_a_guard_that_lets_in_everybody_or_nobody_is_found_out(
    keys: Keys, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorkeeper, "verdict", lambda question, admitted: [b"1.0", question[1], answer, b"", b"x", b""])
    told: list[str] = []
    with pytest.raises(GuardError, match="gets in" if answer == b"200" else "does not get in"):
        await exchange.serve(
            LOOPBACK, exchange.HubConfig(run_id="r"), stop=asyncio.Event(), on_ready=told.append, keys=keys.hub
        )
    assert told == []


@pytest.mark.parametrize("lane", ["control", "data", "bulk"])
async def test_the_hub_ends_with_its_guard(keys: Keys, lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = asyncio.Event()

    def failing(question: list[bytes], admitted: Mapping[bytes, str]) -> list[bytes]:
        if ready.is_set():
            raise MemoryError("no room to think")
        return verdict(question, admitted)

    verdict = doorkeeper.verdict
    monkeypatch.setattr(doorkeeper, "verdict", failing)
    async with asyncio.timeout(20):
        with pytest.raises(GuardError, match="no room to think"):
            async with hub_at(LOOPBACK, keys.hub) as endpoint, visitor(endpoint, keys.of["beta"]) as beta:
                welcome = await asked(beta, Hello(name=AgentName("beta"), run_id="r"))
                assert isinstance(welcome, Welcome)
                ready.set()
                async with visitor(lane_of(endpoint, welcome, lane), keys.of["alpha"]):
                    await asyncio.Event().wait()


async def test_the_key_of_the_proof_opens_nothing_afterwards(keys: Keys) -> None:
    channel, _ = await guard.bind_guarded(LOOPBACK, keys.hub, credit_messages=4)
    assert isinstance(channel, GuardedChannel)
    assert set(channel.doorkeeper.admitted.values()) == {"worker:alpha", "worker:beta", "observer:watch"}
    channel.close()


async def test_without_a_guard_nobody_gets_in(keys: Keys) -> None:
    channel, endpoint = bind_channel(LOOPBACK, credit_messages=4, keys=keys.hub)
    assert isinstance(channel, GuardedChannel)
    channel.doorkeeper.close()
    try:
        assert not await guard._gets_in(keys.of["alpha"], endpoint)
    finally:
        channel.close()


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.slow
async def test_two_hundred_strangers_leave_nothing_behind(keys: Keys) -> None:
    async with hub_at(LOOPBACK, keys.hub) as endpoint:
        await works(endpoint, keys)
        before = descriptors()
        for _ in range(4):
            async with AsyncExitStack() as strangers:
                handshakes = []
                for number in range(50):
                    public, secret = zmq.curve_keypair()
                    wrong = WorkerKeys(public=public, secret=secret, hub=keys.hub.public if number % 2 else public)
                    stranger = await strangers.enter_async_context(visitor(endpoint, wrong, watched=True))
                    assert stranger.handshake is not None
                    handshakes.append(stranger.handshake.done)
                ends = await asyncio.gather(*handshakes, return_exceptions=True)
                assert all(isinstance(end, ConnectError) for end in ends)
        await works(endpoint, keys)
        async with asyncio.timeout(10):
            while descriptors() > before:  # noqa: ASYNC110  # the last connections end a moment after their strangers
                await asyncio.sleep(0.01)
        async with exchange.connect(endpoint, name="watch", run_id="r", observer=True, keys=keys.of["watch"]) as watch:
            stats = await watch.stats()
            assert set(stats.workers) == {"alpha"} and stats.bad_frames == 0


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"SSH-2.0-scanner\r\n",
        b"\xff" + b"\0" * 8 + b"\x7f\3\1CURVE" + b"\0" * 15 + b"\0" * 32 + b"\4\xc6\5HELLO" + b"\0" * 250,
        b"\xff" * 4096,
        b"",
    ],
)
async def test_a_port_scanner_is_no_trouble(keys: Keys, noise: bytes) -> None:
    async with hub_at(LOOPBACK, keys.hub) as endpoint:
        async with visitor(endpoint, keys.of["beta"]) as beta:
            welcome = await asked(beta, Hello(name=AgentName("beta"), run_id="r"))
        assert isinstance(welcome, Welcome)
        for lane in ("control", "data", "bulk"):
            for _ in range(3):
                with socket.create_connection(("127.0.0.1", lane_port(lane_of(endpoint, welcome, lane)))) as scanner:
                    scanner.sendall(noise)
        await works(endpoint, keys)


async def test_a_hub_on_every_interface_tells_its_port_and_workers_reach_both_lanes(keys: Keys) -> None:
    async with hub_at("tcp://0.0.0.0:0", keys.hub) as endpoint:
        assert endpoint.startswith("tcp://0.0.0.0:") and not endpoint.endswith(":0")
        with pytest.raises(EndpointError, match="name the hub's host"):
            async with exchange.connect(endpoint, name="alpha", run_id="r", keys=keys.of["alpha"]):
                pass
        await works(endpoint.replace("0.0.0.0", "127.0.0.2"), keys)
        await works(endpoint.replace("0.0.0.0", "localhost"), keys)


@pytest.mark.parametrize("version", [(4, 3, 4), (4, 2, 9)])
async def test_an_old_transport_is_refused(keys: Keys, version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: version)
    with pytest.raises(GuardError, match=r"libzmq 4\.3\.5 or newer"):
        await exchange.serve(LOOPBACK, exchange.HubConfig(run_id="r"), stop=asyncio.Event(), keys=keys.hub)
