"""Large bodies of several accounts: the sum that they share, and their turns to be parsed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import Request

from frontend_svc.protocols.openai.bodies import TokenizeBody
from frontend_svc.protocols.openai.body_reader import MAX_BODY_BYTES, BodyReader
from triptych_kit.errors import ResourceExhausted

LARGE = b'{"prompt": "%s"}' % (b"x" * 100_000)


def request_of(receive: Callable[[], Awaitable[dict[str, Any]]]) -> Request:
    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def whole(content: bytes = LARGE) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    return request_of(receive)


def endless(num_bytes: int) -> Request:
    """A body whose first bytes have arrived, and whose end does not."""
    parts = iter([b"x" * num_bytes])

    async def receive() -> dict[str, Any]:
        part = next(parts, None)
        if part is None:
            await asyncio.get_running_loop().create_future()
        return {"type": "http.request", "body": part, "more_body": True}

    return request_of(receive)


async def unchecked(data: bytes, *, max_fields: int, max_numbers: int) -> None:
    return


async def until_idle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_account_has_its_share_of_the_bytes_that_another_has_filled():
    reader = BodyReader(unchecked, takes_unknown=False)
    reading = [
        asyncio.ensure_future(reader.read(endless(MAX_BODY_BYTES), TokenizeBody, "a", 1)) for _ in range(8)
    ]
    await until_idle()
    with pytest.raises(ResourceExhausted, match="bodies of 268435456 bytes are being read") as caught:
        await reader.read(whole(), TokenizeBody, "a", 1)
    assert caught.value.reason == "TOO_MANY_BODIES"
    body, _ = await reader.read(whole(), TokenizeBody, "b", 1)
    assert len(body.prompt or "") == 100_000
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    await reader.read(whole(), TokenizeBody, "a", 1)


async def test_an_account_waits_for_one_body_of_another_not_for_all():
    reader = BodyReader(unchecked, takes_unknown=False)
    order: list[str] = []

    async def read(account: str) -> None:
        await reader.read(whole(), TokenizeBody, account, 1)
        order.append(account)

    many = [asyncio.ensure_future(read("a")) for _ in range(60)]
    await until_idle()
    num_before = len(order)
    await read("b")
    assert len(order) <= num_before + 3
    await asyncio.gather(*many)
    assert order.count("a") == 60


async def test_a_client_that_leaves_while_it_waits_takes_no_turn():
    reader = BodyReader(unchecked, takes_unknown=False)
    reads = [asyncio.ensure_future(reader.read(whole(), TokenizeBody, "a", 1)) for _ in range(60)]
    await until_idle()
    for task in reads[41::2]:
        task.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    assert [task.cancelled() for task in reads[40:]] == [False, True] * 10
    await reader.read(whole(), TokenizeBody, "a", 1)
