from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from service_kit.admin_http import AdminHTTP, Page, metrics_page
from service_kit.metrics import Metrics
from service_kit.server import AddressError


async def broken(target: str) -> Page:
    raise RuntimeError(target)


async def echo(target: str) -> Page:
    return Page(target.encode())


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    pages = {"/metrics": metrics_page(Metrics("test").collect), "/broken": broken, "/echo": echo}
    listener = AdminHTTP("127.0.0.1:0", pages)
    address = await listener.start()
    try:
        yield address
    finally:
        await listener.stop(0)


async def answer_of(address: str, text: bytes) -> tuple[str, bytes]:
    """The status line and the body of what is answered to `text` until the connection is closed."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(text)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.splitlines()[0].decode() if head else "", body


def request(path: str, method: str = "GET", rest: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{rest}\r\n".encode()


async def test_pages_are_served_by_path():
    async with serving() as address:
        status, body = await answer_of(address, request("/metrics"))
        assert status.startswith("HTTP/1.1 200")
        assert b"triptych_build_info{" in body
        assert await answer_of(address, request("/echo?a=1")) == ("HTTP/1.1 200 ", b"/echo?a=1")
        assert await answer_of(address, request("/echo", "HEAD")) == ("HTTP/1.1 200 ", b"")


async def test_several_requests_may_use_one_connection():
    keep = b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n"
    async with serving() as address:
        _, rest = await answer_of(address, 2 * keep + request("/echo"))
    assert rest.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (request("/nothing"), "404"),
        (request("/echo", "POST", "Content-Length: 2\r\n") + b"hi", "405"),
        (request("/echo", "POST", "Content-Length: 70000\r\n") + bytes(70_000), "413"),
        (request("/broken"), "500"),
        (b"no http\r\n\r\n", "400"),
        (b"GET /echo HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 20_000, "431"),
    ],
)
async def test_refusals_have_a_status(text: bytes, status: str):
    async with serving() as address:
        assert (await answer_of(address, text))[0].split()[1] == status


async def test_a_taken_address_is_refused():
    async with serving() as address:
        with pytest.raises(AddressError, match=f"address {address} is already in use"):
            await AdminHTTP(address, {}).start()


async def test_the_end_does_not_wait_for_idle_clients():
    async with serving() as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"GET /echo")
        await writer.drain()
    # Reset if it has not read the beginning of the request.
    with suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
