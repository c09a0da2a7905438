"""EmbeddingService: embeddings, scores and classes of texts, by pooling models."""

from __future__ import annotations

from typing import TypeAlias

import grpc.aio

from frontend_svc.api.calls import caller_of
from frontend_svc.generation.answers.pooling import PoolingAnswers
from triptych.api.v1 import embedding_pb2, embedding_pb2_grpc

EmbedContext: TypeAlias = "grpc.aio.ServicerContext[embedding_pb2.EmbedRequest, embedding_pb2.EmbedResponse]"
ScoreContext: TypeAlias = "grpc.aio.ServicerContext[embedding_pb2.ScoreRequest, embedding_pb2.ScoreResponse]"
RerankContext: TypeAlias = (
    "grpc.aio.ServicerContext[embedding_pb2.RerankRequest, embedding_pb2.RerankResponse]"
)
ClassifyContext: TypeAlias = (
    "grpc.aio.ServicerContext[embedding_pb2.ClassifyRequest, embedding_pb2.ClassifyResponse]"
)


class EmbeddingServicer(embedding_pb2_grpc.EmbeddingServiceServicer):
    def __init__(self, answers: PoolingAnswers) -> None:
        self._answers = answers

    async def Embed(
        self, request: embedding_pb2.EmbedRequest, context: EmbedContext | None = None
    ) -> embedding_pb2.EmbedResponse:
        return await self._answers.embed(request, caller_of(context))

    async def Classify(
        self, request: embedding_pb2.ClassifyRequest, context: ClassifyContext | None = None
    ) -> embedding_pb2.ClassifyResponse:
        return await self._answers.classify(request, caller_of(context))

    async def Score(
        self, request: embedding_pb2.ScoreRequest, context: ScoreContext | None = None
    ) -> embedding_pb2.ScoreResponse:
        return await self._answers.score(request, caller_of(context))

    async def Rerank(
        self, request: embedding_pb2.RerankRequest, context: RerankContext
    ) -> embedding_pb2.RerankResponse:
        return await self._answers.rerank(request, caller_of(context))
