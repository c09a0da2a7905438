"""InferenceService: Generate as a stream, as one response, for many prompts, in turns, and resumed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeAlias

import grpc.aio

from frontend_svc.api.calls import caller_of
from frontend_svc.generation.answers.generate import GenerateAnswers
from frontend_svc.generation.answers.session import SessionAnswers
from triptych.api.v1 import generate_pb2, inference_pb2, inference_pb2_grpc

StreamContext: TypeAlias = (
    "grpc.aio.ServicerContext[generate_pb2.GenerateRequest, generate_pb2.GenerateResponse]"
)
OnceContext: TypeAlias = (
    "grpc.aio.ServicerContext[generate_pb2.GenerateRequest, inference_pb2.GenerateUnaryResponse]"
)
UnaryContext: TypeAlias = (
    "grpc.aio.ServicerContext[inference_pb2.GenerateUnaryRequest, inference_pb2.GenerateUnaryResponse]"
)
BatchContext: TypeAlias = (
    "grpc.aio.ServicerContext[inference_pb2.GenerateBatchRequest, inference_pb2.GenerateBatchResponse]"
)
SessionContext: TypeAlias = (
    "grpc.aio.ServicerContext[inference_pb2.GenerateSessionRequest, inference_pb2.GenerateSessionResponse]"
)
ResumeContext: TypeAlias = (
    "grpc.aio.ServicerContext[inference_pb2.ResumeRequest, inference_pb2.ResumeResponse]"
)


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, answers: GenerateAnswers, sessions: SessionAnswers) -> None:
        self._answers = answers
        self._sessions = sessions

    def Generate(
        self, request: generate_pb2.GenerateRequest, context: StreamContext
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        return self._answers.stream(request, caller_of(context))

    def GenerateBatch(
        self, request: inference_pb2.GenerateBatchRequest, context: BatchContext
    ) -> AsyncGenerator[inference_pb2.GenerateBatchResponse, None]:
        return self._answers.batch(request.requests, caller_of(context))

    def GenerateSession(
        self,
        requests: AsyncIterator[inference_pb2.GenerateSessionRequest],
        context: SessionContext | None = None,
    ) -> AsyncGenerator[inference_pb2.GenerateSessionResponse, None]:
        return self._sessions.stream(requests, caller_of(context))

    async def Resume(
        self, request: inference_pb2.ResumeRequest, context: ResumeContext
    ) -> AsyncGenerator[inference_pb2.ResumeResponse, None]:
        async with contextlib.aclosing(self._answers.resume(request, caller_of(context))) as responses:
            async for response in responses:
                yield inference_pb2.ResumeResponse(response=response)

    async def GenerateUnary(
        self, request: inference_pb2.GenerateUnaryRequest, context: UnaryContext
    ) -> inference_pb2.GenerateUnaryResponse:
        return await self._answers.whole(request.request, caller_of(context))

    async def GenerateOnce(
        self, request: generate_pb2.GenerateRequest, context: OnceContext | None = None
    ) -> inference_pb2.GenerateUnaryResponse:
        return await self._answers.whole(request, caller_of(context))
