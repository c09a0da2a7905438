"""A frontend without engines that answers prompts of ids with ids, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from triptych.api.v1 import generate_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc
from triptych.common.v1 import output_pb2
from triptych_kit.errors import ResourceExhausted
from triptych_kit.server import PUBLIC, Registration, Server

VOCAB_SIZE = 50
EOS_ID = 49
MAX_MODEL_LEN = 200


@dataclass
class CountingFrontend(inference_pb2_grpc.InferenceServiceServicer, model_pb2_grpc.ModelServiceServicer):
    """Answers with as many ids as asked for, each the number of the request, two in a message.

    `refused` are the numbers of requests, from 0, that are refused; `reason` is how outputs end; it answers
    request `waits_for_peers` - 1 only once so many are there together; one that hangs stops after two ids.
    """

    refused: frozenset[int] = frozenset()
    reason: output_pb2.FinishReason = output_pb2.FINISH_REASON_LENGTH
    hangs: bool = False
    ends_early: bool = False
    waits_for_peers: int = 1
    requests: list[generate_pb2.GenerateRequest] = field(default_factory=list)
    peers: set[str] = field(default_factory=set)
    num_in_flight: int = 0
    max_in_flight: int = 0
    all_there: asyncio.Event = field(default_factory=asyncio.Event)

    async def Generate(
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        number = len(self.requests)
        self.requests.append(request)
        self.peers.add(context.peer())
        if number in self.refused:
            raise ResourceExhausted(f"request {number} is one too many")
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        if self.num_in_flight >= self.waits_for_peers:
            self.all_there.set()
        await self.all_there.wait()
        num_prompt, num_tokens = len(request.token_ids.ids), request.sampling.max_tokens
        try:
            started = generate_pb2.Started(num_prompt_tokens=num_prompt)
            yield generate_pb2.GenerateResponse(position=1, started=started)
            for start in range(0, num_tokens, 2):
                ids = [number % VOCAB_SIZE] * min(2, num_tokens - start)
                yield generate_pb2.GenerateResponse(position=2, delta=generate_pb2.Delta(token_ids=ids))
                if self.hangs:
                    await asyncio.Event().wait()
            if self.ends_early:
                return
            usage = output_pb2.Usage(
                num_prompt_tokens=num_prompt, num_cached_tokens=1, num_completion_tokens=num_tokens
            )
            finished = generate_pb2.Finished(reason=self.reason, usage=usage)
            yield generate_pb2.GenerateResponse(position=3, finished=finished)
        finally:
            self.num_in_flight -= 1

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Any) -> model_pb2.GetModelResponse:
        return model_pb2.GetModelResponse(
            model=model_pb2.Model(
                name="fake", vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, eos_token_ids=[EOS_ID]
            )
        )


@dataclass
class OpenAIServer:
    """Another server of OpenAI's completions: a text a chunk, and the number of tokens at the end alone.

    `refused` are the numbers of requests, from 0, that are refused. An answer has one token more than chunks.
    """

    refused: frozenset[int] = frozenset()
    ends_early: bool = False
    has_ids: bool = False
    key: bytes = b""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    num_connections: int = 0

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                if self.key not in head:
                    writer.write(_whole(401, {"error": {"message": "no key"}}))
                elif head.startswith(b"GET /v1/models "):
                    models = [{"id": "a"}, {"id": "b", "max_model_len": MAX_MODEL_LEN}]
                    writer.write(_whole(200, {"data": models}))
                else:
                    assert head.startswith(b"POST /v1/completions ")
                    length = int(head.lower().partition(b"content-length:")[2].split()[0])
                    self._answer(json.loads(await reader.readexactly(length)), writer)
                await writer.drain()
        writer.close()

    def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        if len(self.bodies) - 1 in self.refused:
            writer.write(_whole(429, {"error": {"message": "one too many"}}))
            return
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        num_chunks = body["max_tokens"] - 1
        events: list[dict[str, Any]] = [
            {"choices": [{"text": "x", "finish_reason": None} | ({"token_ids": [9]} if self.has_ids else {})]}
            for _ in range(num_chunks)
        ]
        if not self.ends_early:
            usage = {"completion_tokens": num_chunks + 1, "prompt_tokens_details": {"cached_tokens": 2}}
            events += [
                {"choices": [{"text": "", "finish_reason": "length"}]},
                {"choices": [], "usage": usage},
            ]
        raw = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + ": ping\n\ndata: [DONE]\n\n"
        # Chunks that are not those of events.
        for start in range(0, len(raw), 50):
            part = raw[start : start + 50].encode()
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        writer.write(b"0\r\n\r\n")


def _whole(status: int, answer: object) -> bytes:
    body = json.dumps(answer).encode()
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


@asynccontextmanager
async def serving_openai(server: OpenAIServer) -> AsyncIterator[str]:
    """Serve it for the length of a test; produces its base URL."""
    async with await asyncio.start_server(server.serve_connection, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def serving(frontend: CountingFrontend) -> AsyncIterator[str]:
    """Serve it for the length of a test; produces its address."""
    add_inference = partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, frontend)
    add_model = partial(model_pb2_grpc.add_ModelServiceServicer_to_server, frontend)
    server = Server(
        listen="127.0.0.1:0",
        registrations=[
            Registration("triptych.api.v1.InferenceService", add_inference, is_ready=True),
            Registration("triptych.api.v1.ModelService", add_model, is_ready=True),
        ],
        profile=PUBLIC,
        service="frontend",
    )
    address = await server.start()
    try:
        yield address
    finally:
        await server.stop(0)
