"""ChatService: the next message of a conversation, as a stream and as one response."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeAlias

import grpc.aio

from frontend_svc.api.calls import caller_of
from frontend_svc.api.chat_answer import ChatAnswer, whole_answer
from frontend_svc.api.generate_stream import kind_of
from frontend_svc.api.messages import finished_message, started_message, usage_message
from frontend_svc.generation.caller import Caller
from frontend_svc.generation.generation import Generation, OpenRequest
from frontend_svc.output.collector import OutputKind
from frontend_svc.text.chat.prompt import ChatPrompt
from triptych.api.v1 import chat_message_pb2, chat_pb2, chat_pb2_grpc

ChatContext: TypeAlias = (
    "grpc.aio.ServicerContext[chat_message_pb2.ChatRequest, chat_message_pb2.ChatResponse]"
)
OnceContext: TypeAlias = "grpc.aio.ServicerContext[chat_message_pb2.ChatRequest, chat_pb2.ChatUnaryResponse]"
UnaryContext: TypeAlias = "grpc.aio.ServicerContext[chat_pb2.ChatUnaryRequest, chat_pb2.ChatUnaryResponse]"


class ChatServicer(chat_pb2_grpc.ChatServiceServicer):
    """Renders conversations and generates answers.

    `takes_templates`: whether a request may contain a chat template.
    """

    def __init__(self, generation: Generation, *, takes_templates: bool) -> None:
        self._generation = generation
        self._takes_templates = takes_templates

    def Chat(
        self, request: chat_message_pb2.ChatRequest, context: ChatContext | None = None
    ) -> AsyncGenerator[chat_message_pb2.ChatResponse, None]:
        return self.stream(request, caller_of(context))

    async def ChatUnary(
        self, request: chat_pb2.ChatUnaryRequest, context: UnaryContext
    ) -> chat_pb2.ChatUnaryResponse:
        return await self.whole(request.request, caller_of(context))

    async def ChatOnce(
        self, request: chat_message_pb2.ChatRequest, context: OnceContext | None = None
    ) -> chat_pb2.ChatUnaryResponse:
        return await self.whole(request, caller_of(context))

    async def whole(
        self, request: chat_message_pb2.ChatRequest, caller: Caller
    ) -> chat_pb2.ChatUnaryResponse:
        """The answer to a request of any protocol."""
        async with self._open(request, caller, OutputKind.FINAL_ONLY) as opened:
            output = await opened.next()
            return chat_pb2.ChatUnaryResponse(
                started=started_message(opened, output, returns_ids=request.return_prompt_token_ids),
                outputs=[whole_answer(opened, piece) for piece in output.pieces],
                usage=usage_message(opened, output, output.pieces),
            )

    async def stream(
        self, request: chat_message_pb2.ChatRequest, caller: Caller
    ) -> AsyncGenerator[chat_message_pb2.ChatResponse, None]:
        """The same as it is generated. Closing it aborts the request."""
        kind = kind_of(request.sampling)
        is_cumulative = kind is OutputKind.CUMULATIVE
        # Cumulative answers are assembled here, from parts.
        async with self._open(request, caller, OutputKind.DELTA if is_cumulative else kind) as opened:
            answers: dict[int, ChatAnswer] = {}
            output = await opened.next()
            started = started_message(opened, output, returns_ids=request.return_prompt_token_ids)
            position = 1
            yield chat_message_pb2.ChatResponse(position=position, started=started)
            while True:
                for piece in output.pieces:
                    answer = answers.get(piece.index)
                    if answer is None:
                        answer = ChatAnswer(piece.index, is_cumulative=is_cumulative)
                        answers[piece.index] = answer
                    delta = answer.advance(piece)
                    if delta is not None:
                        position += 1
                        yield chat_message_pb2.ChatResponse(position=position, delta=delta)
                    if piece.ending is not None:
                        position += 1
                        finished = finished_message(opened, output, piece, piece.ending)
                        yield chat_message_pb2.ChatResponse(position=position, finished=finished)
                if output.is_last:
                    return
                output = await opened.next()

    @contextlib.asynccontextmanager
    async def _open(
        self, request: chat_message_pb2.ChatRequest, caller: Caller, kind: OutputKind
    ) -> AsyncIterator[OpenRequest]:
        model = self._generation.model(request.model)
        prompt = ChatPrompt(request, model, takes_templates=self._takes_templates)
        async with self._generation.open(request, prompt, caller, kind) as opened:
            yield opened
