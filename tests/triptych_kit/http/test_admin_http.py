from __future__ import annotations

import asyncio
import gc
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import uvloop

from triptych_kit.http import admin_http
from triptych_kit.http.admin_http import AdminHTTP, read_page
from triptych_kit.http.pages import Page, metrics_page
from triptych_kit.server import AddressError
from triptych_kit.telemetry.metrics import Metrics


async def broken(target: str) -> Page:
    raise RuntimeError(target)


async def echo(target: str) -> Page:
    return Page(target.encode())


async def take(body: bytes) -> Page:
    return Page(body.upper())


class Parts:
    """A body in parts: "one", then "two", which waits until it is cancelled or `is_allowed` is set."""

    def __init__(self) -> None:
        self.is_allowed, self.was_cancelled = asyncio.Event(), asyncio.Event()

    async def page(self, body: bytes) -> Page:
        return Page(self._parts(body))

    async def _parts(self, body: bytes) -> AsyncGenerator[bytes, None]:
        yield b"one"
        if body == b'"fail"':
            raise RuntimeError
        try:
            await self.is_allowed.wait()
        except asyncio.CancelledError:
            self.was_cancelled.set()
            raise
        yield b"two"


@asynccontextmanager
async def serving(host: str = "127.0.0.1", parts: Parts | None = None) -> AsyncIterator[str]:
    pages = {"/metrics": metrics_page(Metrics("test").collect), "/broken": broken, "/echo": echo}
    listener = AdminHTTP(f"{host}:0", pages, {"/take": take, "/parts": (parts or Parts()).page})
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


def request(path: str, method: str = "GET", rest: str = "", host: str = "localhost") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{rest}\r\n".encode()


def post(path: str, body: bytes, rest: str = "Content-Type: application/json\r\n") -> bytes:
    return request(path, "POST", f"Content-Length: {len(body)}\r\n{rest}") + body


async def test_pages_are_served_by_path():
    async with serving() as address:
        status, body = await answer_of(address, request("/metrics"))
        assert status.startswith("HTTP/1.1 200")
        assert b"triptych_build_info{" in body
        assert await answer_of(address, request("/echo?a=1")) == ("HTTP/1.1 200 ", b"/echo?a=1")
        assert await answer_of(address, request("/echo", "HEAD")) == ("HTTP/1.1 200 ", b"")


async def test_several_requests_may_use_one_connection():
    keep = b"GET /echo HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with serving() as address:
        _, rest = await answer_of(address, 2 * keep + request("/echo"))
    assert rest.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (request("/nothing"), "404"),
        (post("/echo", b"hi"), "405"),
        (request("/take"), "405"),
        (post("/take", bytes(300_000)), "413"),
        (post("/take", b"{}", "Content-Type: text/plain\r\n"), "415"),
        (post("/take", b"{}", ""), "415"),
        (post("/take", b"{}", "Content-Type: application/json\r\nOrigin: http://other:1\r\n"), "403"),
        (post("/take", b"{}", "Content-Type: application/json\r\nOrigin: null\r\n"), "403"),
        (request("/broken"), "500"),
        (b"no http\r\n\r\n", "400"),
        (b"GET /echo HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 20_000, "431"),
    ],
)
async def test_refusals_have_a_status(text: bytes, status: str):
    async with serving() as address:
        assert (await answer_of(address, text))[0].split()[1] == status


@pytest.mark.parametrize(
    ("text", "allow"), [(post("/echo", b"hi"), b"allow: GET, HEAD"), (request("/take"), b"allow: POST")]
)
async def test_a_method_that_is_not_served_is_answered_with_those_that_are(text: bytes, allow: bytes):
    async with serving() as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(text)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        writer.close()
    assert allow in head.splitlines()


async def test_a_target_may_have_the_absolute_form_whose_host_counts():
    """As a proxy sends it. A browser that another site leads here names that site there."""
    async with serving() as address:
        own = request("HTTP://localhost:1/echo?a=1", host="other.example")
        assert await answer_of(address, own) == ("HTTP/1.1 200 ", b"/echo?a=1")
        other = await answer_of(address, request("http://other.example/echo"))
    assert other[0].split()[1] == "421"


async def test_a_post_of_the_same_origin_has_its_body_taken():
    rest = "Content-Type: application/json; charset=utf-8\r\nOrigin: http://localhost\r\n"
    async with serving() as address:
        assert await answer_of(address, post("/take", b'"hi"', rest)) == ("HTTP/1.1 200 ", b'"HI"')


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", "200"),
        ("LOCALHOST:80", "200"),
        ("127.0.0.1:9400", "200"),
        ("[::1]:9400", "200"),
        ("triptych.example", "421"),
        ("localhost.example:80", "421"),
        ("127.0.0.1.example", "421"),
        ("10.0.0.1", "421"),
        ("[::1", "421"),
    ],
)
async def test_a_listener_on_loopback_has_only_names_of_loopback(host: str, status: str):
    async with serving() as address:
        line, body = await answer_of(address, request("/echo", host=host))
    assert line.split()[1] == status
    assert status == "200" or f"host {host} is not served".encode() in body


async def test_a_listener_on_other_addresses_has_any_name():
    async with serving("0.0.0.0") as address:
        status, _ = await answer_of(
            address.replace("0.0.0.0", "127.0.0.1"), request("/metrics", host="triptych.example")
        )
    assert status.split()[1] == "200"


async def test_a_client_without_a_host_is_no_browser():
    async with serving() as address:
        assert (await answer_of(address, b"GET /echo HTTP/1.0\r\n\r\n"))[0].split()[1] == "200"


async def test_every_page_forbids_what_is_not_its_own():
    async with serving() as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(request("/echo"))
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert b"content-security-policy: default-src 'self';" in answer


@pytest.mark.parametrize(
    "body", [f"Content-Length: 300000\r\n\r\n{'a' * 300_000}", "Transfer-Encoding: chunked\r\n\r\nzz\r\n"]
)
async def test_the_refusal_of_a_head_has_no_body(body: str, caplog: pytest.LogCaptureFixture):
    async with serving() as address:
        status, rest = await answer_of(address, f"HEAD /echo HTTP/1.1\r\nHost: localhost\r\n{body}".encode())
    assert (status[:10], rest) == ("HTTP/1.1 4", b"")
    assert caplog.text == ""


async def test_a_client_that_waits_to_send_its_body_is_asked_for_it():
    async with serving() as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(
            request(
                "/take",
                "POST",
                "Content-Length: 2\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n",
            )
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert head.startswith(b"HTTP/1.1 100")
        writer.write(b"hi")
        assert (await asyncio.wait_for(reader.read(), 10)).endswith(b"HI")
        writer.close()


@pytest.mark.parametrize("is_in_parts", [False, True], ids=["whole", "in parts"])
def test_an_answer_to_a_client_that_has_reset_the_connection_is_no_error(
    is_in_parts: bool, caplog: pytest.LogCaptureFixture
):
    uvloop.run(_answer_after_a_reset(is_in_parts))
    gc.collect()
    assert caplog.text == ""


async def _answer_after_a_reset(is_in_parts: bool) -> None:
    # The services' event loop raises where asyncio's drops what is written.
    has_begun, was_reset = asyncio.Event(), asyncio.Event()

    async def late() -> Page:
        has_begun.set()
        await was_reset.wait()
        return Page(b"late")

    async def parts() -> AsyncGenerator[bytes, None]:
        try:
            yield b"early"
            await late()
        except asyncio.CancelledError:
            # As a part that comes at the moment of the reset.
            yield b"late"

    async def page(body: bytes) -> Page:
        return Page(parts()) if is_in_parts else await late()

    listener = AdminHTTP("127.0.0.1:0", {"/echo": echo}, {"/late": page})
    address = await listener.start()
    _, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(post("/late", b"{}"))
    await asyncio.wait_for(has_begun.wait(), 10)
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    # Answered after the reset has arrived.
    assert (await answer_of(address, request("/echo")))[1] == b"/echo"
    was_reset.set()
    assert (await answer_of(address, request("/echo")))[1] == b"/echo"
    await listener.stop(0)


async def test_parts_are_written_as_they_come():
    parts = Parts()
    async with serving(parts=parts) as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(post("/parts", b"{}"))
        head = await asyncio.wait_for(reader.readuntil(b"one\r\n"), 10)
        assert b"transfer-encoding: chunked" in head.lower()
        parts.is_allowed.set()
        assert await asyncio.wait_for(reader.read(), 10) == b"3\r\ntwo\r\n0\r\n\r\n"
        writer.close()


async def test_a_client_that_goes_away_cancels_the_parts():
    parts = Parts()
    async with serving(parts=parts) as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(post("/parts", b"{}"))
        await asyncio.wait_for(reader.readuntil(b"one\r\n"), 10)
        writer.close()
        await asyncio.wait_for(parts.was_cancelled.wait(), 10)


async def test_a_client_that_does_not_read_is_cut_off(monkeypatch):
    monkeypatch.setattr(admin_http, "_WRITE_S", 0.2)
    has_ended, num_parts = asyncio.Event(), 0

    async def endless() -> AsyncGenerator[bytes, None]:
        nonlocal num_parts
        try:
            while True:
                num_parts += 1
                yield bytes(1 << 20)
        finally:
            has_ended.set()

    async def page(body: bytes) -> Page:
        return Page(endless())

    listener = AdminHTTP("127.0.0.1:0", {}, {"/endless": page})
    address = await listener.start()
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(post("/endless", b"{}"))
    await asyncio.wait_for(has_ended.wait(), 10)
    # What the server still had to send is dropped, so that the connection ends at once.
    assert len(await asyncio.wait_for(reader.read(), 10)) < num_parts << 20
    writer.close()
    await listener.stop(0)


async def test_a_page_without_an_end_is_not_read_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(admin_http, "_MAX_PAGE_BYTES", 1 << 20, raising=False)

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with suppress(ConnectionError):
            while True:
                writer.write(bytes(1 << 16))
                await writer.drain()

    server = await asyncio.start_server(endless, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    with pytest.raises(ConnectionError, match="more than 1048576 bytes"):
        await read_page(f"{host}:{port}", "/echo", limit_s=2)
    server.close()


async def test_the_end_cancels_parts():
    parts = Parts()
    async with serving(parts=parts) as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(post("/parts", b"{}"))
        await asyncio.wait_for(reader.readuntil(b"one\r\n"), 10)
    assert parts.was_cancelled.is_set()
    writer.close()


async def test_parts_that_fail_end_without_the_last_chunk():
    async with serving() as address:
        _, body = await answer_of(address, post("/parts", b'"fail"'))
    assert body == b"3\r\none\r\n"


async def test_a_taken_address_is_refused():
    async with serving() as address:
        with pytest.raises(AddressError, match=f"address {address} is already in use"):
            await AdminHTTP(address, {}).start()


# A closed server of asyncio loses a connection that has no transport yet; it has one after these turns.
@pytest.mark.parametrize("num_turns", [3, 4, 5])
async def test_the_end_closes_a_connection_that_is_just_taken(num_turns: int):
    listener = AdminHTTP("127.0.0.1:0", {})
    host, port = (await listener.start()).split(":")
    with socket.create_connection((host, int(port))) as client:
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await listener.stop(0)
        client.setblocking(False)
        with suppress(ConnectionError):
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 10) == b""


async def test_the_end_does_not_wait_for_idle_clients():
    async with serving() as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"GET /echo")
        await writer.drain()
    # Reset if it has not read the beginning of the request.
    with suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
