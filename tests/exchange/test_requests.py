"""Requests between workers: each ends once, runs once, and is accounted for."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hub_answers import hello, refusal, two
from hypothesis import given, settings

from exchange.messages import Answered, Bye, Cancel, Deliver, Fail, Ping, Refused, Reply, Request, Revoke, Serve, Settled, ToHub
from exchange.requests import PeerReply, PeerRequest, SampleRequest, ScoreReply, ScoreRequest, reply_type
from exchange.stats import PairStats
from exchange.testing import HubDriver
from exchange.types import AgentName, Message, Version
from exchange.wire import Outgoing, encode_record

ALPHA, BETA = AgentName("alpha"), AgentName("beta")
SCORES = Serve(kinds=("scores",))
BODY = encode_record(ScoreRequest(messages=(), texts=np.zeros(0, np.uint8), text_lengths=np.zeros(0, np.int32))).body


def request(number: int, *, to: str = "beta", deadline_s: float = 10.0, body: bytes = BODY, received: int = 0) -> Request:
    return Request(id=number, to=AgentName(to), deadline_s=deadline_s, body=body, received_bytes=received)


def reply(number: int, *, asker: str = "alpha", body: bytes = b"answer", received: int = 0) -> Reply:
    return Reply(asker=AgentName(asker), id=number, body=body, tokens=7, received_bytes=received)


def serving(**config: object) -> HubDriver:
    driver = two(**config)
    assert driver.ask("beta", SCORES) == Settled()
    return driver


def last_id(driver: HubDriver) -> int:
    """The request id of the last message that was said."""
    return driver.request_id


def told(outgoing: list[Outgoing]) -> list[tuple[str, str]]:
    """To whom what went; of refusals their reason."""
    return [
        (out.peer.decode(), out.message.reason if isinstance(out.message, Refused) else type(out.message).__name__)
        for out in outgoing
    ]


def pair(driver: HubDriver, kind: str = "scores") -> PairStats:
    return driver.hub.stats().requests[ALPHA].pairs[BETA][kind]


def test_a_request_goes_to_its_server_and_the_answer_back() -> None:
    driver = serving()
    (deliver,) = driver.say("alpha", request(5), [b"abc"])
    asked_as = last_id(driver)
    assert deliver.peer == b"beta" and deliver.message == Deliver(asker=ALPHA, id=5, deadline_s=10.0, body=BODY)
    assert [bytes(frame) for frame in deliver.payload] == [b"abc"]
    driver.clock.advance(4.0)
    settled, answered = driver.say("beta", reply(5), [b"defg"])
    assert (settled.message, settled.request_id) == (Settled(), last_id(driver))
    assert (answered.peer, answered.message, answered.request_id) == (b"alpha", Answered(body=b"answer"), asked_as)
    assert [bytes(frame) for frame in answered.payload] == [b"defg"]
    assert driver.hub.next_deadline() is None
    expected = PairStats(
        asked=1, answered=1, unanswered={}, asked_bytes=len(BODY) + 3, served_bytes=10, asked_tokens=0, served_tokens=7
    )
    assert pair(driver) == expected


def test_a_late_request_is_answered_at_its_deadline_and_revoked_at_the_server() -> None:
    driver = serving(heartbeat_s=100.0)
    driver.say("alpha", request(5, deadline_s=8.0))
    driver.say("alpha", request(6, deadline_s=9.0))
    assert driver.hub.next_deadline() == driver.clock.now + 8.0
    driver.clock.advance(7.9)
    assert driver.hub.tick() == []
    driver.clock.advance(0.1)
    assert told(driver.hub.tick()) == [("alpha", "deadline"), ("beta", "Revoke")]
    assert told(driver.say("beta", reply(5))) == [("beta", "Settled")], "too late"
    assert driver.hub.stats().late_replies == 1
    assert told(driver.say("beta", reply(6))) == [("beta", "Settled"), ("alpha", "Answered")]
    assert pair(driver).unanswered == {"deadline": 1}


def test_a_silent_server_is_gone_to_its_askers_at_once() -> None:
    driver = serving(heartbeat_s=1.0)
    driver.say("alpha", request(5, deadline_s=100.0))
    driver.clock.advance(1.0)
    driver.ask("beta", Ping())
    assert driver.hub.next_deadline() == driver.clock.now + 3.0
    driver.clock.advance(3.0)
    assert told(driver.hub.tick()) == [("alpha", "gone")]
    assert refusal(driver.ask("alpha", request(6))) == "gone"
    driver.ask("beta", Ping())
    assert told(driver.say("alpha", request(7))) == [("beta", "Deliver")]


def test_a_server_that_cannot_be_reached_is_gone_also_when_it_is_heard_again() -> None:
    driver = serving()
    driver.say("alpha", request(5))
    driver.hub.undeliverable(b"beta")
    driver.ask("beta", Ping())
    assert driver.hub.next_deadline() == float("-inf")
    assert told(driver.hub.tick()) == [("alpha", "gone")]


@pytest.mark.parametrize(("ends", "reason"), [(Bye(), "gone"), (Serve(kinds=()), "gone"), (Serve(kinds=("samples",)), "gone")])
def test_a_server_that_leaves_or_stops_is_gone(ends: ToHub, reason: str) -> None:
    driver = serving()
    driver.say("alpha", request(5))
    assert told(driver.say("beta", ends))[1:] == [("alpha", reason)]
    assert refusal(driver.ask("alpha", request(6))) == "not_serving"


def test_a_new_incarnation_serves_only_what_it_says_and_the_old_ones_requests_are_over() -> None:
    for open_request in (True, False):
        driver = serving()
        if open_request:
            driver.say("alpha", request(5))
        driver.clock.advance(100.0)
        expected = [("beta2", "Welcome"), *([("alpha", "gone")] if open_request else [])]
        assert told(driver.say("beta2", hello("beta"))) == expected
        driver.ask("alpha", Ping())
        assert refusal(driver.ask("alpha", request(6))) == "not_serving"


def test_the_same_incarnation_gets_what_is_open_again_with_what_is_left_of_its_time() -> None:
    driver = serving()
    driver.say("alpha", request(5), [b"abc"])
    driver.clock.advance(2.0)
    _, again = driver.say("beta", hello("beta"))
    assert isinstance(again.message, Deliver) and again.message.deadline_s == 8.0
    assert [bytes(frame) for frame in again.payload] == [b"abc"]
    assert told(driver.say("beta", reply(5)))[1:] == [("alpha", "Answered")]


def test_a_request_that_comes_again_is_joined_to_the_first() -> None:
    driver = serving()
    driver.say("alpha", request(5))
    assert driver.say("alpha", request(5)) == []
    second = last_id(driver)
    _, answered = driver.say("beta", reply(5))
    assert answered.request_id == second
    assert driver.hub.stats().requests[ALPHA].duplicates == 1 and pair(driver).asked == 1
    driver.join("gamma")
    assert told(driver.say("gamma", request(5))) == [("beta", "Deliver")], "ids are an asker's own"


def test_after_a_break_an_answer_goes_only_to_who_asks_again() -> None:
    driver = serving()
    driver.say("alpha", request(5))
    driver.say("alpha", hello("alpha"))
    assert told(driver.say("beta", reply(5))) == [("beta", "Settled")], "alpha may be a new process"
    assert told(driver.say("alpha", request(5))) == [("beta", "Deliver")], "the server knows it and answers again"
    assert told(driver.say("beta", reply(5)))[1:] == [("alpha", "Answered")]


def test_who_waits_no_longer_is_told_nothing_and_the_server_is() -> None:
    driver = serving()
    driver.say("alpha", request(5))
    assert driver.say("alpha", Cancel(request=99)) == []
    assert told(driver.say("alpha", Cancel(request=last_id(driver) - 1))) == [("beta", "Revoke")]
    driver.say("alpha", request(6))
    assert told(driver.say("alpha", Bye())) == [("alpha", "Goodbye"), ("beta", "Revoke")]
    assert pair(driver).unanswered == {"cancelled": 2}


def test_open_requests_are_bounded_for_askers_servers_and_in_bytes() -> None:
    driver = serving(credit_bytes=1 << 20, heartbeat_s=1000.0)
    for number in range(16):
        assert told(driver.say("alpha", request(number))) == [("beta", "Deliver")]
    assert refusal(driver.ask("alpha", request(16))) == "busy"
    driver.join("a", "b", "c", "d")
    for name in "abc":
        for number in range(16):
            driver.say(name, request(number))
    assert refusal(driver.ask("d", request(0))) == "busy", "64 wait for beta"
    for number in range(16):
        driver.say("beta", reply(number))
    assert told(driver.say("d", request(0), [bytes(900_000)])) == [("beta", "Deliver")]
    assert refusal(driver.ask("d", request(1), [bytes(200_000)])) == "busy"
    assert refusal(driver.ask("d", request(1), [bytes(2 << 20)])) == "too_large"


def test_who_does_not_read_is_sent_no_more() -> None:
    driver = serving(credit_bytes=1 << 20)
    big = [bytes(600_000)]
    for number in (1, 2):
        driver.say("alpha", request(number), big)
        driver.say("beta", reply(number), big)
    assert refusal(driver.ask("alpha", request(3), big)) == "busy", "beta has not said that it read the first two"
    driver.say("beta", reply(99, received=1_200_000))
    driver.say("alpha", request(3))
    assert told(driver.say("beta", reply(3, received=1_200_000), big)) == [("beta", "Settled"), ("alpha", "busy")]
    driver.say("alpha", request(4, received=1_200_000))
    assert told(driver.say("beta", reply(4, received=1_200_000), big))[1:] == [("alpha", "Answered")]


def test_only_the_asked_server_answers_and_only_with_sane_reasons() -> None:
    driver = serving()
    driver.join("mallory")
    driver.say("alpha", request(5))
    assert told(driver.say("mallory", reply(5))) == [("mallory", "Settled")]
    assert told(driver.say("mallory", Fail(asker=ALPHA, id=5, reason="failed", detail=""))) == [("mallory", "Settled")]
    assert driver.hub.stats().late_replies == 2
    _, failed = driver.say("beta", Fail(asker=ALPHA, id=5, reason="deadline", detail="x" * 5000))
    assert isinstance(failed.message, Refused) and failed.message.reason == "failed" and len(failed.message.detail) < 1100
    with pytest.raises(ValueError, match="tokens=-1"):
        Reply(asker=ALPHA, id=1, body=b"", tokens=-1)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (request(5, deadline_s=0.0), "invalid"),
        (request(5, deadline_s=float("nan")), "invalid"),
        (request(5, deadline_s=1e9), "invalid"),
        (request(5, body=b"\xc1"), "invalid"),
        (request(5, body=b"\x80"), "invalid"),
        (request(5, body=msgspec.msgpack.encode({"type": "scores/1", "pad": bytes(200_000)})), "too_large"),
        (request(5, to="nobody"), "not_serving"),
        (request(5, body=BODY.replace(b"scores/1", b"scores/2")), None),
        (request(5, body=BODY.replace(b"scores/1", b"scorer/1")), "not_serving"),
    ],
)
def test_what_cannot_be_asked_is_refused_and_counted(bad: Request, reason: str | None) -> None:
    driver = serving()
    (out,) = driver.say("alpha", bad)
    if reason is None:
        assert isinstance(out.message, Deliver), "versions of a kind are for the server to know"
    else:
        assert refusal(out.message) == reason
        assert driver.hub.stats().requests[ALPHA].refused == {reason: 1}


def test_edges_name_the_kinds_of_requests() -> None:
    driver = serving(edges=frozenset({("alpha", "beta", "scores")}))
    driver.join("gamma")
    assert told(driver.say("alpha", request(1))) == [("beta", "Deliver")]
    assert refusal(driver.ask("gamma", request(1))) == "not_allowed"
    assert refusal(driver.ask("alpha", request(2, to="gamma"))) == "not_allowed"
    assert driver.hub.stats().requests[AgentName("gamma")].refused == {"not_allowed": 1}
    assert refusal(driver.ask("beta", Serve(kinds=("x",) * 33))) == "too_many"


OPERATIONS = st.tuples(
    st.sampled_from(["ask", "again", "reply", "fail", "cancel", "wait", "silence", "rejoin", "anew", "bye", "serve", "stop"]),
    st.integers(0, 7),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATIONS, max_size=60))
def test_every_request_ends_exactly_once_whatever_happens(script: list[tuple[str, int]]) -> None:
    driver = serving(heartbeat_s=2.0)
    incarnation, last = 0, 0
    open_as: dict[int, int] = {}
    answers: Counter[int] = Counter()

    def note(outgoing: list[Outgoing]) -> None:
        answers.update(out.request_id for out in outgoing if out.peer == b"alpha" and out.request_id in open_as)

    for operation, number in script:
        server = f"beta{incarnation}" if incarnation else "beta"
        match operation:
            case "ask" | "again":
                last += operation == "ask"
                out = driver.say("alpha", request(last, deadline_s=3.0 + number))
                open_as[last_id(driver)] = last
            case "reply":
                out = driver.say(server, reply(max(last - number, 0)))
            case "fail":
                out = driver.say(server, Fail(asker=ALPHA, id=max(last - number, 0), reason="failed", detail=""))
            case "cancel":
                out = driver.say("alpha", Cancel(request=last_id(driver)))
            case "wait":
                driver.clock.advance(number / 4)
                driver.ask("alpha", Ping())
                driver.ask(server, Ping())
                out = driver.hub.tick()
            case "silence":
                driver.clock.advance(number)
                driver.ask("alpha", Ping())
                out = driver.hub.tick()
            case "rejoin":
                out = driver.say(server, hello("beta"))
            case "anew":
                driver.hub.undeliverable(server.encode())
                incarnation += 1
                out = driver.say(f"beta{incarnation}", hello("beta"))
            case "bye":
                out = driver.say(server, Bye())
            case _:
                out = driver.say(server, SCORES if operation == "serve" else Serve(kinds=()))
        note(out)
    driver.clock.advance(100.0)
    note(driver.hub.tick())
    stats = driver.hub.stats()
    assert stats.open_requests == 0
    assert max(answers.values(), default=0) <= 1, "nobody is answered twice"
    asker = stats.requests.get(ALPHA)
    if asker is not None and BETA in asker.pairs:
        counted = pair(driver)
        assert counted.asked == counted.answered + sum(counted.unanswered.values())


def test_the_shipped_types_check_their_shapes() -> None:
    good = ScoreReply(
        logprobs=np.zeros(3, np.float32),
        token_ends=np.array([1, 2, 1], np.int32),
        token_counts=np.array([2, 1], np.int32),
        top_logprobs=np.zeros((3, 2), np.float32),
        top_lengths=np.ones((3, 2), np.int32),
        top_pieces=np.zeros(6, np.uint8),
        version=Version(0, 1),
        tokenizer="bytes",
    )
    assert good.tokens == 3
    fields = {name: getattr(good, name) for name in good.__struct_fields__}
    for name in ("logprobs", "token_ends", "token_counts", "top_logprobs", "top_lengths", "top_pieces"):
        with pytest.raises(ValueError, match="must"):
            ScoreReply(**fields | {name: fields[name][:-1]})
    with pytest.raises(ValueError, match="texts"):
        ScoreRequest(messages=(), texts=np.zeros(3, np.uint8), text_lengths=np.array([4], np.int32))
    with pytest.raises(ValueError, match="top_k=-1"):
        ScoreRequest(messages=(), texts=np.zeros(0, np.uint8), text_lengths=np.zeros(0, np.int32), top_k=-1)
    with pytest.raises(ValueError, match="n=0"):
        SampleRequest(prompts=((Message(role="user", content="x"),),), n=0, max_tokens=3)


def test_a_question_names_its_answer() -> None:
    class Silent(PeerReply, frozen=True, kw_only=True, tag="silent/1"):
        pass

    class Asking(PeerRequest[Silent], frozen=True, kw_only=True, tag="asking/1"):
        pass

    class Nameless(PeerRequest, frozen=True, kw_only=True, tag="nameless/1"):  # type: ignore[type-arg]
        pass

    assert reply_type(Asking) is Silent and reply_type(ScoreRequest) is ScoreReply
    with pytest.raises(TypeError, match="Nameless"):
        reply_type(Nameless)


def test_revocations_name_the_request() -> None:
    driver = serving()
    driver.say("alpha", request(5))
    (revoke,) = driver.say("alpha", Cancel(request=last_id(driver)))
    assert revoke.message == Revoke(asker=ALPHA, id=5)
