"""Workers that ask each other, over every transport."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

import exchange
from exchange.errors import RefusedError, RequestFailedError
from exchange.requests import PeerReply, PeerRequest, SampleReply, SampleRequest, ScoreReply, ScoreRequest
from exchange.types import AgentName, Message, Version

ALPHA, BETA = AgentName("alpha"), AgentName("beta")


class Echo(PeerReply, frozen=True, kw_only=True, tag="echo/1"):
    numbers: npt.NDArray[np.float32]


class EchoRequest(PeerRequest[Echo], frozen=True, kw_only=True, tag="echoes/1"):
    numbers: npt.NDArray[np.float32]


def score_request(*texts: str) -> ScoreRequest:
    content = [text.encode() for text in texts]
    return ScoreRequest(
        messages=(Message(role="user", content="reverse abc:"),),
        texts=np.frombuffer(b"".join(content), np.uint8),
        text_lengths=np.array([len(text) for text in content], np.int32),
    )


async def score(request: ScoreRequest) -> ScoreReply:
    total = len(request.texts)
    return ScoreReply(
        logprobs=-request.texts.astype(np.float32),
        token_ends=np.concatenate([np.arange(1, n + 1, dtype=np.int32) for n in request.text_lengths]),
        token_counts=request.text_lengths,
        top_logprobs=np.empty((total, 0), np.float32),
        top_lengths=np.empty((total, 0), np.int32),
        top_pieces=np.empty(0, np.uint8),
        version=Version(0, 3),
        tokenizer="bytes",
    )


async def sample(request: SampleRequest) -> SampleReply:
    texts = [prompt[-1].content.encode() for prompt in request.prompts for _ in range(request.n)]
    lengths = np.array([len(text) for text in texts], np.int32)
    return SampleReply(
        texts=np.frombuffer(b"".join(texts), np.uint8),
        text_lengths=lengths,
        token_ends=np.concatenate([np.arange(1, n + 1, dtype=np.int32) for n in lengths]),
        token_counts=lengths,
        logprobs=np.zeros(int(lengths.sum()), np.float32),
        finished=np.ones(len(texts), np.bool_),
        version=Version(0, 3),
        tokenizer="bytes",
    )


async def echo(request: EchoRequest) -> Echo:
    return Echo(numbers=request.numbers)


async def reason_of(request: Any) -> str:
    with pytest.raises(RefusedError) as refused:
        await request
    return refused.value.reason


async def test_a_peer_scores_and_samples_what_only_the_asker_has(serving: Any) -> None:
    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta:
        async with beta.serve({ScoreRequest: score, SampleRequest: sample}):
            scored = await alpha.request(score_request("cba", "ħ"), to="beta", timeout_s=10.0)
            np.testing.assert_array_equal(scored.logprobs, -np.frombuffer("cbaħ".encode(), np.uint8).astype(np.float32))
            prompts = tuple((Message(role="user", content=f"prompt {n}"),) for n in range(3))
            sampled = await alpha.request(SampleRequest(prompts=prompts, n=2, max_tokens=20), to="beta", timeout_s=10.0)
            assert bytes(sampled.texts) == b"prompt 0prompt 0prompt 1prompt 1prompt 2prompt 2"
            assert not sampled.texts.flags.writeable
        account = (await alpha.stats()).requests[ALPHA].pairs[BETA]
        assert (account["scores"].asked, account["scores"].answered, account["scores"].served_tokens) == (1, 1, 5)
        assert (account["samples"].asked_tokens, account["samples"].served_tokens) == (120, 48)
        assert account["scores"].asked_bytes > 5 and account["scores"].served_bytes > 20


async def test_own_types_need_no_registration_and_large_arrays_cross(serving: Any) -> None:
    numbers = np.arange(3 << 20, dtype=np.float32)
    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta, beta.serve({EchoRequest: echo}):
        got = await alpha.request(EchoRequest(numbers=numbers), to="beta", timeout_s=10.0)
        np.testing.assert_array_equal(got.numbers, numbers)


async def test_many_requests_share_the_servers_slots_and_more_than_its_credit(serving: Any) -> None:
    running = most = 0

    async def slow(request: EchoRequest) -> Echo:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return Echo(numbers=request.numbers)

    async with serving(credit_bytes=1 << 20) as connect, connect("alpha") as alpha, connect("beta") as beta:
        async with beta.serve({EchoRequest: slow}, concurrency=3):
            asked = [EchoRequest(numbers=np.full(20_000, number, np.float32)) for number in range(60)]
            answers = await asyncio.gather(*(alpha.request(one, to="beta", timeout_s=10.0) for one in asked))
            assert [int(answer.numbers[0]) for answer in answers] == list(range(60))
            assert most == 3
        assert (await alpha.stats()).requests[ALPHA].refused == {}


async def test_a_handlers_error_reaches_the_asker_as_its_text_and_spoils_nothing(serving: Any) -> None:
    async def moody(request: EchoRequest) -> Echo:
        if request.numbers[0] < 0:
            raise KeyError("no such number")
        if request.numbers[0] > 1:
            raise asyncio.CancelledError
        return Echo(numbers=request.numbers)

    def asking(number: float) -> EchoRequest:
        return EchoRequest(numbers=np.array([number], np.float32))

    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta, beta.serve({EchoRequest: moody}):
        with pytest.raises(RequestFailedError, match="'beta' could not answer: KeyError: 'no such number'") as failed:
            await alpha.request(asking(-1), to="beta", timeout_s=10.0)
        assert "Traceback" not in str(failed.value)
        with pytest.raises(RequestFailedError, match="cancelled"):
            await alpha.request(asking(2), to="beta", timeout_s=10.0)
        assert (await alpha.request(asking(1), to="beta", timeout_s=10.0)).numbers == [1]
        assert (await alpha.stats()).requests[ALPHA].pairs[BETA]["echoes"].unanswered == {"failed": 2}


async def test_a_request_ends_in_time_and_its_handler_with_it(serving: Any) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def never(request: EchoRequest) -> Echo:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    request = EchoRequest(numbers=np.ones(1, np.float32))
    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta, beta.serve({EchoRequest: never}):
        assert await reason_of(alpha.request(request, to="beta", timeout_s=0.2)) == "deadline"
        async with asyncio.timeout(5):
            await ended.wait()
        began.clear()
        ended.clear()
        asking = asyncio.create_task(alpha.request(request, to="beta", timeout_s=50.0))
        await began.wait()
        asking.cancel()
        async with asyncio.timeout(5):
            await ended.wait()
        stats = await alpha.stats()
        assert stats.open_requests == 0
        assert stats.requests[ALPHA].pairs[BETA]["echoes"].unanswered == {"deadline": 1, "cancelled": 1}


async def test_who_does_not_serve_or_may_not_be_asked_is_told_apart(serving: Any) -> None:
    edges = frozenset({("alpha", "beta", "echoes"), ("alpha", "gone", "echoes"), ("alpha", "beta", "scores")})
    request = EchoRequest(numbers=np.ones(1, np.float32))
    async with serving(edges=edges) as connect, connect("alpha") as alpha, connect("beta") as beta:
        assert await reason_of(alpha.request(request, to="beta", timeout_s=5.0)) == "not_serving"
        async with beta.serve({EchoRequest: echo}):
            assert await reason_of(alpha.request(score_request("a"), to="beta", timeout_s=5.0)) == "not_serving"
            assert await reason_of(alpha.request(request, to="gone", timeout_s=5.0)) == "not_serving"
            assert await reason_of(beta.request(request, to="alpha", timeout_s=5.0)) == "not_allowed"
            with pytest.raises(ValueError, match="serves already"):
                async with beta.serve({ScoreRequest: score}):
                    pass
            await alpha.request(request, to="beta", timeout_s=5.0)
        assert await reason_of(alpha.request(request, to="beta", timeout_s=5.0)) == "not_serving"
        async with beta.serve({ScoreRequest: score}):
            await alpha.request(score_request("a"), to="beta", timeout_s=5.0)
        stats = (await alpha.stats()).requests
        assert (stats[ALPHA].refused, stats[BETA].refused) == ({"not_serving": 4}, {"not_allowed": 1})
        assert msgspec.json.decode(msgspec.json.encode(await alpha.stats()), type=exchange.HubStats).requests == stats


async def test_a_server_that_stops_or_leaves_tells_who_waits(serving: Any) -> None:
    async def never(request: EchoRequest) -> Echo:
        await asyncio.Event().wait()
        raise AssertionError

    request = EchoRequest(numbers=np.ones(1, np.float32))
    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta:
        async with beta.serve({EchoRequest: never}):  # left before the others
            asking = asyncio.create_task(reason_of(alpha.request(request, to="beta", timeout_s=50.0)))
            while not (await beta.stats()).open_requests:
                pass
        assert await asking == "gone"


async def test_a_reply_beyond_the_hubs_limit_is_an_answer_too(serving: Any) -> None:
    async def huge(request: EchoRequest) -> Echo:
        return Echo(numbers=np.zeros(1 << 19, np.float32))

    async with serving(credit_bytes=1 << 20) as connect, connect("alpha") as alpha, connect("beta") as beta:  # noqa: SIM117
        async with beta.serve({EchoRequest: huge}):
            request = EchoRequest(numbers=np.ones(1, np.float32))
            assert await reason_of(alpha.request(request, to="beta", timeout_s=5.0)) == "too_large"


async def test_a_type_that_the_peer_knows_otherwise_is_refused(serving: Any) -> None:
    class Other(PeerRequest[Echo], frozen=True, kw_only=True, tag="echoes/1"):
        word: str

    async with serving() as connect, connect("alpha") as alpha, connect("beta") as beta, beta.serve({EchoRequest: echo}):
        assert await reason_of(alpha.request(Other(word="x"), to="beta", timeout_s=5.0)) == "malformed"
