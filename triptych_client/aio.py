"""The asyncio client: the calls of `triptych_client.client`, awaited, within one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.api.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    tokenize_pb2,
    tokenizer_pb2_grpc,
)
from triptych_client.aio_stream import GenerateStream
from triptych_client.channel_options import PUBLIC_SERVICE, ChannelOptions, address_of
from triptych_client.errors import from_rpc_error, not_reached
from triptych_client.events import Completion, to_completion
from triptych_client.generate_request import GenerateOptions, build_generate_request

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class Client:
    """Talks to one frontend. Every call that fails raises TriptychError.

    `timeout_s` of a call is its deadline, at which the server aborts the request; None is no deadline.
    `metadata` goes along as headers, e.g. `traceparent` and `x-request-id`.
    """

    def __init__(
        self,
        target: str,
        *,
        options: ChannelOptions | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """Open a channel to `host:port` or `grpc://host:port`; it connects with the first call.

        `credentials` None is plain text.
        """
        settings = (options or ChannelOptions()).as_grpc()
        self._address = address_of(target)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=settings)
        else:
            self._channel = grpc.aio.secure_channel(self._address, credentials, options=settings)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(self._channel)
        self._models = model_pb2_grpc.ModelServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def connect(self, *, timeout_s: float = 10.0) -> None:
        """Wait until the frontend is reached; UNAVAILABLE where it is not in time."""
        try:
            await asyncio.wait_for(self._channel.channel_ready(), timeout=timeout_s)
        except TimeoutError as error:
            raise not_reached(self._address, timeout_s) from error

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        timeout_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateStream:
        """Stream the outputs for a text, or for token ids, as they are sampled."""
        request = build_generate_request(prompt, options)
        return GenerateStream(self._inference.Generate(request, timeout=timeout_s, metadata=_pairs(metadata)))

    async def generate_unary(
        self,
        prompt: str | Sequence[int],
        *,
        timeout_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """The outputs for a text, or for token ids, once all have ended."""
        request = inference_pb2.GenerateUnaryRequest(request=build_generate_request(prompt, options))
        return to_completion(await _call(self._inference.GenerateUnary, request, timeout_s, metadata))

    async def tokenize(
        self,
        text: str,
        *,
        model: str = "",
        add_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> list[int]:
        """The token ids of `text`. An empty `model` is the only one that is served."""
        request = tokenize_pb2.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
        response: tokenize_pb2.TokenizeResponse = await _call(self._tokenizer.Tokenize, request, timeout_s)
        return list(response.token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = False,
        timeout_s: float | None = None,
    ) -> str:
        """The text of `token_ids`."""
        request = tokenize_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        response: tokenize_pb2.DetokenizeResponse = await _call(
            self._tokenizer.Detokenize, request, timeout_s
        )
        return response.text

    async def list_models(self, *, timeout_s: float | None = None) -> list[model_pb2.Model]:
        """The models that are served."""
        response: model_pb2.ListModelsResponse = await _call(
            self._models.ListModels, model_pb2.ListModelsRequest(), timeout_s
        )
        return list(response.models)

    async def server_info(self, *, timeout_s: float | None = None) -> model_pb2.GetServerInfoResponse:
        """The frontend's version, its limits, and the engines it knows."""
        request = model_pb2.GetServerInfoRequest()
        response: model_pb2.GetServerInfoResponse = await _call(
            self._models.GetServerInfo, request, timeout_s
        )
        return response

    async def is_ready(self, *, timeout_s: float | None = 5.0) -> bool:
        """Whether the frontend takes requests now. False also where nobody answers."""
        request = health_pb2.HealthCheckRequest(service=PUBLIC_SERVICE)
        try:
            response = await self._health.Check(request, timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Close the channel; calls that still run are cancelled."""
        await self._channel.close(grace=None)

    async def __aenter__(self) -> Self:
        """Close the client at the end of the block."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the channel."""
        await self.close()


async def _call(
    rpc: Callable[..., Awaitable[_Response]],
    request: _Request,
    timeout_s: float | None,
    metadata: Mapping[str, str] | None = None,
) -> _Response:
    try:
        return await rpc(request, timeout=timeout_s, metadata=_pairs(metadata))
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def _pairs(metadata: Mapping[str, str] | None) -> list[tuple[str, str]]:
    return list((metadata or {}).items())
