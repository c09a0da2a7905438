"""TokenizerService: the model's tokenizer and chat template as requests use them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TypeAlias

import grpc.aio

from frontend_svc.generation.answers.tokenizer import TokenizerAnswers
from triptych.api.v1 import tokenize_pb2, tokenizer_pb2, tokenizer_pb2_grpc

TokenizeContext: TypeAlias = (
    "grpc.aio.ServicerContext[tokenize_pb2.TokenizeRequest, tokenize_pb2.TokenizeResponse]"
)
DetokenizeContext: TypeAlias = (
    "grpc.aio.ServicerContext[tokenize_pb2.DetokenizeRequest, tokenize_pb2.DetokenizeResponse]"
)
TemplateContext: TypeAlias = (
    "grpc.aio.ServicerContext"
    "[tokenizer_pb2.ApplyChatTemplateRequest, tokenizer_pb2.ApplyChatTemplateResponse]"
)
FilesContext: TypeAlias = (
    "grpc.aio.ServicerContext[tokenizer_pb2.GetTokenizerRequest, tokenizer_pb2.GetTokenizerResponse]"
)


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    def __init__(self, answers: TokenizerAnswers) -> None:
        self._answers = answers

    async def Tokenize(
        self, request: tokenize_pb2.TokenizeRequest, context: TokenizeContext | None = None
    ) -> tokenize_pb2.TokenizeResponse:
        return await self._answers.tokenize(request)

    async def Detokenize(
        self, request: tokenize_pb2.DetokenizeRequest, context: DetokenizeContext | None = None
    ) -> tokenize_pb2.DetokenizeResponse:
        return await self._answers.detokenize(request)

    async def ApplyChatTemplate(
        self, request: tokenizer_pb2.ApplyChatTemplateRequest, context: TemplateContext
    ) -> tokenizer_pb2.ApplyChatTemplateResponse:
        return await self._answers.apply_chat_template(request)

    def GetTokenizer(
        self, request: tokenizer_pb2.GetTokenizerRequest, context: FilesContext
    ) -> AsyncGenerator[tokenizer_pb2.GetTokenizerResponse, None]:
        return self._answers.files(request)
