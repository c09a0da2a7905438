"""API calls of `LLM`, in its event loop; the same for every frontend."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from triptych.api.v1 import (
    chat_message_pb2,
    chat_pb2,
    embedding_pb2,
    generate_pb2,
    inference_pb2,
    model_pb2,
    tokenize_pb2,
)
from triptych_cli.offline.frontend import LLMFrontend, Services
from triptych_cli.offline.inputs import GivenPrompt, check_ids
from triptych_cli.offline.run import run_all
from triptych_cli.offline.session import SessionCall

_T = TypeVar("_T")

PoolingRequest = embedding_pb2.EmbedRequest | embedding_pb2.ClassifyRequest | embedding_pb2.ScoreRequest

# Enough to keep the largest batches full; the engine queues requests that it cannot run yet.
MAX_IN_FLIGHT = 1024
_MAX_TOKENIZING = 64


class LLMCalls:
    """The services of a started frontend, for one model; "" means the only one that is served."""

    def __init__(
        self, frontend: LLMFrontend, services: Services, model: str, *, timeout_s: float | None
    ) -> None:
        self._frontend = frontend
        self._services = services
        self._model = model
        self._timeout_s = timeout_s
        # Request ids must be unique among all clients of a frontend.
        self._prefix = f"llm-{secrets.token_hex(6)}"
        self._numbers = itertools.count(1)

    async def describe(self) -> model_pb2.Model:
        request = model_pb2.GetModelRequest(model=self._model)
        response: model_pb2.GetModelResponse = await self._call(self._services.model.GetModel, request)
        return response.model

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        request = tokenize_pb2.TokenizeRequest(
            model=self._model, text=text, add_special_tokens=add_special_tokens
        )
        response: tokenize_pb2.TokenizeResponse = await self._call(self._services.tokenizer.Tokenize, request)
        return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        request = tokenize_pb2.DetokenizeRequest(
            model=self._model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        response: tokenize_pb2.DetokenizeResponse = await self._call(
            self._services.tokenizer.Detokenize, request
        )
        return response.text

    async def prompt_ids(
        self, prompts: Sequence[GivenPrompt], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """The ids of every prompt, checked against the model's limits."""
        model = await self.describe()

        async def ids_of(prompt: GivenPrompt) -> list[int]:
            if prompt.text is None:
                return list(prompt.token_ids)
            return await self.tokenize(prompt.text, add_special_tokens=add_special_tokens)

        calls = [partial(ids_of, prompt) for prompt in prompts]
        id_lists = await run_all(calls, window=_MAX_TOKENIZING, field="prompts", on_answer=_ignore_answer)
        for index, token_ids in enumerate(id_lists):
            check_ids(
                token_ids,
                f"prompts[{index}]",
                vocab_size=model.vocab_size,
                max_model_len=model.max_model_len,
            )
        return id_lists

    async def generate(
        self,
        requests: Sequence[generate_pb2.GenerateRequest],
        on_answer: Callable[[inference_pb2.GenerateUnaryResponse], None],
    ) -> list[inference_pb2.GenerateUnaryResponse]:
        """The responses in order of the requests."""
        return await self._answer_all(self._services.inference.GenerateOnce, requests, "prompts", on_answer)

    async def chat(
        self,
        requests: Sequence[chat_message_pb2.ChatRequest],
        on_answer: Callable[[chat_pb2.ChatUnaryResponse], None],
    ) -> list[chat_pb2.ChatUnaryResponse]:
        """The responses in order of the conversations."""
        return await self._answer_all(self._services.chat.ChatOnce, requests, "conversations", on_answer)

    def session(
        self, while_alive: Callable[[Coroutine[Any, Any, None]], Coroutine[Any, Any, None]]
    ) -> SessionCall:
        """A call of GenerateSession, which ends with the engine."""
        return SessionCall(self._services.inference.GenerateSession, while_alive, self._timeout_s)

    def session_request(self, *, adapter: str, priority: int) -> generate_pb2.GenerateRequest:
        """The first request of a session, without its input."""
        return generate_pb2.GenerateRequest(
            model=self._model,
            request_id=self._next_id(),
            adapter=adapter,
            priority=priority,
            return_prompt_token_ids=True,
        )

    async def pool(self, method: str, request: PoolingRequest) -> Any:
        """The response of a method of the EmbeddingService."""
        request.model, request.request_id = self._model, self._next_id()
        return await self._call(getattr(self._services.embedding, method), request)

    async def _answer_all(
        self,
        method: Callable[..., Awaitable[_T]],
        requests: Sequence[generate_pb2.GenerateRequest | chat_message_pb2.ChatRequest],
        field: str,
        on_answer: Callable[[_T], None],
    ) -> list[_T]:
        calls = []
        for request in requests:
            request.model, request.request_id = self._model, self._next_id()
            request.return_prompt_token_ids = True
            calls.append(partial(self._call, method, request))
        widest = max((request.sampling.n for request in requests), default=1)
        window = max(1, MAX_IN_FLIGHT // max(1, widest))
        return await run_all(calls, window=window, field=field, on_answer=on_answer)

    async def _call(self, method: Callable[..., Awaitable[_T]], request: object) -> _T:
        return await self._frontend.call(method, request, self._timeout_s)

    def _next_id(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"


def _ignore_answer(answer: object) -> None:
    """Tokenizing is too quick to show progress."""
