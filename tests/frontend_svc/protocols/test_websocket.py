"""WebSockets of a listener, with an application that sends back every text."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import Request

from frontend_svc.protocols.openai.authorization import Authorization
from frontend_svc.protocols.openai.call import OPENAI, refusal
from frontend_svc.protocols.openai.connection import ConnectionLimits
from frontend_svc.protocols.openai.listener import HTTPListener
from frontend_svc.protocols.openai.websocket import (
    WebSocket,
    WebSocketClosed,
    WebSocketLimits,
    WebSocketResponse,
    upgrade_headers,
)
from tests.frontend_svc.protocols.raw_http import connected, exchange, until
from tests.frontend_svc.protocols.test_connection import authenticator_of, key_of
from tests.frontend_svc.protocols.websocket_client import (
    CLOSE,
    PING,
    PONG,
    TEXT,
    WebSocketClient,
    frame,
    opened,
    upgrade,
)
from triptych_kit.errors import ServiceError

CONTINUATION, BINARY = 0x0, 0x2
SMALL = WebSocketLimits(max_message_bytes=1000, max_fragments=3, max_unread_bytes=4096, close_s=0.3)


class Echo:
    def __init__(self) -> None:
        self.num_open = 0
        self.reads = asyncio.Event()
        self.reads.set()
        self.closed: list[int] = []
        self.reason = ""  # of the close that the text "close" asks for

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        try:
            response: Any = WebSocketResponse(upgrade_headers(request, "echo"), self._serve)
        except ServiceError as error:
            response = refusal(error, OPENAI)
        await response(scope, receive, send)

    async def _serve(self, websocket: WebSocket) -> None:
        self.num_open += 1
        try:
            while True:
                await self.reads.wait()
                text = await websocket.receive()
                if text == "close":
                    await websocket.close(4000, self.reason)
                await websocket.send(text)
        except WebSocketClosed as closed:
            self.closed.append(closed.code)
        finally:
            self.num_open -= 1


@contextlib.asynccontextmanager
async def listening(*accounts: str, **limits: Any) -> AsyncGenerator[tuple[Echo, str, HTTPListener], None]:
    app = Echo()
    guarded = Authorization(app, authenticator_of(accounts), lambda scope: OPENAI)
    listener = HTTPListener(
        "127.0.0.1:0", guarded, limits=ConnectionLimits(**{"websocket": SMALL, "linger_s": 0.3, **limits})
    )
    address = await listener.start()
    try:
        yield app, address, listener
    finally:
        await listener.stop(0)


async def test_texts_come_back_whole_whatever_their_frames_and_pings_are_answered():
    async with listening() as (_, address, _), opened(address) as client:
        send = client.connection.send
        for text in ("", "a", "b" * 125, "c" * 126, "ä" * 400):
            await send(frame(text.encode()))
            assert await client.frame() == (TEXT, text.encode())
        await send(frame(b"one ", is_last=False) + frame(b"now", PING) + frame(b"two", CONTINUATION))
        assert await client.frame() == (PONG, b"now")
        assert await client.frame() == (TEXT, b"one two")
        for byte in frame(b"byte by byte"):
            await send(bytes((byte,)))
        assert await client.frame() == (TEXT, b"byte by byte")


async def test_a_connection_may_be_kept_alive_and_upgraded():
    async with listening() as (_, address, _), connected(address) as connection:
        await connection.send(upgrade().replace(b"connection: Upgrade", b"connection: keep-alive, Upgrade"))
        reply = await connection.reply()
        assert reply is not None
        assert reply.status == 101


async def test_a_long_text_is_sent_and_received():
    limits = WebSocketLimits()
    async with listening(websocket=limits) as (_, address, _), opened(address) as client:
        text = b"x" * limits.max_message_bytes
        await client.connection.send(frame(text))
        assert await client.frame() == (TEXT, text)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        pytest.param(frame(b"a", is_masked=False), 1002, id="not masked"),
        pytest.param(frame(b"a", reserved=0x40), 1002, id="an extension"),
        pytest.param(frame(b"a", 0x3), 1002, id="an unknown opcode"),
        pytest.param(frame(b"a", CONTINUATION), 1002, id="nothing to continue"),
        pytest.param(frame(b"a", is_last=False) + frame(b"b"), 1002, id="another message in between"),
        pytest.param(frame(b"a", PING, is_last=False), 1002, id="a ping in parts"),
        pytest.param(frame(b"a" * 126, PING), 1002, id="a long ping"),
        pytest.param(frame(b"a", BINARY), 1003, id="binary"),
        pytest.param(frame(b"\xff"), 1007, id="not UTF-8"),
        pytest.param(
            frame(b"", is_last=False) + 3 * frame(b"", CONTINUATION, is_last=False), 1008, id="parts"
        ),
        pytest.param(frame(b"a" * 1001)[:20], 1009, id="too long"),
        pytest.param(frame(b"a" * 900, is_last=False) + frame(b"a" * 101, CONTINUATION), 1009, id="in sum"),
        pytest.param(frame(b"\x03", CLOSE), 1002, id="half a code"),
        *(
            pytest.param(frame(code.to_bytes(2, "big"), CLOSE), 1002, id=f"a close with {code}")
            for code in (0, 999, 1004, 1005, 1006, 1015, 2999, 5000)
        ),
        pytest.param(
            frame((1000).to_bytes(2, "big") + b"\xff", CLOSE), 1007, id="a reason that is not UTF-8"
        ),
    ],
)
async def test_what_is_not_served_closes_the_websocket_with_its_code(sent: bytes, code: int):
    async with listening() as (app, address, _), opened(address) as client:
        await client.connection.send(sent)
        assert await client.close_code() == code
        assert await client.connection.is_closed()
        assert app.closed == [code]


@pytest.mark.parametrize(("content", "code"), [(b"\x10\xe1done", 4321), (b"\x03\xe8", 1000), (b"", 1005)])
async def test_a_close_is_answered_with_its_code(content: bytes, code: int):
    async with listening() as (app, address, _), opened(address) as client:
        await client.connection.send(frame(content, CLOSE))
        assert await client.frame() == (CLOSE, content[:2])
        assert await client.connection.is_closed()
        await until(lambda: app.closed == [code])


async def test_the_reason_of_a_close_is_cut_behind_a_whole_character():
    async with listening() as (app, address, _), opened(address) as client:
        app.reason = "ä" * 100
        await client.send(b"close")
        assert await client.frame() == (CLOSE, (4000).to_bytes(2, "big") + ("ä" * 61).encode())


async def test_the_end_of_a_connection_is_the_end_of_its_websocket():
    async with listening() as (app, address, listener):
        async with opened(address):
            await until(lambda: app.num_open == 1)
        await until(lambda: app.closed == [1006])
        await until(lambda: not listener.num_connections)


async def test_a_websocket_that_is_open_when_the_listener_stops_is_closed_as_going_away():
    async with listening() as (app, address, listener), opened(address) as client:
        await client.send(b"a")
        await client.frame()
        stopping = asyncio.ensure_future(listener.stop(5.0))
        assert await client.close_code() == 1001
        await client.connection.send(frame(b"", CLOSE))
        assert await client.connection.is_closed()
        await stopping
        assert app.closed == [1001]


async def test_what_is_sent_to_an_application_that_does_not_read_waits_in_the_client():
    async with listening(slow_reader_s=60.0) as (app, address, _), opened(address) as client:
        await client.send(b"first")
        await client.frame()
        app.reads.clear()
        await client.send(b"second")
        await client.frame()
        flood = asyncio.ensure_future(client.connection.send(frame(b"x" * 900) * 20_000))
        done, _ = await asyncio.wait((flood,), timeout=0.3)
        assert not done
        app.reads.set()
        for _ in range(20_000):
            assert await client.frame() == (TEXT, b"x" * 900)
        await flood


async def test_a_client_that_does_not_read_is_cut_off():
    async with (
        listening(slow_reader_s=0.3) as (app, address, _),
        connected(address, limit=1) as connection,
    ):
        await connection.send(upgrade())
        flood = asyncio.ensure_future(connection.send(frame(b"x" * 900) * 50_000))
        await until(lambda: app.closed == [1006])
        flood.cancel()


async def test_a_websocket_counts_among_the_connections_with_requests():
    async with listening("a", max_connections=1) as (_, address, _):
        key = f"authorization: Bearer {key_of('a')}"
        async with opened(address, "/v1/realtime", key):
            reply = await exchange(address, upgrade("/v1/realtime", key))
            assert reply is not None
            assert (reply.status, reply.error["code"]) == (503, "too_many_connections")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((), 401),
        (("authorization: Bearer wrong-0123456789abcdef",), 401),
        ((f"authorization: Bearer {key_of('a')}",), 101),
        ((f"sec-websocket-protocol: echo, openai-insecure-api-key.{key_of('a')}",), 101),
        (
            (
                "sec-websocket-protocol: echo",
                f"sec-websocket-protocol: openai-insecure-api-key.{key_of('a')}",
            ),
            101,
        ),
        (("sec-websocket-protocol: echo, openai-insecure-api-key.wrong-0123456789abcdef",), 401),
    ],
)
async def test_a_key_is_checked_before_the_upgrade(headers: tuple[str, ...], status: int):
    async with listening("a") as (_, address, _):
        reply = await exchange(address, upgrade("/v1/realtime", *headers)) if status != 101 else None
        if reply is not None:
            assert (reply.status, reply.error["type"]) == (status, "authentication_error")
            return
        async with connected(address) as connection:
            await connection.send(upgrade("/v1/realtime", *headers))
            reply = await connection.reply()
            assert reply is not None
            assert reply.status == 101
            named = "echo" if headers[0].startswith("sec-websocket") else None
            assert reply.headers.get("sec-websocket-protocol") == named
            client = WebSocketClient(connection)
            await client.send(b"a")
            assert await client.frame() == (TEXT, b"a")


@pytest.mark.parametrize(
    ("request_", "status", "field"),
    [
        (b"GET /v1/realtime HTTP/1.1\r\nhost: a\r\n\r\n", 426, "upgrade"),
        (upgrade(version="8"), 426, "sec-websocket-version"),
        (upgrade(key="short"), 400, "sec-websocket-key"),
        (upgrade().replace(b"GET", b"POST"), 426, "upgrade"),
        (upgrade().replace(b"HTTP/1.1", b"HTTP/1.0"), 426, "upgrade"),
        (upgrade().replace(b"connection: Upgrade", b"connection: keep-alive"), 426, "upgrade"),
        (upgrade("/v1/realtime", "content-length: 2") + b"{}", 426, "upgrade"),
    ],
)
async def test_a_request_that_is_none_for_a_websocket_is_refused_by_name(
    request_: bytes, status: int, field: str
):
    async with listening() as (_, address, _):
        reply = await exchange(address, request_)
        assert reply is not None
        assert (reply.status, reply.error["param"]) == (status, field)
        assert reply.headers.get("upgrade") == ("websocket" if status == 426 else None)
