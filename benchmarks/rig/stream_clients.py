"""Equal streams over gRPC or HTTP from a process of their own, timed on arrival and read afterwards.

Each line of the input is a `Load` as JSON, answered with what its streams measured, or
with a `failure`. Connections are open
before the first request is sent. Every stream is checked: its tokens are as many as were asked for, and its
text is theirs.
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import itertools
import json
import os
import random
import ssl
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from triptych_kit.process.setup import prepare_process

prepare_process("client")

import grpc.aio  # noqa: E402  Its import reads what the line above has set.
from tokenizers import Tokenizer  # noqa: E402

from benchmarks.rig.lines import Line, answer_lines, send_line  # noqa: E402
from benchmarks.rig.synthetic_engine import FIRST_PLAIN_ID, VOCAB_SIZE  # noqa: E402
from triptych.api.v1 import generate_pb2  # noqa: E402
from triptych.common.v1 import sampling_pb2  # noqa: E402
from triptych_cli.services import embedded_model  # noqa: E402

_GENERATE = "/triptych.api.v1.InferenceService/Generate"
_PROMPT_TOKENS = 32
_NUM_CHANNELS = 8
_LIMIT_S = 60.0
_LAST_CHUNK = b"0\r\n\r\n"
_DONE = "[DONE]"


class StreamFailed(Exception):
    """A stream has ended early, or was answered with something else than what was asked for."""


@dataclass(frozen=True, slots=True)
class Load:
    """Streams that begin at once. pids: the processes whose CPU is counted."""

    protocol: str  # grpc or http
    address: str
    pids: list[int]
    num_streams: int
    num_tokens: int
    key: str = ""
    ca: str = ""  # files of TLS; without, there is none
    certificate: str = ""
    certificate_key: str = ""


@dataclass(slots=True)
class Window:
    """The time from the last first token to the last end."""

    pids: list[int]
    num_waiting: int
    num_open: int
    began_at: float = 0.0
    ended_at: float = 0.0
    cpu_s: float = 0.0

    def note_first(self) -> None:
        self.num_waiting -= 1
        if not self.num_waiting:
            self.began_at, self.cpu_s = time.monotonic(), -cpu_s(self.pids)

    def note_end(self) -> None:
        self.num_open -= 1
        if not self.num_open:
            self.ended_at = time.monotonic()
            self.cpu_s += cpu_s(self.pids)


@dataclass(slots=True)
class Received:
    """The text and ids of one stream, and when each of its events with tokens came."""

    sent_at: float
    arrivals: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""

    def add(self, arrived_at: float, token_ids: list[int], text: str) -> None:
        if token_ids:
            self.arrivals.append(arrived_at)
            self.counts.append(len(token_ids))
            self.token_ids += token_ids
        self.text += text


def cpu_s(pids: Sequence[int]) -> float:
    """CPU of all threads of these processes, to the nanosecond."""
    total = 0
    for thread in itertools.chain.from_iterable(Path(f"/proc/{pid}/task").iterdir() for pid in pids):
        try:
            total += int((thread / "schedstat").read_text(encoding="ascii").split()[0])
        except OSError:
            continue
    return total / 1e9


def _prompts(num_streams: int) -> list[list[int]]:
    rng = random.Random(7)
    return [rng.choices(range(FIRST_PLAIN_ID, VOCAB_SIZE), k=_PROMPT_TOKENS) for _ in range(num_streams)]


async def _over_grpc(load: Load, window: Window) -> list[Received]:
    # Channels alike would share one connection.
    options = [("grpc.use_local_subchannel_pool", 1)]
    if load.ca:
        credentials = _grpc_credentials(load)
        channels = [
            grpc.aio.secure_channel(load.address, credentials, options=options) for _ in range(_NUM_CHANNELS)
        ]
    else:
        channels = [grpc.aio.insecure_channel(load.address, options=options) for _ in range(_NUM_CHANNELS)]
    metadata = (("authorization", f"Bearer {load.key}"),) if load.key else ()

    async def stream(channel: grpc.aio.Channel, request: bytes) -> tuple[float, list[tuple[float, bytes]]]:
        # Messages stay bytes until all have come.
        sent_at, parts = time.monotonic(), []
        async for part in channel.unary_stream(_GENERATE, None, None)(request, metadata=metadata):
            parts.append((time.monotonic(), part))
            if len(parts) == 2:
                window.note_first()
        window.note_end()
        return sent_at, parts

    try:
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        sampling = sampling_pb2.SamplingParams(max_tokens=load.num_tokens, temperature=0.0, ignore_eos=True)
        requests = [
            generate_pb2.GenerateRequest(
                token_ids=generate_pb2.TokenIds(ids=ids), sampling=sampling
            ).SerializeToString()
            for ids in _prompts(load.num_streams)
        ]
        streams = await asyncio.gather(
            *(stream(channels[index % _NUM_CHANNELS], request) for index, request in enumerate(requests))
        )
    finally:
        await asyncio.gather(*(channel.close(None) for channel in channels))
    return [_read_messages(*each) for each in streams]


def _grpc_credentials(load: Load) -> grpc.ChannelCredentials:
    files = (load.ca, load.certificate_key, load.certificate)
    return grpc.ssl_channel_credentials(*(Path(name).read_bytes() for name in files))


def _read_messages(sent_at: float, parts: list[tuple[float, bytes]]) -> Received:
    received = Received(sent_at)
    for arrived_at, part in parts:
        delta = generate_pb2.GenerateResponse.FromString(part).delta
        received.add(arrived_at, list(delta.token_ids), delta.text)
    return received


class _HTTPStream(asyncio.Protocol):
    """One connection with one request; keeps the bytes and when they came."""

    def __init__(self, window: Window) -> None:
        self.parts: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent_at = 0.0
        self._window = window
        self._has_begun = False
        self._tail = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of TCP
        self._transport = transport

    def send(self, request: bytes) -> None:
        self.sent_at = time.monotonic()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.monotonic(), data))
        if not self._has_begun and b"data: " in data:
            self._has_begun = True
            self._window.note_first()
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        if self._tail == _LAST_CHUNK:
            self._window.note_end()
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            seen = b"".join(data for _, data in self.parts)[:500]
            self.ended.set_exception(StreamFailed(f"a connection ended: {error} after {seen!r}"))

    def close(self) -> None:
        self._transport.close()


async def _over_http(load: Load, window: Window) -> list[Received]:
    tls = None
    if load.ca:
        tls = ssl.create_default_context(cafile=load.ca)
        tls.load_cert_chain(load.certificate, load.certificate_key)
    host, _, port = load.address.rpartition(":")
    loop = asyncio.get_running_loop()
    streams: list[_HTTPStream] = []
    try:
        for _ in range(load.num_streams):
            _, stream = await loop.create_connection(lambda: _HTTPStream(window), host, int(port), ssl=tls)
            streams.append(stream)
        for stream, ids in zip(streams, _prompts(load.num_streams), strict=True):
            stream.send(_http_request(load, ids))
        await asyncio.gather(*(stream.ended for stream in streams))
    finally:
        for stream in streams:
            stream.close()
    return [_read_events(stream.sent_at, stream.parts) for stream in streams]


def _http_request(load: Load, prompt: list[int]) -> bytes:
    # With ids, as gRPC has them.
    body = json.dumps(
        {
            "prompt": prompt, "max_tokens": load.num_tokens, "temperature": 0.0, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }
    ).encode()  # fmt: skip
    lines = [
        "POST /v1/completions HTTP/1.1",
        f"host: {load.address}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *([f"authorization: Bearer {load.key}"] if load.key else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _read_events(sent_at: float, parts: list[tuple[float, bytes]]) -> Received:
    """Read a chunked answer. An event has come with the part that has its last byte."""
    ends, raw = [], bytearray()
    for _, data in parts:
        raw += data
        ends.append(len(raw))
    head, _, _ = bytes(raw).partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise StreamFailed(f"an answer begins with {head[:200]!r}: {bytes(raw[-500:])!r}")
    received, position, unread = Received(sent_at), len(head) + 4, b""
    while True:
        line_end = raw.index(b"\r\n", position)
        size = int(raw[position:line_end], 16)
        position = line_end + 2 + size + 2
        if not size:
            break
        *events, unread = (unread + raw[line_end + 2 : position - 2]).split(b"\n\n")
        arrived_at = parts[bisect.bisect_left(ends, position - 2)][0]
        for event in events:
            content = event.decode().removeprefix("data: ")
            if content == _DONE or content.startswith(":"):
                continue
            choice = json.loads(content)["choices"][0]
            received.add(arrived_at, choice.get("token_ids") or [], choice["text"])
    return received


def _measured(load: Load, window: Window, streams: list[Received], tokenizer: Tokenizer) -> Line:
    digest = hashlib.sha256()
    for stream in streams:
        if len(stream.token_ids) != load.num_tokens:
            raise StreamFailed(f"a stream has {len(stream.token_ids)} tokens, not {load.num_tokens}")
        if stream.text != tokenizer.decode(stream.token_ids):
            raise StreamFailed(f"the text of a stream is not that of its ids: {stream.text[:200]!r}")
        digest.update(array("I", stream.token_ids).tobytes())
    gaps = [after - before for each in streams for before, after in itertools.pairwise(each.arrivals)]
    num_in_window = sum(
        count
        for each in streams
        for arrived_at, count in zip(each.arrivals, each.counts, strict=True)
        if window.began_at < arrived_at <= window.ended_at
    )
    began_at = min(each.sent_at for each in streams)
    ended_at = max(each.arrivals[-1] for each in streams)
    return {
        "num_tokens": load.num_tokens * len(streams),
        "num_messages": sum(len(each.arrivals) for each in streams),
        "seconds": ended_at - began_at,
        "first_token_s": [each.arrivals[0] - each.sent_at for each in streams],
        "gap_p99_s": sorted(gaps)[int(len(gaps) * 0.99)],
        "window_s": window.ended_at - window.began_at,
        "window_tokens": num_in_window,
        "window_cpu_s": window.cpu_s,
        "digest": digest.hexdigest(),
    }


async def _run() -> None:
    tokenizer = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))

    async def answer(line: Line) -> Line:
        load = Load(**line)
        window = Window(load.pids, load.num_streams, load.num_streams)
        try:
            async with asyncio.timeout(_LIMIT_S):
                streams = await (_over_grpc if load.protocol == "grpc" else _over_http)(load, window)
            return _measured(load, window, streams, tokenizer)
        except (StreamFailed, grpc.RpcError, OSError) as error:
            # A timeout, which is an OSError, has no text.
            return {"failure": str(error) or f"no answer within {_LIMIT_S:g} s"}

    send_line({"pid": os.getpid()})
    await answer_lines(answer)


if __name__ == "__main__":
    uvloop.run(_run())
