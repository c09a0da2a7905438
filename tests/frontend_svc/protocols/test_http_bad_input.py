"""What is no request, or none that is served, is refused by name over HTTP, beside 16 running streams."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import random
import re
import socket
import time
from typing import Any

import pytest

from frontend_svc.config import FrontendConfig
from tests.frontend_svc.fakes import AT_LENGTH, TOKENIZER, WAIT_S, FakeEngine, FakeRequest, answer, serving
from tests.frontend_svc.protocols.raw_http import RawConnection, RawReply, connected, exchange, post, until
from triptych_kit.telemetry.logs import setup_logs

NUM_STREAMS = 16
NUM_TOKENS = 24
MAX_BLOCK_S = 1.0  # of the event loop

CHUNKED = "transfer-encoding: chunked"
OK = json.dumps({"prompt": "the", "max_tokens": 4}).encode()


def body(**fields: Any) -> bytes:
    return post(json.dumps({"prompt": "the", **fields}).encode())


def chunks(*parts: bytes, extension: bytes = b"") -> bytes:
    return b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts) + b"0\r\n\r\n"


def get(path: str, *headers: str, version: str = "HTTP/1.1", method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} {version}", "host: 127.0.0.1", *headers, "", ""]).encode("latin-1")


TEXT_PLAIN = "content-type: text/plain"
# Name: what is sent, the status, what its message says.
TRANSPORT = {
    "conflicting lengths": (
        post(OK, "content-length: 3", f"content-length: {len(OK)}"),
        400,
        "Content-Length",
    ),
    "length and chunks": (post(chunks(OK), f"content-length: {len(OK)}", CHUNKED), 400, "unclear"),
    "chunks of HTTP/1.0": (post(chunks(OK), CHUNKED).replace(b"HTTP/1.1", b"HTTP/1.0"), 400, "unclear"),
    "two codings": (post(chunks(OK), CHUNKED, CHUNKED), 501, "Transfer-Encoding"),
    "compressed chunks": (post(chunks(OK), "transfer-encoding: gzip, chunked"), 501, "chunked"),
    "space before a colon": (post(chunks(OK), "transfer-encoding : chunked"), 400, "header line"),
    "bad length": (post(OK, "content-length: 0x10"), 400, "Content-Length"),
    "long length": (post(OK, "content-length: " + "9" * 5000), 400, "Content-Length"),
    "LF alone": (post(OK, "x: a\ny: b"), 400, "LF alone"),
    "CR alone": (post(OK, "x: a\ry: b"), 400, "header line"),
    "NUL": (post(OK, "x: a\0b"), 400, "header line"),
    "folded header": (post(OK, "x: a\r\n b"), 400, "several lines"),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400, "Host"),
    "two hosts": (get("/health", "host: b"), 400, "Host"),
    "no version": (b"GET /health\r\n\r\n", 400, "request line"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(50), 505, "HTTP/2.0"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x80" * 500, 400, "request line"),
    "method": (get("/health", method="B@D<"), 400, "request line"),
    "unknown method": (get("/v1/completions", method="FOO"), 405, "FOO"),
    "tunnel": (get("a.b:80", method="CONNECT"), 404, "not served"),
    "another host's": (get("http://evil/nothing"), 421, "host evil is not served"),
    "no host's": (get("http:///health"), 404, "not served"),
    "path": (get("/v1/../v1/completions"), 404, "not served"),
    "path of bytes": (b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n", 400, "request line"),
    "name of bytes": (get("/v1/models/%ff%00"), 400, "model"),
    "many headers": (get("/health", *["a:"] * 129), 431, "128 headers"),
    "more headers": (get("/health", *["a:"] * 100_000), 431, ""),
    "long header": (get("/health", "a: " + "a" * 40_000), 431, "32768 bytes"),
    "tiny chunks": (post(chunks(*[b" "] * 20_000, OK), CHUNKED), 413, "chunks"),
    "long extension": (post(chunks(OK, extension=b";" + b"a" * 60_000), CHUNKED), 431, ""),
    "no chunk": (post(b"zz\r\n", CHUNKED), 400, "chunk"),
    "long trailer": (post(chunks(OK)[:-2] + b"a: b\r\n" * 20_000 + b"\r\n", CHUNKED), 431, ""),
    "announced size": (post(b"", f"content-length: {2**25 + 1}"), 413, str(2**25)),
    "announced size that waits": (
        post(b"", f"content-length: {2**25 + 1}", "expect: 100-continue"),
        413,
        str(2**25),
    ),
    "compressed": (post(OK, "content-encoding: gzip"), 415, "content-encoding gzip"),
    "form": (post(OK, "content-type: application/x-www-form-urlencoded"), 415, "content-type"),
    "page of another site": (post(OK, "origin: http://evil.com", TEXT_PLAIN), 403, "http://evil.com"),
    "page without a site": (post(OK, "origin: null"), 403, "origin null"),
    "page under a name of its own": (
        post(OK, "origin: http://evil.com").replace(b"host: 127.0.0.1", b"host: evil.com"),
        421,
        "host evil.com",
    ),
}
BODIES = {
    "empty": (post(b""), 400, "not JSON"),
    "cut": (post(OK[:-1]), 400, "not JSON"),
    "more": (post(OK + b"x"), 400, "not JSON"),
    "NaN": (post(b'{"prompt": "the", "temperature": NaN}'), 400, "not JSON"),
    "Infinity": (post(b'{"prompt": "the", "temperature": Infinity}'), 400, "not JSON"),
    "1e400": (post(b'{"prompt": "the", "temperature": 1e400}'), 400, "out of range"),
    "2^63": (body(max_tokens=2**63), 400, "max_tokens"),
    "2^64": (body(seed=2**64), 400, "seed"),
    "many digits": (post(b'{"prompt": "the", "seed": 1%s}' % (b"0" * 5000)), 400, "out of range"),
    "no UTF-8": (post(b'{"prompt": "\xff"}'), 400, "utf-8"),
    "half a character": (post(b'{"prompt": "\\ud800 a"}'), 400, "not JSON"),
    "deep": (post(b'{"prompt": ' + b"[" * 30_000 + b"]" * 30_000 + b"}"), 400, "nested too deeply"),
    "deep schema": (post(b'{"prompt": "a", "guided_json": %s1%s}' % (b'{"a":' * 900, b"}" * 900)), 400, ""),
    "very deep": (post(b"[" * 5_000_000), 400, "131072"),
    "many objects": (post(b'{"prompt": [' + b"{}," * 3_000_000 + b"{}]}"), 400, "131072"),
    "many texts": (post(b'{"prompt": [' + b'"",' * 3_000_000 + b'""]}'), 400, "131072"),
    "many numbers": (post(b'{"prompt": [' + b"5," * 3_000_000 + b"5]}"), 400, "1048576"),
    "long text": (body(prompt="a" * 8_000_000), 400, "tokens"),
    "wrong type": (body(n="x"), 400, "n: Expected"),
    "n": (body(n=10**6), 400, "1..64"),
    "prompts": (body(prompt=["a"] * 129), 400, "1..128"),
    "stops": (body(stop=["a"] * 10_000), 400, "stop has 10000"),
    "biases": (body(logit_bias={str(number): 1 for number in range(2000)}), 400, "logit_bias"),
    "id": (body(prompt=[2**32]), 400, "prompt"),
    "logprobs": (body(logprobs=10**6), 400, "logprobs"),
    "salt": (body(cache_salt="a" * 1_000_000), 400, "cache_salt"),
    "job": (body(job_id="a" * 257), 400, "job_id"),
    "request id": (body(request_id="a\n" * 100), 400, "request_id"),
    "model": (body(model="m" * 100_000), 404, "model"),
    "grace": (body(stream=True, orphan_grace_ms=6000), 400, "orphan_grace_ms"),
    "whole grace": (body(orphan_grace_ms=5000), 400, "orphan_grace_ms"),
    "event id": (get("/v1/streams/a", "last-event-id: a:1:zz"), 400, "last-event-id"),
}
# What looks bad and is served.
SERVED = {
    "absolute form": get("http://127.0.0.1:1/health"),
    "equal lengths": post(OK, f"content-length: {len(OK)}", f"content-length: {len(OK)}"),
    "chunks": post(chunks(OK[:5], OK[5:], extension=b";a=b"), CHUNKED),
    "expectation": post(OK, "expect: 100-continue"),
    "upgrade": post(OK, "upgrade: h2c", "connection: Upgrade, HTTP2-Settings", "http2-settings: AA"),
    "web socket": get("/health", "upgrade: websocket", "connection: upgrade"),
    "HTTP/1.0": get("/health", version="HTTP/1.0"),
    "equal keys": post(b'{"prompt": "a", "prompt": "the"}'),
    "NUL in a text": post(b'{"prompt": "a\\u0000b"}'),
    "special tokens": body(prompt="<|im_end|></s>"),
    "charset": post(OK, "content-type: application/json; charset=utf-8"),
    "page of this host": post(OK, "origin: http://127.0.0.1"),
}


class Streams:
    """Streams of events beside the attacks: each gets a token after each attack, and must have just these."""

    def __init__(self) -> None:
        self.connections: list[RawConnection] = []
        self.requests: list[FakeRequest] = []
        self.num_sent = 0

    async def begin(self, engine: FakeEngine, address: str, stack: contextlib.AsyncExitStack) -> None:
        for index in range(NUM_STREAMS):
            connection = await stack.enter_async_context(connected(address))
            fields = {"prompt": [5 + index], "stream": True, "max_tokens": 400, "return_token_ids": True}
            await connection.send(post(json.dumps(fields).encode()))
            self.connections.append(connection)
        self.requests = list(await engine.wait_for_requests(NUM_STREAMS))
        # Requests reach the engine in any order.
        self.requests.sort(key=lambda request: request.prompt[0])
        self.step(engine)

    def step(self, engine: FakeEngine) -> None:
        engine.step({request: [self.token(index)] for index, request in enumerate(self.requests)})
        self.num_sent += 1

    def token(self, index: int) -> int:
        return 5 + (index * 31 + self.num_sent * 7) % 200

    async def end(self, engine: FakeEngine) -> list[list[int]]:
        rows = {request: [self.token(index)] for index, request in enumerate(self.requests)}
        engine.step(rows, finished=dict.fromkeys(self.requests, AT_LENGTH))
        self.num_sent += 1
        found = []
        for connection in self.connections:
            reply = await connection.reply()
            assert reply is not None
            events = [event.removeprefix(b"data: ") for event in reply.content.split(b"\n\n")[:-2]]
            choices = [choice for event in events for choice in json.loads(event)["choices"]]
            found.append([one for choice in choices for one in choice.get("token_ids", ())])
        return found

    def expected(self) -> list[list[int]]:
        num_sent, self.num_sent = self.num_sent, 0
        ids: list[list[int]] = [[] for _ in self.requests]
        for self.num_sent in range(num_sent):
            for index in range(len(self.requests)):
                ids[index].append(self.token(index))
        return ids


def script(engine: FakeEngine, request: FakeRequest) -> None:
    # The streams beside are answered by the test.
    if request.entry.sampling.max_tokens != 400:
        answer("the cat")(engine, request)


@contextlib.asynccontextmanager
async def attacked(**options: Any):
    engine = FakeEngine(script)
    async with serving(engine, http_port=0, **options) as (_, frontend), contextlib.AsyncExitStack() as stack:
        assert frontend.servers.http is not None
        address = await frontend.servers.http.start()
        streams = Streams()
        await streams.begin(engine, address, stack)
        # What earlier tests left in this process takes a collection up to a second to look through.
        gc.collect()
        gc.freeze()
        block = asyncio.ensure_future(longest_block())
        try:
            yield engine, frontend, address, streams
            found = await streams.end(engine)
        finally:
            block.cancel()
            gc.unfreeze()
            await frontend.servers.http.stop(0)
        expected = streams.expected()
        assert found == expected
        assert min(len(set(ids)) for ids in expected) >= 20
        with contextlib.suppress(asyncio.CancelledError):
            assert await block < MAX_BLOCK_S


async def longest_block() -> float:
    """The most CPU in s that the event loop took at a stretch, to which a busy machine does not add."""
    longest, last = 0.0, time.thread_time()
    try:
        while True:
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.thread_time() - last), time.thread_time()
    except asyncio.CancelledError:
        return longest


async def test_bad_requests_are_refused_by_name_beside_running_streams():
    async with attacked() as (engine, _, address, streams):
        for name, (content, status, says) in {**TRANSPORT, **BODIES}.items():
            reply = await exchange(address, content)
            assert reply is not None, name
            assert reply.status == status, (name, reply)
            assert says in reply.error["message"], (name, reply)
            assert len(reply.content) < 1024, name
            streams.step(engine)
        for name, content in SERVED.items():
            reply = await exchange(address, content)
            assert reply is not None, name
            assert reply.status == 200, (name, reply)


def mutated(rng: random.Random) -> bytes:
    """A request with some bytes replaced, removed, repeated or put elsewhere."""
    content = bytearray(rng.choice([*SERVED.values(), *(one for one, _, _ in TRANSPORT.values())])[:2000])
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(content))
        end = min(len(content), start + rng.choice([1, 1, 2, 8, 40]))
        piece = bytes(content[start:end])
        kind = rng.randrange(4)
        if kind == 0:
            content[start:end] = rng.randbytes(len(piece))
        elif kind == 1 and end - start < len(content):
            del content[start:end]
        elif kind == 2:
            content[start:end] = piece * rng.choice([2, 3, 50])
        else:
            at = rng.randrange(len(content))
            content[at:at] = rng.choice([piece, b"\r\n", b"\n", b"\0", b":", b" ", b"0\r\n\r\n", b'"', b"{"])
    return bytes(content)


@pytest.mark.parametrize("seed", range(2))
async def test_mutated_requests_never_end_in_an_internal_error(seed):
    rng = random.Random(seed)
    async with attacked() as (engine, _, address, streams):
        for number in range(150):
            content = mutated(rng)
            async with connected(address) as connection:
                await connection.send(content)
                # What is not whole is over for the listener.
                connection.writer.write_eof()
                reply: RawReply | None = await connection.reply()
            assert reply is None or reply.status in (501, 505) or reply.status < 500, (
                seed,
                number,
                content,
                reply,
            )
            if number % 6 == 0:
                streams.step(engine)


async def test_a_stream_that_is_not_read_is_aborted_and_its_connection_cut_off():
    engine = FakeEngine(max_model_len=10**6)
    async with serving(engine, http_port=0, slow_reader_s=0.5) as (_, frontend):
        address = await frontend.servers.http.start()
        host, _, port = address.rpartition(":")
        with contextlib.closing(socket.socket()) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(body(stream=True, max_tokens=900_000, return_token_ids=True, ignore_eos=True))
            (request,) = await engine.wait_for_requests(1)
            ids = TOKENIZER.encode("the cat sat on the mat and ran " * 40).ids[:250]
            async with asyncio.timeout(WAIT_S):
                while not request.num_aborts:
                    for _ in range(8):
                        engine.step({request: ids})
                    await asyncio.sleep(0.002)
            await until(lambda: not len(frontend.requests.open))
            await until(lambda: frontend.servers.http.num_connections == 0)
        assert (await exchange(address, get("/health"))).status == 200
        await frontend.servers.http.stop(0)


async def test_a_site_that_points_its_name_here_is_not_served():
    cross_site = "sec-fetch-site: cross-site"
    of_probes = ("/health", "/ready")
    paths = ("/", "/v1/models", "/version", "/tokenizer_info", "/nowhere", *of_probes)
    async with serving(FakeEngine(answer("the cat")), http_port=0, http_allowed_origin=("https://a.b",)) as (
        _,
        frontend,
    ):
        address = await frontend.servers.http.start()
        statuses = {
            (path, host): (
                await exchange(address, get(path).replace(b"host: 127.0.0.1", b"host: %s" % host))
            ).status
            for path in paths
            for host in (b"evil.com:8000", b"a.b", b"localhost:8000", b"[::1]:8000")
        }
        embedded = await exchange(address, get("/v1/models", cross_site))
        followed = await exchange(address, get("/v1/models", cross_site, "sec-fetch-mode: navigate"))
        await frontend.servers.http.stop(0)
    refused = {path for (path, _), status in statuses.items() if status == 421}
    assert refused == set(paths) - set(of_probes)
    assert {host for (_, host), status in statuses.items() if status == 421} == {b"evil.com:8000"}
    assert (embedded.status, followed.status) == (403, 200)


async def test_a_page_of_an_allowed_site_may_call():
    async with serving(FakeEngine(answer("the cat")), http_port=0, http_allowed_origin=("https://a.b",)) as (
        _,
        frontend,
    ):
        address = await frontend.servers.http.start()
        asks = ["origin: https://a.b", "access-control-request-method: POST"]
        asks.append("access-control-request-headers: authorization, content-type, last-event-id")
        before = await exchange(address, get("/v1/completions", *asks, method="OPTIONS"))
        reply = await exchange(address, post(OK, "origin: https://a.b", "content-type: application/json"))
        other = await exchange(address, post(OK, "origin: https://evil.com"))
        asks[0] = "origin: https://evil.com"
        refused = await exchange(address, get("/v1/completions", *asks, method="OPTIONS"))
        await frontend.servers.http.stop(0)
    for one in (before, reply):
        assert (one.status, one.headers["access-control-allow-origin"]) == (200, "https://a.b")
    assert (other.status, refused.status) == (403, 400)
    assert "access-control-allow-origin" not in other.headers | refused.headers


async def test_the_limit_of_connections_and_the_proxies_are_options():
    log = io.StringIO()
    setup_logs("frontend", instance="0", log_format="text", log_level="info", stream=log)
    options: dict[str, Any] = {"http_max_connections": 1, "forwarded_allow_ips": ("127.0.0.0/8",)}
    async with serving(FakeEngine(answer("the cat")), http_port=0, **options) as (_, frontend):
        address = await frontend.servers.http.start()
        async with connected(address) as first:
            await asyncio.sleep(0.2)
            async with connected(address) as second:
                assert await first.is_closed()
                await second.send(get("/v1/models", "x-forwarded-for: 9.9.9.9"))
                assert (await second.reply()).status == 200
        await frontend.servers.http.stop(0)
    (line,) = (line for line in log.getvalue().splitlines() if "GET /v1/models" in line)
    assert "client=9.9.9.9" in line


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"http_max_connections": 0}, "http_max_connections 0 is below 1"),
        ({"http_allowed_origin": ("https://a.b/c",)}, "http_allowed_origin 'https://a.b/c' is not scheme://"),
        ({"http_allowed_origin": ("a.b",)}, "http_allowed_origin 'a.b'"),
        ({"forwarded_allow_ips": ("proxy",)}, "forwarded_allow_ips 'proxy'"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        FrontendConfig(engine=("127.0.0.1:1",), **options)
