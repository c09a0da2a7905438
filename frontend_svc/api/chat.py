"""ChatService: the next message of a conversation, as a stream and as one response."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TypeAlias

import grpc.aio

from frontend_svc.api.calls import caller_of
from frontend_svc.generation.answers.chat import ChatAnswers
from triptych.api.v1 import chat_message_pb2, chat_pb2, chat_pb2_grpc

ChatContext: TypeAlias = (
    "grpc.aio.ServicerContext[chat_message_pb2.ChatRequest, chat_message_pb2.ChatResponse]"
)
OnceContext: TypeAlias = "grpc.aio.ServicerContext[chat_message_pb2.ChatRequest, chat_pb2.ChatUnaryResponse]"
UnaryContext: TypeAlias = "grpc.aio.ServicerContext[chat_pb2.ChatUnaryRequest, chat_pb2.ChatUnaryResponse]"


class ChatServicer(chat_pb2_grpc.ChatServiceServicer):
    def __init__(self, answers: ChatAnswers) -> None:
        self._answers = answers

    def Chat(
        self, request: chat_message_pb2.ChatRequest, context: ChatContext
    ) -> AsyncGenerator[chat_message_pb2.ChatResponse, None]:
        return self._answers.stream(request, caller_of(context))

    async def ChatUnary(
        self, request: chat_pb2.ChatUnaryRequest, context: UnaryContext
    ) -> chat_pb2.ChatUnaryResponse:
        return await self._answers.whole(request.request, caller_of(context))

    async def ChatOnce(
        self, request: chat_message_pb2.ChatRequest, context: OnceContext | None = None
    ) -> chat_pb2.ChatUnaryResponse:
        return await self._answers.whole(request, caller_of(context))
