"""Limits of an HTTP listener on its connections, with an application of a few lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import h11
import pytest
import uvloop

from frontend_svc.protocols.openai.authorization import Authorization
from frontend_svc.protocols.openai.call import OPENAI
from frontend_svc.protocols.openai.connection import ConnectionLimits, StrictConnection
from frontend_svc.protocols.openai.listener import HTTPListener
from tests.certificates import CertificateAuthority
from tests.frontend_svc.protocols.raw_http import RawConnection, connected, exchange, post, until
from triptych_kit.addresses import AddressError
from triptych_kit.call_turns import CallTurns
from triptych_kit.clock import FakeClock
from triptych_kit.security.authenticator import Authenticator
from triptych_kit.security.credentials import Credentials, Entry, digest_of
from triptych_kit.security.identity import Identity, Role
from triptych_kit.security.listeners import ListenerSecurity
from triptych_kit.security.tls import CertificateFiles, ListenerTLS

GET = b"GET /%s HTTP/1.1\r\nhost: a\r\n\r\n"
SHORT = ConnectionLimits(request_s=0.3, idle_s=0.3, slow_reader_s=0.3, linger_s=0.3)


class App:
    """Answers with what it knows of the request; `held` answers wait, and `endless` ones do not end."""

    def __init__(self) -> None:
        self.num_open = self.max_open = self.num_ended = 0
        self.release = asyncio.Event()
        self.begun = asyncio.Event()
        self.held = {"/held"}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        self.begun.set()
        try:
            await self._answer(scope, receive, send)
        finally:
            self.num_open -= 1
            self.num_ended += 1

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path in self.held:
            await self.release.wait()
        if path == "/waits":
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        if path == "/read":
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                if not message["more_body"]:
                    break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if path == "/endless":
            gone = asyncio.ensure_future(receive())
            while not gone.done():
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                await asyncio.sleep(0)
        seen = {"path": path, "client": scope["client"][0], "scheme": scope["scheme"]}
        seen["host"] = dict(scope["headers"]).get(b"host", b"").decode()
        seen["query"] = scope["query_string"].decode()
        await send({"type": "http.response.body", "body": json.dumps(seen).encode()})


def key_of(name: str) -> str:
    return f"key-of-{name}-0123456789"


def held_by(name: str, path: str = "held") -> bytes:
    return (GET % path.encode())[:-2] + f"authorization: Bearer {key_of(name)}\r\n\r\n".encode()


def authenticator_of(accounts: Sequence[str]) -> Authenticator:
    entries = [
        Entry(Identity(name, frozenset((Role.CLIENT,))), digest_of(key_of(name), name)) for name in accounts
    ]
    return Authenticator(Credentials(None, entries) if entries else None, verifies_certificates=False)


@contextlib.asynccontextmanager
async def listening(accounts: Sequence[str] = (), **options: Any) -> AsyncGenerator[tuple[App, str], None]:
    app = App()
    guarded = Authorization(app, authenticator_of(accounts), lambda scope: OPENAI)
    listener = HTTPListener("127.0.0.1:0", guarded, **{"always_served": ("/health",), **options})
    address = await listener.start()
    try:
        yield app, address
    finally:
        app.release.set()
        await listener.stop(0)


async def drip(connection: RawConnection, content: bytes, interval_s: float = 0.05) -> None:
    with contextlib.suppress(ConnectionError):
        while not connection.reader.at_eof():
            connection.writer.write(content)
            await asyncio.sleep(interval_s)


async def test_a_listener_without_enough_descriptors_is_refused_and_keeps_none():
    listener = HTTPListener("127.0.0.1:0", App())
    with socket.socket() as first, socket.socket() as second:
        lowest = first.fileno(), second.fileno()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # There is one for the listening socket, and none for a duplicate.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(lowest), limits[1]))
    try:
        with pytest.raises(
            AddressError, match=r"address 127\.0\.0\.1:0 cannot be listened on: Too many open"
        ):
            await listener.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with socket.socket() as first, socket.socket() as second:
        assert (first.fileno(), second.fileno()) == lowest


async def test_a_handshake_that_does_not_end_ends_its_connection(tmp_path: Path):
    files = CertificateAuthority(tmp_path).issue("server")
    tls = ListenerTLS(CertificateFiles(files.certificate, files.key))
    security = ListenerSecurity(Authenticator(None, verifies_certificates=False), tls)
    async with listening(limits=ConnectionLimits(handshake_s=0.3), security=security) as (_, address):
        for begin in (b"", b"\x16\x03\x01"):
            async with connected(address) as connection:
                connection.writer.write(begin)
                async with asyncio.timeout(5):
                    with contextlib.suppress(ConnectionError):
                        assert not await connection.reader.read()


async def test_a_request_that_does_not_arrive_ends_its_connection():
    slow = [
        (b"", b""),
        (b"GET /he", b""),
        (b"GET /a HTTP/1.1\r\n", b"x: y\r\n"),
        (post(b"", "content-length: 1000000", path="/read"), b"a"),
        (post(b"", "transfer-encoding: chunked", path="/read"), b"1\r\na\r\n"),
    ]

    async def is_cut_off(begin: bytes, more: bytes) -> bool:
        async with connected(address) as connection:
            await connection.send(begin)
            dripping = asyncio.ensure_future(drip(connection, more))
            is_closed = await connection.is_closed()
            dripping.cancel()
            return is_closed

    async with listening(limits=SHORT) as (app, address):
        assert await asyncio.gather(*(is_cut_off(*one) for one in slow)) == [True] * len(slow)
        await until(lambda: not app.num_open)


async def test_a_connection_without_a_request_is_closed_and_one_with_a_request_is_not():
    async with (
        listening(limits=SHORT) as (app, address),
        connected(address) as idle,
        connected(address) as busy,
    ):
        for connection, path in ((idle, b"a"), (busy, b"held")):
            await connection.send(GET % path)
        assert (await idle.reply()).status == 200
        assert await idle.is_closed()
        await asyncio.sleep(0.5)
        app.release.set()
        assert (await busy.reply()).status == 200


async def test_a_body_that_goes_on_behind_its_answer_ends_its_connection():
    async with listening(limits=SHORT) as (_, address), connected(address) as connection:
        await connection.send(post(b"", "content-length: 1000000", path="/a"))
        dripping = asyncio.ensure_future(drip(connection, b"a"))
        assert (await connection.reply()).status == 200
        assert await connection.is_closed()
        dripping.cancel()


async def test_a_client_that_does_not_read_is_cut_off():
    async with listening(limits=SHORT) as (app, address):
        host, _, port = address.rpartition(":")
        with contextlib.closing(socket.socket()) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, GET % b"endless")
            await app.begun.wait()
            await until(lambda: not app.num_open)


async def test_one_connection_too_many_closes_the_one_that_waits_longest_and_is_counted():
    security = ListenerSecurity(Authenticator(None, verifies_certificates=False))
    async with (
        contextlib.AsyncExitStack() as stack,
        listening(limits=ConnectionLimits(max_connections=2), security=security) as (_, address),
        connected(address) as first,
        connected(address) as second,
    ):
        await asyncio.sleep(0.2)
        third = await stack.enter_async_context(connected(address))
        assert await first.is_closed()
        for connection in (second, third):
            await connection.send(GET % b"a")
            assert (await connection.reply()).status == 200
    assert security.authenticator.refusals.closed_by_reason == {"TOO_MANY_CONNECTIONS": 1}


async def hold(stack: contextlib.AsyncExitStack, app: App, address: str, *asks: bytes) -> list[RawConnection]:
    """Connections whose requests have begun and are not answered."""
    num_open = app.num_open
    connections = []
    for ask in asks:
        # One that waits for its request may be closed for the next.
        connections.append(await stack.enter_async_context(connected(address)))
        await connections[-1].send(ask)
    await until(lambda: app.num_open == num_open + len(asks))
    return connections


async def test_an_account_that_has_all_connections_leaves_others_their_shares():
    accounts = ("a", "b", "c")
    async with (
        listening(accounts, limits=ConnectionLimits(max_connections=4)) as (app, address),
        contextlib.AsyncExitStack() as stack,
    ):
        held = await hold(stack, app, address, *[held_by("a")] * 4)
        refused = await exchange(address, held_by("a", "a"))
        held += await hold(stack, app, address, *[held_by("b")] * 2)
        beyond = await exchange(address, held_by("b", "a"))
        served = await exchange(address, held_by("c", "a"))
        app.release.set()
        assert [(await connection.reply()).status for connection in held] == [200] * 6
        await held[0].send(held_by("a", "a"))
        assert (await held[0].reply()).status == 200
    assert (refused.status, refused.error["code"]) == (503, "too_many_connections")
    assert refused.error["message"] == "4 connections have requests, the limit is 4"
    assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
    assert beyond.error["message"] == (
        "6 connections have requests, the limit is 4 (the account 'key b' has 2, its share is 2)"
    )
    assert served.status == 200


async def test_slow_bodies_of_one_account_keep_no_other_from_being_served():
    body = post(b"", "content-length: 1000", f"authorization: Bearer {key_of('a')}", path="/read")
    async with (
        listening(("a", "b"), limits=ConnectionLimits(max_connections=8)) as (app, address),
        contextlib.AsyncExitStack() as stack,
    ):
        await hold(stack, app, address, *[body] * 8)
        for _ in range(4):
            late = await stack.enter_async_context(connected(address))
            await late.send(body)
        assert (await late.reply()).status == 503
        assert (await exchange(address, held_by("b", "a"))).status == 200


async def test_without_credentials_connections_are_shared_by_address():
    forwarded = b"GET /%s HTTP/1.1\r\nhost: a\r\nx-forwarded-for: %s\r\n\r\n"
    limits, proxies = ConnectionLimits(max_connections=2), ["127.0.0.1"]
    async with (
        listening(limits=limits, forwarded_allow_ips=proxies) as (app, address),
        contextlib.AsyncExitStack() as stack,
    ):
        await hold(stack, app, address, *[forwarded % (b"held", b"6.6.6.6")] * 2)
        refused = await exchange(address, forwarded % (b"a", b"6.6.6.6"))
        served = await exchange(address, forwarded % (b"a", b"9.9.9.9"))
    assert (refused.status, served.status) == (503, 200)


async def test_new_connections_of_an_address_with_most_of_them_close_its_own():
    limits = ConnectionLimits(max_connections=4)
    async with listening(limits=limits) as (_, address), contextlib.AsyncExitStack() as stack:
        other = await stack.enter_async_context(connected(address, source="127.0.0.2"))
        many = [await stack.enter_async_context(connected(address)) for _ in range(3)]
        await asyncio.sleep(0.2)
        await stack.enter_async_context(connected(address))
        assert await many[0].is_closed()
        await other.send(GET % b"a")
        assert (await other.reply()).status == 200


async def test_beyond_all_shares_the_probes_alone_are_served():
    accounts = ("a", "b", "c", "d")
    async with (
        listening(accounts, limits=ConnectionLimits(max_connections=2)) as (app, address),
        contextlib.AsyncExitStack() as stack,
    ):
        held = await hold(stack, app, address, *map(held_by, "aabc"))
        refused = await exchange(address, held_by("d", "a"))
        health = await exchange(address, GET % b"health")
        more = [await stack.enter_async_context(connected(address)) for _ in range(200)]
        late = await exchange(address, GET % b"health")
        app.release.set()
        assert [(await connection.reply()).status for connection in held] == [200] * 4
        del more
    assert (refused.status, refused.error["code"]) == (503, "too_many_connections")
    assert "there are 5 connections, the limit is 4" in refused.error["message"]
    assert refused.headers["retry-after"] == "1"
    assert (health.status, health.headers["connection"]) == (200, "close")
    assert late.status == 200


async def test_beyond_what_is_reserved_for_probes_a_connection_is_refused_at_once():
    limits = ConnectionLimits(max_connections=1)
    async with (
        listening(("a", "b"), limits=limits) as (app, address),
        contextlib.AsyncExitStack() as stack,
    ):
        app.held |= {"/health"}
        await hold(stack, app, address, *map(held_by, "ab"), *[GET % b"health"] * 64)
        refused = await exchange(address, b"")
    assert (refused.status, refused.error["code"]) == (503, "too_many_connections")


async def test_a_request_does_not_wait_for_a_hundred_of_another_account():
    begun: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])

    guarded = Authorization(
        app, authenticator_of(("a", "b")), lambda scope: OPENAI, turns=CallTurns(FakeClock())
    )

    def call(name: str) -> asyncio.Task[None]:
        headers = [(b"authorization", f"Bearer {key_of(name)}".encode())]
        scope = {"type": "http", "method": "POST", "path": name, "headers": headers}
        return asyncio.ensure_future(guarded(scope, None, None))  # type: ignore[arg-type]  # not used

    await call("b")
    crowd = [call("a") for _ in range(100)]
    await asyncio.sleep(0)
    await call("b")
    assert begun.count("a") < 10
    await asyncio.gather(*crowd)
    assert begun.count("a") == 100


async def test_a_websocket_without_a_key_gets_401_before_the_application():
    begun: list[str] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])

    async def send(message: Any) -> None:
        sent.append(message)

    guarded = Authorization(app, authenticator_of(("a",)), lambda scope: OPENAI)
    await guarded({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send)  # type: ignore[arg-type]  # not used
    assert (begun, sent[0]["type"], sent[0]["status"]) == ([], "websocket.http.response.start", 401)
    headers = [(b"authorization", f"Bearer {key_of('a')}".encode())]
    await guarded({"type": "websocket", "path": "/v1/realtime", "headers": headers}, None, send)  # type: ignore[arg-type]  # not used
    assert begun == ["/v1/realtime"]


@pytest.mark.parametrize("more", [b"", b"\r\n", GET % b"a"])
async def test_the_end_of_a_client_is_noticed_also_behind_the_beginning_of_its_next_request(more):
    async with listening() as (app, address):
        async with connected(address) as connection:
            await connection.send(GET % b"waits")
            await app.begun.wait()
            await connection.send(more)
            await asyncio.sleep(0.05)
        await until(lambda: app.num_ended == 1)


def test_connections_that_came_together_are_accepted_several_at_a_time():
    async def iterations() -> int:
        listener = HTTPListener("127.0.0.1:0", App())
        host, _, port = (await listener.start()).rpartition(":")
        with contextlib.ExitStack() as stack:
            # The loop, which does not run meanwhile, finds all of them.
            for _ in range(64):
                stack.enter_context(socket.create_connection((host, int(port))))
            num_iterations = 0
            while listener.num_connections < 64:
                await asyncio.sleep(0)
                num_iterations += 1
        await listener.stop(0)
        return num_iterations

    # As the frontend runs: one at a time, with iterations of 10 ms, is 0.6 s.
    assert uvloop.run(iterations()) <= 64 / 4 + 8


async def test_requests_of_a_connection_are_answered_one_after_the_other():
    async with listening() as (app, address), connected(address) as connection:
        await connection.send(b"".join(GET % str(number).encode() for number in range(500)))
        paths = [json.loads((await connection.reply()).content)["path"] for _ in range(500)]
    assert paths == [f"/{number}" for number in range(500)]
    assert app.max_open == 1


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("http://b.example:80/v1/models?a=b", "/v1/models", "a=b"),
        ("HTTPS://b.example:80", "/", ""),
        ("http://b.example:80?a=//c", "/", "a=//c"),
        ("/http://b.example:80/v1", "/http://b.example:80/v1", ""),
    ],
)
async def test_a_target_may_have_the_absolute_form(target, path, query):
    async with listening() as (_, address):
        reply = await exchange(address, f"GET {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    seen = json.loads(reply.content)
    host = "a" if target.startswith("/") else "b.example:80"
    assert (seen["path"], seen["query"], seen["host"]) == (path, query, host)


async def test_headers_of_a_proxy_count_where_it_is_named():
    forwarded = (
        b"GET /a HTTP/1.1\r\nhost: a\r\nx-forwarded-for: 6.6.6.6, 9.9.9.9\r\nx-forwarded-proto: https\r\n\r\n"
    )
    found = []
    for proxies in ([], ["10.0.0.0/8"], ["127.0.0.1"], ["127.0.0.0/8", "9.9.9.9"]):
        async with listening(forwarded_allow_ips=proxies) as (_, address):
            seen = json.loads((await exchange(address, forwarded)).content)
            found.append((seen["client"], seen["scheme"]))
    assert found == [("127.0.0.1", "http")] * 2 + [("9.9.9.9", "https"), ("6.6.6.6", "https")]


async def test_what_follows_an_early_answer_and_is_no_chunk_ends_the_connection():
    async with listening() as (_, address), connected(address) as connection:
        await connection.send(post(b"", "transfer-encoding: chunked", path="/a"))
        assert (await connection.reply()).status == 200
        await connection.send(b"zz\r\n")
        assert await connection.is_closed()
        assert (await exchange(address, GET % b"a")).status == 200


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("headers", [[], [(b"content-length", b"3")]])
def test_an_answer_is_framed_as_by_h11(version: str, headers: list[tuple[bytes, bytes]]) -> None:
    request = f"GET / HTTP/{version}\r\nhost: a\r\n\r\n".encode()
    events = [
        h11.Response(status_code=200, headers=headers, reason=b"OK"),
        *(h11.Data(data=data) for data in (b"a", b"", b"bc")),
        h11.EndOfMessage(),
    ]
    connections = [StrictConnection(), h11.Connection(h11.SERVER)]
    for connection in connections:
        connection.receive_data(request)
        connection.next_event()
    for event in events:
        ours, theirs = (connection.send(event) for connection in connections)
        assert ours == theirs
    assert connections[0].our_state is connections[1].our_state
