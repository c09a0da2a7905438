"""ModelService: the served models, and this frontend with its engines."""

from __future__ import annotations

from typing import TypeAlias

import grpc.aio

from frontend_svc.generation.answers.models import ModelAnswers
from triptych.api.v1 import model_pb2, model_pb2_grpc

ListContext: TypeAlias = "grpc.aio.ServicerContext[model_pb2.ListModelsRequest, model_pb2.ListModelsResponse]"
GetContext: TypeAlias = "grpc.aio.ServicerContext[model_pb2.GetModelRequest, model_pb2.GetModelResponse]"
InfoContext: TypeAlias = (
    "grpc.aio.ServicerContext[model_pb2.GetServerInfoRequest, model_pb2.GetServerInfoResponse]"
)


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    def __init__(self, answers: ModelAnswers) -> None:
        self._answers = answers

    async def ListModels(
        self, request: model_pb2.ListModelsRequest, context: ListContext
    ) -> model_pb2.ListModelsResponse:
        return self._answers.all()

    async def GetModel(
        self, request: model_pb2.GetModelRequest, context: GetContext | None = None
    ) -> model_pb2.GetModelResponse:
        return model_pb2.GetModelResponse(model=self._answers.one(request.model))

    async def GetServerInfo(
        self, request: model_pb2.GetServerInfoRequest, context: InfoContext
    ) -> model_pb2.GetServerInfoResponse:
        return self._answers.server_info()
