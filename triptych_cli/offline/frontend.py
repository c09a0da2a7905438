"""The frontends of `LLM`: one elsewhere, or the objects of one in this process, over an engine of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from frontend_svc.build import build_frontend
from frontend_svc.config import FrontendConfig
from frontend_svc.engines.connection.client import EngineState
from frontend_svc.process.frontend import Frontend
from triptych.api.v1 import (
    chat_pb2_grpc,
    embedding_pb2_grpc,
    inference_pb2_grpc,
    model_pb2_grpc,
    tokenizer_pb2_grpc,
)
from triptych_cli.client_channel import open_client_channel
from triptych_cli.engines.own_engine import EngineDead, OwnEngine
from triptych_kit.errors import DeadlineExceeded, Unavailable, rpc_errors_translated

_T = TypeVar("_T")

# `LLM` limits its requests in flight itself, so the frontend's queue must not add a limit.
_NO_LIMIT = 2**31 - 1
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Services:
    """The public API: stubs, or servicers, whose unary methods are called in the same way."""

    inference: Any
    chat: Any
    embedding: Any
    tokenizer: Any
    model: Any


class RemoteFrontend:
    """A frontend elsewhere. It may come back, so `death` never resolves; otherwise as `LocalFrontend`."""

    def __init__(self, address: str, *, start_timeout_s: float) -> None:
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._channel = open_client_channel(address)
        self._address = address
        self._start_timeout_s = start_timeout_s

    async def start(self) -> Services:
        channel = self._channel
        try:
            await asyncio.wait_for(channel.channel_ready(), self._start_timeout_s)
        except TimeoutError as error:
            raise Unavailable(
                f"no frontend was reached at {self._address} within {self._start_timeout_s:g} s"
            ) from error
        return Services(
            inference_pb2_grpc.InferenceServiceStub(channel),
            chat_pb2_grpc.ChatServiceStub(channel),
            embedding_pb2_grpc.EmbeddingServiceStub(channel),
            tokenizer_pb2_grpc.TokenizerServiceStub(channel),
            model_pb2_grpc.ModelServiceStub(channel),
        )

    async def call(
        self, method: Callable[..., Awaitable[_T]], request: object, timeout_s: float | None
    ) -> _T:
        with rpc_errors_translated():
            return await method(request, timeout=timeout_s)

    async def close(self) -> None:
        await self._channel.close(None)


class LocalFrontend:
    """A frontend without servers in this process, and the engine that it uses.

    `death` resolves to the reason when the engine has ended for good.
    """

    def __init__(
        self, engine: OwnEngine, *, tokenizer: str | None, max_logprobs: int, start_timeout_s: float
    ) -> None:
        self.death = engine.death
        self._engine = engine
        self._max_logprobs = max_logprobs
        self._tokenizer = tokenizer
        self._start_timeout_s = start_timeout_s
        self._frontend: Frontend | None = None

    async def start(self) -> Services:
        """Load the engine, then connect the frontend to it."""
        await self._engine.start()
        config = FrontendConfig(
            engine=(self._engine.address,),
            tokenizer=self._tokenizer,
            max_logprobs=self._max_logprobs,
            max_queued_requests=_NO_LIMIT,
            max_queued_prompt_tokens=_NO_LIMIT,
        )
        self._frontend = frontend = build_frontend(config, connect=self._engine.connect)
        frontend.connect(address="")
        async with asyncio.timeout(self._start_timeout_s):
            await self._until_ready(frontend)
        api = frontend.api
        return Services(api.inference, api.chat, api.embedding, api.tokenizer, api.model)

    async def call(
        self, method: Callable[..., Awaitable[_T]], request: object, timeout_s: float | None
    ) -> _T:
        try:
            async with asyncio.timeout(timeout_s):
                return await method(request)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer within timeout_s, {timeout_s} s") from error

    async def close(self) -> None:
        """End the frontend, then the engine."""
        if self._frontend is not None:
            await self._frontend.close()
        await self._engine.close()

    async def _until_ready(self, frontend: Frontend) -> None:
        while not frontend.engines.directory.is_ready:
            if self.death.done():
                raise EngineDead(self.death.result())
            for client in frontend.engines.directory.clients():
                # The engine runs, so a retry would fail for the same reason, e.g. a missing tokenizer.
                if client.state is EngineState.DOWN and client.down_reason:
                    raise Unavailable(client.down_reason)
            await asyncio.sleep(_LOOK_S)


LLMFrontend = RemoteFrontend | LocalFrontend
