"""The credit window: both kinds of credit, in order, and nothing leaks."""

from __future__ import annotations

import asyncio

import pytest

from exchange.credits import CreditWindow


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_bytes_hold_back_what_messages_would_let_through() -> None:
    window = CreditWindow(messages=10, nbytes=100)
    await window.acquire(60)
    second = asyncio.create_task(window.acquire(60))
    await settled()
    assert not second.done()
    window.release(60)
    await second


async def test_messages_hold_back_what_bytes_would_let_through() -> None:
    window = CreditWindow(messages=1, nbytes=100)
    await window.acquire(1)
    second = asyncio.create_task(window.acquire(1))
    await settled()
    assert not second.done()
    window.release(1)
    await second


async def test_a_large_record_is_not_overtaken_for_ever() -> None:
    window = CreditWindow(messages=10, nbytes=100)
    await window.acquire(50)
    large, small = (asyncio.create_task(window.acquire(nbytes)) for nbytes in (100, 1))
    await settled()
    assert not large.done() and not small.done()
    window.release(50)
    await large
    assert not small.done()
    window.release(100)
    await small


@pytest.mark.parametrize("after_grant", [False, True])
async def test_a_cancelled_wait_takes_no_credit(after_grant: bool) -> None:
    window = CreditWindow(messages=1, nbytes=10)
    await window.acquire(10)
    waiting = asyncio.create_task(window.acquire(10))
    await settled()
    if after_grant:
        window.release(10)
    waiting.cancel()
    await asyncio.wait((waiting,))
    if not after_grant:
        window.release(10)
    async with asyncio.timeout(5):
        await window.acquire(10)
