"""TokenizerService: the model's tokenizer as requests use it."""

from __future__ import annotations

from typing import TypeAlias

import grpc.aio

from frontend_svc.engines.directory import Directory
from frontend_svc.text.limits import Violations
from frontend_svc.text.prompt import check_text
from frontend_svc.text.sampling import check_token_ids
from triptych.api.v1 import tokenize_pb2, tokenizer_pb2_grpc

TokenizeContext: TypeAlias = (
    "grpc.aio.ServicerContext[tokenize_pb2.TokenizeRequest, tokenize_pb2.TokenizeResponse]"
)
DetokenizeContext: TypeAlias = (
    "grpc.aio.ServicerContext[tokenize_pb2.DetokenizeRequest, tokenize_pb2.DetokenizeResponse]"
)


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Tokenizes and detokenizes for clients."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    async def Tokenize(
        self, request: tokenize_pb2.TokenizeRequest, context: TokenizeContext
    ) -> tokenize_pb2.TokenizeResponse:
        """The tokens of a text."""
        model = self._directory.model(request.model)
        has_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        check_text("text", request.text, model)
        response = tokenize_pb2.TokenizeResponse(max_model_len=model.max_model_len)
        if not request.return_tokens:
            response.token_ids[:] = await model.tokenizer.encode(request.text, add_special_tokens=has_special)
            return response
        encoded = await model.tokenizer.encode_with_places(request.text, add_special_tokens=has_special)
        response.token_ids[:] = encoded.ids
        response.tokens.extend(encoded.tokens)
        response.start_offsets.extend(start for start, _ in encoded.offsets)
        response.end_offsets.extend(end for _, end in encoded.offsets)
        return response

    async def Detokenize(
        self, request: tokenize_pb2.DetokenizeRequest, context: DetokenizeContext
    ) -> tokenize_pb2.DetokenizeResponse:
        """The text of tokens, at most as many as the model takes."""
        model = self._directory.model(request.model)
        violations = Violations()
        violations.need_count("token_ids", len(request.token_ids), "ids", 0, model.max_model_len)
        check_token_ids("token_ids", list(request.token_ids), model.vocab_size, violations)
        violations.raise_if_any()
        text = await model.tokenizer.decode(
            request.token_ids, skip_special_tokens=request.skip_special_tokens
        )
        return tokenize_pb2.DetokenizeResponse(text=text)
