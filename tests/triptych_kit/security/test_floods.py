"""What peers without a key send takes a limited memory, and others are served."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from tests.acceptance.rig.flood_peers import HTTP2, PREFACE, SETTINGS, Peers, frame, resets
from triptych_kit import limits
from triptych_kit.addresses import split_address
from triptych_kit.channel import ChannelCredentials, open_channel
from triptych_kit.security import strangers
from triptych_kit.security.authenticator import Authenticator
from triptych_kit.security.credentials import Credentials
from triptych_kit.security.listeners import ListenerSecurity
from triptych_kit.security.strangers import drop_packets
from triptych_kit.server import ADMIN, INTERNAL, PUBLIC, LimitProfile, Server

_KEY = "triptych-0123456789abcdef"
_STRANGER, _NEIGHBOUR = "127.0.0.2", "127.0.0.1"
_LIMIT_S = 30.0


def test_memory_is_collected_during_refused_calls_and_once_after_connections():
    releases = strangers.Releases()
    assert not releases.is_due(31, 0, 0.0)
    assert [now for now in range(1, 40) if releases.is_due(40, 0, float(now))] == [1, 4, 7, 10, 13, 16, 19]
    # Of HTTP alone, many each second up to 50.
    assert [now for now in range(40, 60) if releases.is_due(40, 50 * min(now, 50), float(now))] == [53]


def test_connections_that_never_stop_put_off_a_collection_for_a_minute_at_most():
    releases = strangers.Releases()
    # One each second: there are enough of them after 32, 124 and 216 s.
    assert [now for now in range(300) if releases.is_due(0, now, float(now))] == [92, 184, 276]


@pytest.mark.parametrize("sent", [b"", PREFACE[:8], PREFACE])
async def test_a_connection_that_does_not_begin_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "_HANDSHAKE_MS", 300)
    server = Server(listen="127.0.0.1:0", registrations=[], profile=ADMIN, service="x")
    reader, writer = await asyncio.open_connection(*split_address(await server.start()))
    writer.write(sent)
    try:
        async with asyncio.timeout(30):
            while await reader.read(4096):
                pass
    finally:
        writer.close()
        await server.stop(0)


def _rss_mb() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) // 1024


async def test_resets_of_a_connection_take_a_limited_memory():
    server = Server(listen="127.0.0.1:0", registrations=[], profile=ADMIN, service="x")
    address = await server.start()
    before_mb = _rss_mb()
    _, writer = await asyncio.open_connection(*split_address(address))
    writer.write(PREFACE + frame(SETTINGS, 0, 0))
    try:
        for first in range(1, 80_001, 200):
            writer.write(resets(first, 100))
            await writer.drain()
        await _check(address)
    finally:
        writer.close()
        await server.stop(0)
    assert _rss_mb() - before_mb < 100


async def test_metadata_of_calls_is_not_kept():
    """As an engine collects garbage: seldom."""
    server = Server(listen="127.0.0.1:0", registrations=[], profile=INTERNAL, service="x")
    reader, writer = await asyncio.open_connection(*split_address(await server.start()))
    gc.disable()
    try:
        # Acknowledges no settings, so that its limit is 16 MB.
        bombs = HTTP2["HPACK bombs"].chunks(1)
        writer.write(next(bombs))
        for _ in range(3):
            writer.write(next(bombs))
            await asyncio.wait_for(reader.readuntil(b"exceeds hard limit"), _LIMIT_S)
        await _until(lambda: not any(type(each) is tuple and len(each) > 4000 for each in gc.get_objects()))
    finally:
        gc.enable()
        writer.close()
        await server.stop(0)


@pytest.mark.parametrize("name", ["rapid reset", "SETTINGS, unread", "PING", "large headers"])
async def test_a_stranger_that_floods_is_closed_and_its_address_dropped(name: str, tmp_path: Path):
    async with _listener(tmp_path) as (address, security):
        async with _flooding(address, name, _STRANGER):
            await _until(lambda: security.strangers.num_dropped == 1)
            await _until(lambda: security.authenticator.refusals.closed_by_reason["TOO_MANY_BYTES"] > 0)
        with pytest.raises(TimeoutError):
            await _connect(address, _STRANGER)
        await _check(address)


async def test_a_connection_is_looked_at_when_it_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(strangers, "_WHOLE_LOOK_S", 1000.0)
    async with _listener(tmp_path) as (address, security):
        num_dropped = 0

        def has_dropped() -> bool:
            return security.strangers.num_dropped == num_dropped

        for num_dropped in range(1, 11):
            async with _flooding(address, "rapid reset", f"127.0.0.{1 + num_dropped}"):
                await _until(has_dropped)


class _Cycle:
    """As an error that ended a call is: its frames refer to the call."""

    def __init__(self) -> None:
        self.itself = self


async def test_what_calls_leave_is_freed_after_a_flood(tmp_path: Path):
    async with _listener(tmp_path) as (address, _):
        left = weakref.ref(_Cycle())
        gc.disable()
        try:
            async with _flooding(address, "rapid reset", _STRANGER, connections=40):
                await _until(lambda: left() is None)
        finally:
            gc.enable()


async def test_connections_that_follow_each_other_are_added_up(tmp_path: Path):
    async with _listener(tmp_path) as (address, security):
        async with _flooding(address, "rapid reset, short", _STRANGER, connections=1):
            await _until(lambda: security.strangers.num_dropped == 1)
        await _check(address)


async def test_what_takes_much_memory_is_closed_after_fewer_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(strangers, "_MAX_BYTES", float("inf"))
    monkeypatch.setattr(strangers, "_MAX_BYTES_OF_NETWORK", float("inf"))
    async with _listener(tmp_path, PUBLIC) as (address, security):
        async with _flooding(address, "rapid reset, indexed", _STRANGER):
            await _until(lambda: security.strangers.num_dropped == 1)
        await _check(address)


async def test_an_address_has_a_limited_number_of_connections_without_a_key(tmp_path: Path):
    async with _listener(tmp_path) as (address, security):
        async with _flooding(address, "5,000 connections", _STRANGER, connections=400):
            await _until(lambda: security.strangers.num_dropped == 1)
            await _until(lambda: security.authenticator.refusals.closed_by_reason["TOO_MANY_CONNECTIONS"] > 0)
        await _check(address)


async def test_new_connections_have_time_to_show_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As those of many clients behind one address after a restart."""
    monkeypatch.setattr(strangers, "_MAX_OF_NETWORK", 8)
    monkeypatch.setattr(strangers, "_SHOWS_KEY_S", float("inf"))
    async with _listener(tmp_path) as (address, security), contextlib.AsyncExitStack() as stack:

        async def open_connections(number: int) -> None:
            for _ in range(number):
                reader, writer = await asyncio.open_connection(
                    *split_address(address), local_addr=(_STRANGER, 0)
                )
                stack.callback(writer.close)
                writer.write(PREFACE + frame(SETTINGS, 0, 0))
                await reader.readexactly(9)

        closed = security.authenticator.refusals.closed_by_reason
        await open_connections(32)
        assert not closed
        monkeypatch.setattr(strangers, "_SHOWS_KEY_S", 0.0)
        await _until(lambda: closed["TOO_MANY_CONNECTIONS"] == 32)


async def test_beyond_the_limit_of_all_the_oldest_are_closed_and_no_address_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(strangers, "_MAX_CONNECTIONS", 4)
    async with _listener(tmp_path) as (address, security), contextlib.AsyncExitStack() as stack:
        readers = []
        for last in range(2, 8):
            source = (f"127.0.0.{last}", 0)
            reader, writer = await asyncio.open_connection(*split_address(address), local_addr=source)
            stack.callback(writer.close)
            writer.write(PREFACE + frame(SETTINGS, 0, 0))
            await reader.readexactly(9)
            readers.append(reader)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(readers[0].read(), _LIMIT_S)
        await _until(lambda: security.authenticator.refusals.closed_by_reason["TOO_MANY_CONNECTIONS"] == 2)
        assert security.strangers.num_dropped == 0
        await _check(address)


async def test_strangers_at_the_address_of_a_key_are_closed_and_it_is_not_dropped(tmp_path: Path):
    async with _listener(tmp_path) as (address, security):
        credentials = ChannelCredentials(api_key=_KEY)
        async with open_channel(address, credentials=credentials) as channel:
            await _call_with_key(channel)
            async with _flooding(address, "SETTINGS", _NEIGHBOUR):
                closed = security.authenticator.refusals.closed_by_reason
                await _until(lambda: closed["TOO_MANY_BYTES"] > 4)
            assert security.strangers.num_dropped == 0
            # Its connection is the same: another one would take a while.
            assert channel.get_state() is grpc.ChannelConnectivity.READY
            await _call_with_key(channel)


def test_the_kernel_drops_what_comes_from_some_networks():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        drop_packets(listener.fileno(), ["127.0.0.2/32", "2001:db8::/64", "127.0.0.4/32"])
        for last, passes in ((1, True), (2, False), (3, True), (4, False)):
            with socket.socket() as client:
                client.settimeout(0.2)
                client.bind((f"127.0.0.{last}", 0))
                assert (client.connect_ex(listener.getsockname()) == 0) is passes


@contextlib.asynccontextmanager
async def _listener(
    folder: Path, profile: LimitProfile = ADMIN
) -> AsyncIterator[tuple[str, ListenerSecurity]]:
    keys = folder / "keys"
    keys.write_text(f"- {{name: a, role: client, key: {_KEY}}}")
    keys.chmod(0o600)
    security = ListenerSecurity(Authenticator(Credentials(str(keys)), verifies_certificates=False))
    server = Server(listen="127.0.0.1:0", registrations=[], profile=profile, service="x", security=security)
    try:
        yield await server.start(), security
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def _flooding(address: str, name: str, source: str, connections: int = 4) -> AsyncIterator[None]:
    flood = dataclasses.replace(HTTP2[name], connections=connections)
    peers = asyncio.ensure_future(
        Peers(flood, address, source, has_tls=False, speaks_http2=True).run(_LIMIT_S)
    )
    try:
        yield
    finally:
        peers.cancel()
        await asyncio.wait([peers])


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(_LIMIT_S):
        # The thread that looks at connections has no event for a test.
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _connect(address: str, source: str) -> None:
    async with asyncio.timeout(0.2):
        _, writer = await asyncio.open_connection(*split_address(address), local_addr=(source, 0))
    writer.close()


async def _check(address: str) -> None:
    async with open_channel(address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = await check(health_pb2.HealthCheckRequest(), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def _call_with_key(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await channel.unary_unary("/x.X/Y", lambda _: b"", None)(None, timeout=30)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
