"""A frontend in front of fake engines, a client of it, and what they all say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

import grpc.aio
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from frontend_svc.build import Frontend
from frontend_svc.config import FrontendConfig
from service_kit.channel import open_channel
from tests.frontend_svc.fake_engine import (
    AT_EOS,
    AT_LENGTH,
    EOS_ID,
    HEARTBEAT_S,
    MAX_MODEL_LEN,
    TOKENIZER,
    VOCAB_SIZE,
    WAIT_S,
    FakeEngine,
    FakeRequest,
    FakeSession,
    Script,
    answer,
)
from triptych.api.v1 import (
    chat_pb2_grpc,
    embedding_pb2_grpc,
    generate_pb2,
    inference_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    request_pb2_grpc,
    tokenizer_pb2_grpc,
)
from triptych.common.v1 import sampling_pb2

__all__ = [
    "AT_EOS",
    "AT_LENGTH",
    "EOS_ID",
    "HEARTBEAT_S",
    "MAX_MODEL_LEN",
    "TOKENIZER",
    "VOCAB_SIZE",
    "WAIT_S",
    "Client",
    "FakeEngine",
    "FakeRequest",
    "FakeSession",
    "Script",
    "answer",
    "details_of",
    "make_request",
    "read_all",
    "serving",
]


class Client:
    """Stubs of a frontend's public services."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self.chat = chat_pb2_grpc.ChatServiceStub(channel)
        self.embedding = embedding_pb2_grpc.EmbeddingServiceStub(channel)
        self.tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        self.model = model_pb2_grpc.ModelServiceStub(channel)
        self.request = request_pb2_grpc.RequestServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)

    async def wait_ready(self, is_ready: bool = True) -> None:
        """Wait until health says that requests are taken, or are not."""
        status = (
            health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        request = health_pb2.HealthCheckRequest(service="triptych.api.v1.InferenceService")
        watch = self.health.Watch(request, timeout=WAIT_S)
        async for response in watch:
            if response.status == status:
                watch.cancel()
                return

    async def until_engines_are_ready(self, num_engines: int) -> None:
        """Wait until this many engines can be picked."""
        async with asyncio.timeout(WAIT_S):
            while True:
                info = await self.model.GetServerInfo(model_pb2.GetServerInfoRequest())
                if [engine.state for engine in info.engines].count("ready") == num_engines:
                    return
                # Text workers come after everybody else, also after one who asks without a pause.
                await asyncio.sleep(0.01)

    def generate(
        self, prompt: str | Sequence[int] = "the cat", *, timeout: float = WAIT_S, metadata=(), **fields
    ):
        """A Generate call with sampling fields and request fields told apart by name."""
        return self.inference.Generate(make_request(prompt, **fields), timeout=timeout, metadata=metadata)


def make_request(prompt: str | Sequence[int] = "the cat", **fields) -> generate_pb2.GenerateRequest:
    """A request; fields of SamplingParams go to its sampling."""
    of_sampling = {name for name in fields if name in sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name}
    sampling = sampling_pb2.SamplingParams(**{name: fields[name] for name in of_sampling})
    rest = {name: value for name, value in fields.items() if name not in of_sampling}
    request = generate_pb2.GenerateRequest(sampling=sampling, **rest)
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


@contextlib.asynccontextmanager
async def serving(
    *engines: FakeEngine, waits_ready: bool = True, start_engines: bool = True, **options
) -> AsyncGenerator[tuple[Client, Frontend], None]:
    """A frontend that uses `engines`, and a client of it. On leaving nothing may be in flight."""
    for engine in engines:
        if start_engines:
            await engine.start()
    config = FrontendConfig(
        **{
            "port": 0,
            "engine": tuple(engine.address for engine in engines),
            "text_workers": 1,
            # Short, so that what finds no other engine ends soon; who is to wait for one says how long.
            "reconnect_window_s": 0.5,
            **options,
        }
    )
    frontend = Frontend(config, heartbeat_s=HEARTBEAT_S)
    address = await frontend.public.start()
    frontend.connect(address)
    try:
        async with open_channel(address, profile="public") as channel:
            client = Client(channel)
            if waits_ready:
                await client.wait_ready()
            yield client, frontend
            async with asyncio.timeout(WAIT_S):
                await frontend.drain()
            assert frontend.admission.num_queued == 0
            assert len(frontend.requests) == 0
            assert sum(one.num_in_flight for one in frontend.directory.clients()) == 0
    finally:
        await frontend.public.stop(0)
        await frontend.close()
        for engine in engines:
            await engine.kill()


async def read_all(call) -> tuple[generate_pb2.Started, str, list[int], generate_pb2.Finished]:
    """Everything a Generate stream says, with text and ids put together."""
    started, finished, text, ids = None, None, "", []
    positions = []
    async for response in call:
        positions.append(response.position)
        kind = response.WhichOneof("event")
        if kind == "started":
            started = response.started
        elif kind == "delta":
            assert started is not None
            text += response.delta.text
            ids += response.delta.token_ids
        else:
            finished = response.finished
    assert positions == list(range(1, len(positions) + 1))
    assert started is not None
    assert finished is not None
    return started, text, ids, finished


def details_of(error: grpc.aio.AioRpcError) -> str:
    """The names and contents of an error's details, as text."""
    status = rpc_status.from_call(error)
    shown = []
    for detail in status.details if status is not None else ():
        for kind in (
            error_details_pb2.BadRequest,
            error_details_pb2.ErrorInfo,
            error_details_pb2.ResourceInfo,
        ):
            message = kind()
            if detail.Unpack(message):
                shown.append(f"{kind.__name__} {message}")
        if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            shown.append("RetryInfo")
    return " ".join(shown)
