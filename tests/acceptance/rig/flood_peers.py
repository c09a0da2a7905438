"""Peers without a key that flood a listener over raw sockets, and a process of them.

Answers `{"flood": NAME, "address": ADDRESS, "source": IP, "http2": BOOL, "has_tls": BOOL, "seconds": S}` with
what the listener did: how often it accepted and closed a connection, and how often it sent which frame or
status. The process has the lowest priority, so that it takes what the stack leaves of the cores.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.rig.lines import Line, answer_lines, give_way, send_line
from triptych_kit.addresses import split_address

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_NAMES = {HEADERS: "HEADERS", RESET: "RST_STREAM", GOAWAY: "GOAWAY"}
_ERRORS = {0: "NO_ERROR", 1: "PROTOCOL_ERROR", 2: "INTERNAL_ERROR", 7: "REFUSED_STREAM", 8: "CANCEL",
           11: "ENHANCE_YOUR_CALM"}  # fmt: skip
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_CANCEL = struct.pack(">I", 8)
_INITIAL_WINDOW = 65_535
_FRAME_BYTES = 16_384
_MESSAGE_BYTES = 16 * 2**20
CHECK = "/grpc.health.v1.Health/Check"
_GENERATE = "/triptych.api.v1.InferenceService/Generate"
_FIRST_PLACE = 62  # of HPACK's table, that of the newest entry
_BATCH = 100  # frames of a write
_SHORT_BATCHES = 70  # of a connection that keeps below the limit of one
_CONNECT_S = 20.0
_RETRY_S = 0.1
_AT_ONCE = 128  # connections that are being opened
_END_S = 5.0
_CLIENT_HELLO_BYTES = 100  # of one, about a third


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header(name: str, value: str, *, is_kept: bool = False) -> bytes:
    """A header of less than 127 bytes that is in no table, and is put into HPACK's if it is kept."""
    first = b"\x40" if is_kept else b"\0"
    return first + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def call_headers(path: str = CHECK, *, are_kept: bool = False) -> bytes:
    """The headers of a gRPC call without a key."""
    return b"".join(header(name, value, is_kept=are_kept) for name, value in _call_pairs(path).items())


def _call_pairs(path: str) -> dict[str, str]:
    pairs = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost"}
    return pairs | {"content-type": "application/grpc", "te": "trailers"}


def resets(first: int, count: int, path: str = CHECK) -> bytes:
    """Calls that are reset at once."""
    block = call_headers(path)
    return b"".join(
        frame(HEADERS, _END_HEADERS, stream, block) + frame(RESET, 0, stream, _CANCEL)
        for stream in range(first, first + 2 * count, 2)
    )


def indexed_resets(first: int, count: int, path: str = CHECK) -> bytes:
    """The same with 28 bytes for each: the first call of a connection puts the headers into HPACK's table."""
    whole = call_headers(path, are_kept=True)
    places = range(_FIRST_PLACE, _FIRST_PLACE + len(_call_pairs(path)))
    indexed = bytes(0x80 | place for place in reversed(places))
    return b"".join(
        frame(HEADERS, _END_HEADERS, stream, whole if stream == 1 else indexed)
        + frame(RESET, 0, stream, _CANCEL)
        for stream in range(first, first + 2 * count, 2)
    )


def hpack_integer(number: int, prefix_bits: int, pattern: int) -> bytes:
    """A number as HPACK writes it (RFC 7541, 5.1), behind the bits of `pattern`."""
    limit = (1 << prefix_bits) - 1
    if number < limit:
        return bytes([pattern | number])
    content, number = bytearray([pattern | limit]), number - limit
    while number >= 128:
        content.append(number & 127 | 128)
        number >>= 7
    return bytes([*content, number])


def large_headers(size: int) -> bytes:
    """A header of `size` bytes that is in no table."""
    return b"\0\x05x-big" + hpack_integer(size, 7, 0) + b"a" * size


def bomb(count: int, size: int = 3900) -> bytes:
    """A header of `size` bytes that is put into the table of HPACK, then named `count` times by one byte."""
    return b"\x40\x05x-big" + hpack_integer(size, 7, 0) + b"a" * size + b"\xbe" * count


Chunks = Iterator[bytes]


@dataclass(frozen=True, slots=True)
class Flood:
    """What each of the connections sends; after the last chunk it waits for the listener to close it.

    reads: whether a peer reads what it is answered.
    """

    connections: int
    chunks: Callable[[int], Chunks]  # of the connection with that number
    pause_s: float = 0.0  # after each chunk
    reads: bool = True
    does_handshake: bool = True  # of TLS
    follows_window: bool = False
    resets: bool = False  # closes each connection with a reset after the last chunk


def _begun() -> bytes:
    return PREFACE + frame(SETTINGS, 0, 0)


def _path(index: int) -> str:
    return CHECK if index % 2 else _GENERATE


def _rapid_resets(index: int) -> Chunks:
    yield _begun()
    for first in range(1, 2**31 - 2 * _BATCH, 2 * _BATCH):
        yield resets(first, _BATCH, _path(index))


def _indexed_resets(index: int) -> Chunks:
    yield _begun()
    for first in range(1, 2**31 - 2 * _BATCH, 2 * _BATCH):
        yield indexed_resets(first, _BATCH, _path(index))


def _short_resets(index: int) -> Chunks:
    return itertools.islice(_indexed_resets(index), _SHORT_BATCHES)


def _repeated(content: bytes) -> Callable[[int], Chunks]:
    def chunks(index: int) -> Chunks:
        yield _begun()
        while True:
            yield content

    return chunks


def _continuations(index: int) -> Chunks:
    yield _begun() + frame(HEADERS, 0, 1, call_headers(_path(index)))
    part = frame(CONTINUATION, 0, 1, large_headers(4000))
    while True:
        yield part * 16


def _calls_with(block: bytes) -> Callable[[int], Chunks]:
    def chunks(index: int) -> Chunks:
        yield _begun()
        whole = call_headers(_path(index)) + block
        parts = [whole[start : start + _FRAME_BYTES] for start in range(0, len(whole), _FRAME_BYTES)]
        for stream in range(1, 2**31, 2):
            kinds = [HEADERS, *[CONTINUATION] * (len(parts) - 1)]
            flags = [*[0] * (len(parts) - 1), _END_HEADERS]
            yield b"".join(
                frame(kind, flag, stream, part) for kind, flag, part in zip(kinds, flags, parts, strict=True)
            )

    return chunks


def _messages(index: int) -> Chunks:
    yield _begun()
    head = b"\0" + struct.pack(">I", _MESSAGE_BYTES)
    for stream in range(1, 2**31, 2):
        yield frame(HEADERS, _END_HEADERS, stream, call_headers(_GENERATE)) + frame(DATA, 0, stream, head)
        for _ in range(_MESSAGE_BYTES // _FRAME_BYTES):
            yield frame(DATA, 0, stream, b"\x05" * _FRAME_BYTES)


def _idle(index: int) -> Chunks:
    # Of each eight one watches the health, which needs no key and has no end.
    watch = b""
    if index % 8 == 0:
        watch = frame(HEADERS, _END_HEADERS, 1, call_headers("/grpc.health.v1.Health/Watch"))
        watch += frame(DATA, _END_STREAM, 1, b"\0" * 5)
    yield _begun() + watch


def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = _tls().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def _half_handshakes(index: int) -> Chunks:
    hello = _client_hello()
    yield (b"", PREFACE[:8], hello[:_CLIENT_HELLO_BYTES], hello)[index % 4]


def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


_SETTINGS_FRAME = frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535))
_PING_FRAME = frame(PING, 0, 0, b"\0" * 8)
HTTP2 = {
    "rapid reset": Flood(32, _rapid_resets),
    "rapid reset, indexed": Flood(32, _indexed_resets),
    "rapid reset, short": Flood(2, _short_resets, resets=True),
    "SETTINGS": Flood(32, _repeated(_SETTINGS_FRAME * _BATCH)),
    "SETTINGS, unread": Flood(32, _repeated(_SETTINGS_FRAME * _BATCH), reads=False),
    "PING": Flood(32, _repeated(_PING_FRAME * _BATCH)),
    "PING, unread": Flood(32, _repeated(_PING_FRAME * _BATCH), reads=False),
    "CONTINUATION": Flood(32, _continuations),
    "large headers": Flood(32, _calls_with(large_headers(60_000))),
    "HPACK bombs": Flood(32, _calls_with(bomb(12_000))),
    "16 MB messages": Flood(256, _messages, follows_window=True),
    "half handshakes": Flood(1000, _half_handshakes, does_handshake=False),
    "5,000 connections": Flood(5000, _idle),
}


def _http_head(method: str, path: str, *headers: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: localhost", *headers, "", ""]).encode()


def _http_resets(index: int) -> Chunks:
    yield _http_head("GET", "/v1/models")


def _http_headers(index: int) -> Chunks:
    yield b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
    while True:
        yield b"x-big: " + b"a" * 4000 + b"\r\n"


def _http_messages(index: int) -> Chunks:
    yield _http_head("POST", "/v1/completions", f"content-length: {_MESSAGE_BYTES}")
    for _ in range(_MESSAGE_BYTES // _FRAME_BYTES):
        yield b" " * _FRAME_BYTES


def _http_half(index: int) -> Chunks:
    hello = _client_hello()
    yield (b"", b"GET /v1/models HT", hello[:_CLIENT_HELLO_BYTES], hello)[index % 4]


def _http_idle(index: int) -> Chunks:
    yield _http_head("GET", "/health")


HTTP1 = {
    "rapid reset": Flood(32, _http_resets, resets=True),
    "large headers": Flood(32, _http_headers),
    "16 MB messages": Flood(256, _http_messages),
    "half handshakes": Flood(1000, _http_half, does_handshake=False),
    "5,000 connections": Flood(5000, _http_idle),
}


class _Peer(asyncio.Protocol):
    """One connection: counts what the listener sends, and knows what it may be sent."""

    def __init__(self, counts: Counter[str], *, speaks_http2: bool, acknowledges: bool) -> None:
        self.is_closed = False
        self._acknowledges = acknowledges
        self._transport: asyncio.WriteTransport | None = None
        self._counts, self._speaks_http2 = counts, speaks_http2
        self._received = bytearray()
        self._windows: dict[int, int] = {}  # by stream; 0 is the connection
        self._ended: set[int] = set()
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._changed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        self._may_write.set()
        self._changed.set()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    async def writable(self) -> None:
        await self._may_write.wait()

    async def closed(self) -> None:
        while not self.is_closed:
            await self._change()

    async def takes(self, chunk: bytes) -> bool:
        """Wait until the windows have room for a frame of DATA; False if its stream has ended."""
        if chunk[3] != DATA:
            return True
        stream, size = int.from_bytes(chunk[5:9], "big"), len(chunk) - 9
        while min(self._window(0), self._window(stream)) < size:
            if stream in self._ended or self.is_closed:
                return False
            await self._change()
        for window in (0, stream):
            self._windows[window] = self._window(window) - size
        return stream not in self._ended

    def data_received(self, content: bytes) -> None:
        self._received += content
        if self._speaks_http2:
            self._read_frames()
        else:
            for line in self._received.split(b"\r\n")[:-1]:
                if line.startswith(b"HTTP/1.1 "):
                    self._counts[line[9:12].decode()] += 1
            del self._received[: self._received.rfind(b"\r\n") + 2]

    def _read_frames(self) -> None:
        while len(self._received) >= 9:
            size, kind, flags = int.from_bytes(self._received[:3], "big"), *self._received[3:5]
            stream, payload = int.from_bytes(self._received[5:9], "big"), self._received[9 : 9 + size]
            if len(payload) < size:
                return
            del self._received[: 9 + size]
            if kind in (RESET, GOAWAY):
                code = int.from_bytes(payload[:4] if kind == RESET else payload[4:8], "big")
                self._counts[f"{_NAMES[kind]} {_ERRORS.get(code, code)}"] += 1
            elif kind == HEADERS and flags & _END_STREAM:
                self._counts["calls answered"] += 1
            elif kind == WINDOW_UPDATE:
                self._windows[stream] = self._window(stream) + int.from_bytes(payload, "big")
            elif kind == SETTINGS and not flags & _ACK and self._acknowledges:
                assert self._transport is not None
                self._transport.write(frame(SETTINGS, _ACK, 0))
            if kind == RESET or (flags & _END_STREAM and kind in (HEADERS, DATA)):
                self._ended.add(stream)
            self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _window(self, stream: int) -> int:
        return self._windows.get(stream, _INITIAL_WINDOW)


class Peers:
    """The connections of one flood; each that is closed is followed by another."""

    def __init__(self, flood: Flood, address: str, source: str, *, has_tls: bool, speaks_http2: bool) -> None:
        self._source = source
        self.counts: Counter[str] = Counter()
        self._flood, self._address, self._speaks_http2 = flood, split_address(address), speaks_http2
        self._tls = _tls() if has_tls and flood.does_handshake else None
        self._opening = asyncio.Semaphore(_AT_ONCE)

    async def run(self, seconds: float) -> None:
        tasks = [asyncio.ensure_future(self._repeat(index)) for index in range(self._flood.connections)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_END_S)

    async def _repeat(self, index: int) -> None:
        while True:
            try:
                await self._connect(index)
            except (OSError, TimeoutError) as error:
                self.counts[type(error).__name__] += 1
            await asyncio.sleep(0 if self._flood.resets else _RETRY_S)

    async def _connect(self, index: int) -> None:
        async with self._opening, asyncio.timeout(_CONNECT_S):
            transport, peer = await asyncio.get_running_loop().create_connection(
                # A listener has other limits for one that has not acknowledged its settings.
                lambda: _Peer(self.counts, speaks_http2=self._speaks_http2, acknowledges=index // 2 % 2 == 0),
                *self._address,
                ssl=self._tls,
                server_hostname="localhost" if self._tls else None,
                local_addr=(self._source, 0),
            )
        self.counts["connections"] += 1
        if not self._flood.reads:
            transport.pause_reading()
        try:
            await self._send(index, transport, peer)
        finally:
            self.counts["closed by the listener"] += peer.is_closed
            if self._flood.resets:
                raw = transport.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()

    async def _send(self, index: int, transport: asyncio.Transport, peer: _Peer) -> None:
        for chunk in self._flood.chunks(index):
            if self._flood.follows_window and not await peer.takes(chunk):
                if peer.is_closed:
                    return
                continue
            transport.write(chunk)
            self.counts["bytes"] += len(chunk)
            await peer.writable()
            if peer.is_closed:
                return
            # Others of this process have their turn, whether or not the kernel takes more.
            await asyncio.sleep(self._flood.pause_s)
        if not self._flood.resets:
            await peer.closed()


async def _flood(line: Line) -> Line:
    floods = HTTP2 if line["http2"] else HTTP1
    flood = floods[line["flood"]]
    peers = Peers(flood, line["address"], line["source"], has_tls=line["has_tls"], speaks_http2=line["http2"])
    await peers.run(line["seconds"])
    return dict(peers.counts)


async def _serve() -> None:
    give_way()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    send_line({"files": most})
    await answer_lines(_flood)


if __name__ == "__main__":
    asyncio.run(_serve())
