"""API calls of `LLM`, in its event loop; the same for every frontend."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from launcher.offline.frontend import LLMFrontend, Services
from launcher.offline.inputs import GivenPrompt, check_ids
from launcher.offline.run import run_all
from triptych.api.v1 import (
    chat_message_pb2,
    chat_pb2,
    embedding_pb2,
    generate_pb2,
    inference_pb2,
    model_pb2,
    tokenize_pb2,
)

_T = TypeVar("_T")

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
        response: model_pb2.GetModelResponse = await self._call(
            self._services.model.GetModel, model_pb2.GetModelRequest(model=self._model)
        )
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
        found = await run_all(calls, window=_MAX_TOKENIZING, field="prompts", on_answer=_ignore_answer)
        for index, token_ids in enumerate(found):
            check_ids(
                token_ids,
                f"prompts[{index}]",
                vocab_size=model.vocab_size,
                max_model_len=model.max_model_len,
            )
        return found

    async def generate(
        self,
        requests: Sequence[generate_pb2.GenerateRequest],
        on_answer: Callable[[inference_pb2.GenerateUnaryResponse], None],
    ) -> list[inference_pb2.GenerateUnaryResponse]:
        """The responses in order of the requests."""
        calls: list[Callable[[], Awaitable[inference_pb2.GenerateUnaryResponse]]] = []
        for request in requests:
            request.model, request.request_id = self._model, self._next_id()
            request.return_prompt_token_ids = True
            unary = inference_pb2.GenerateUnaryRequest(request=request)
            calls.append(partial(self._call, self._services.inference.GenerateUnary, unary))
        window = _window(request.sampling.n for request in requests)
        return await run_all(calls, window=window, field="prompts", on_answer=on_answer)

    async def chat(
        self,
        requests: Sequence[chat_message_pb2.ChatRequest],
        on_answer: Callable[[chat_pb2.ChatUnaryResponse], None],
    ) -> list[chat_pb2.ChatUnaryResponse]:
        """The responses in order of the conversations."""
        calls: list[Callable[[], Awaitable[chat_pb2.ChatUnaryResponse]]] = []
        for request in requests:
            request.model, request.request_id = self._model, self._next_id()
            request.return_prompt_token_ids = True
            calls.append(
                partial(self._call, self._services.chat.ChatUnary, chat_pb2.ChatUnaryRequest(request=request))
            )
        window = _window(request.sampling.n for request in requests)
        return await run_all(calls, window=window, field="conversations", on_answer=on_answer)

    async def embed(self, request: embedding_pb2.EmbedRequest) -> embedding_pb2.EmbedResponse:
        request.model, request.request_id = self._model, self._next_id()
        response: embedding_pb2.EmbedResponse = await self._call(self._services.embedding.Embed, request)
        return response

    async def classify(self, request: embedding_pb2.ClassifyRequest) -> embedding_pb2.ClassifyResponse:
        request.model, request.request_id = self._model, self._next_id()
        response: embedding_pb2.ClassifyResponse = await self._call(
            self._services.embedding.Classify, request
        )
        return response

    async def score(self, request: embedding_pb2.ScoreRequest) -> embedding_pb2.ScoreResponse:
        request.model, request.request_id = self._model, self._next_id()
        response: embedding_pb2.ScoreResponse = await self._call(self._services.embedding.Score, request)
        return response

    async def _call(self, method: Callable[..., Awaitable[_T]], request: object) -> _T:
        return await self._frontend.call(method, request, self._timeout_s)

    def _next_id(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"


def _window(widths: Iterable[int]) -> int:
    """How many requests may be in flight, given the number of outputs of each."""
    return max(1, MAX_IN_FLIGHT // max(1, max(widths, default=1)))


def _ignore_answer(answer: object) -> None:
    """Tokenizing is too quick to show progress."""
