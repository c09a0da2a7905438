"""An inference service that answers with as many tokens as it was asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from triptych.api.v1 import generate_pb2, inference_pb2_grpc


class CountingInference(inference_pb2_grpc.InferenceServiceServicer):
    """Sends `max_tokens` less `missing` tokens, two in a message, and remembers the requests."""

    def __init__(self, missing: int = 0) -> None:
        """No request was seen yet."""
        self._missing = missing
        self.requests: list[generate_pb2.GenerateRequest] = []

    async def Generate(
        self, request: generate_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        """Stream the tokens 0, 1, 2, ..."""
        self.requests.append(request)
        ids = list(range(request.sampling.max_tokens - self._missing))
        yield generate_pb2.GenerateResponse(started=generate_pb2.Started(request_id="1"))
        for start in range(0, len(ids), 2):
            yield generate_pb2.GenerateResponse(delta=generate_pb2.Delta(token_ids=ids[start : start + 2]))
        yield generate_pb2.GenerateResponse(finished=generate_pb2.Finished())
