"""The routes of Anthropic's Messages API: a message is a chat. Its clients name a version in a header."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from frontend_svc.generation.answers.chat import ChatAnswers, delta_of
from frontend_svc.generation.answers.models import ModelAnswers
from frontend_svc.generation.answers.tokenizer import TokenizerAnswers
from frontend_svc.protocols.anthropic.errors import event_of
from frontend_svc.protocols.anthropic.message import GrowingMessage
from frontend_svc.protocols.anthropic.requests import MessageRequest, MessagesBody, message_request
from frontend_svc.protocols.openai.call import (
    Handler,
    body_of,
    caller_of,
    choose_rank,
    json_response,
    streamed,
    unless_disconnected,
)
from triptych.api.v1 import chat_message_pb2, model_pb2

VERSION_HEADER = "anthropic-version"
# Of the header anthropic-beta: arguments of calls are streamed before they are known to be whole.
_EAGER_BETA = "fine-grained-tool-streaming"


class MessageRoutes:
    def __init__(self, chat: ChatAnswers, tokenizer: TokenizerAnswers, models: ModelAnswers) -> None:
        self._chat, self._tokenizer, self._models = chat, tokenizer, models
        self.posts: dict[str, Handler] = {
            "/v1/messages": self._create,
            "/v1/messages/count_tokens": self._count_tokens,
        }

    async def _create(self, request: Request) -> Response:
        body, made = await self._read(request)
        caller = caller_of(request)
        if body.stream:
            is_eager = made.is_eager or _EAGER_BETA in request.headers.get("anthropic-beta", "")
            responses = self._chat.stream(made.chat, caller, streams_arguments=is_eager)
            return await streamed(request, _events(responses), made.ignored)
        answer = await unless_disconnected(request, self._chat.whole(made.chat, caller))
        message = GrowingMessage()
        message.start(answer.started)
        (output,) = answer.outputs
        message.advance(delta_of(output))
        message.finish(output, answer.usage)
        return json_response(message.body(), made.ignored)

    async def _count_tokens(self, request: Request) -> Response:
        _, made = await self._read(request)
        num_tokens = await unless_disconnected(request, self._tokenizer.count(made.chat))
        return json_response({"input_tokens": num_tokens}, made.ignored)

    async def _read(self, request: Request) -> tuple[MessagesBody, MessageRequest]:
        body, ignored = await body_of(request, MessagesBody)
        made = message_request(body, ignored, reasons=functools.partial(self._models.reasons, body.model))
        request.state.name_of = made.names
        choose_rank(request, [made.chat])
        return body, made


async def _events(
    responses: AsyncGenerator[chat_message_pb2.ChatResponse, None],
) -> AsyncGenerator[bytes, None]:
    message = GrowingMessage()
    async with contextlib.aclosing(responses):
        async for response in responses:
            kind = response.WhichOneof("event")
            if kind == "started":
                events = message.start(response.started)
            elif kind == "delta":
                events = message.advance(response.delta)
            else:
                events = message.finish(response.finished, response.finished.usage)
            for event in events:
                yield event_of(event)


def model_list(models: Sequence[model_pb2.Model], created: int) -> dict[str, Any]:
    infos = [model_info(model, created) for model in models]
    ids = [info["id"] for info in infos] or [None]
    return {"data": infos, "first_id": ids[0], "last_id": ids[-1], "has_more": False}


def model_info(model: model_pb2.Model, created: int) -> dict[str, Any]:
    created_at = datetime.fromtimestamp(created, UTC).isoformat()
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": created_at.replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len,
    }
