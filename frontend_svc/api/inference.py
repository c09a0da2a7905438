"""InferenceService: Generate as a stream and in one answer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import TypeAlias

import grpc.aio

from frontend_svc.api.calls import caller_of
from frontend_svc.api.generate_stream import stream_generate
from frontend_svc.api.messages import (
    logprobs_message,
    reason_value,
    started_message,
    stop_match_message,
    usage_message,
)
from frontend_svc.generation import Generation
from frontend_svc.output.collector import OutputKind, OutputPiece
from frontend_svc.text.prompt import RequestPrompt
from frontend_svc.tracing import RequestTrace
from triptych.api.v1 import generate_pb2, inference_pb2, inference_pb2_grpc

StreamContext: TypeAlias = (
    "grpc.aio.ServicerContext[generate_pb2.GenerateRequest, generate_pb2.GenerateResponse]"
)
UnaryContext: TypeAlias = (
    "grpc.aio.ServicerContext[inference_pb2.GenerateUnaryRequest, inference_pb2.GenerateUnaryResponse]"
)


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Hands requests to the core and their outputs to clients."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def Generate(
        self, request: generate_pb2.GenerateRequest, context: StreamContext
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """Stream the outputs of one prompt: started, deltas, finished."""
        async with contextlib.aclosing(
            stream_generate(self._generation, request, caller_of(context))
        ) as responses:
            async for response in responses:
                yield response

    async def GenerateUnary(
        self, request: inference_pb2.GenerateUnaryRequest, context: UnaryContext
    ) -> inference_pb2.GenerateUnaryResponse:
        """Answer once, with all outputs of one prompt."""
        asked, caller = request.request, caller_of(context)
        trace = RequestTrace(asked.request_id or caller.request_id, caller.traceparent, caller.tracestate)
        prompt = RequestPrompt(asked)
        async with self._generation.open(asked, prompt, caller, OutputKind.FINAL_ONLY, trace) as opened:
            output = await opened.next()
            return inference_pb2.GenerateUnaryResponse(
                started=started_message(opened, output, returns_ids=asked.return_prompt_token_ids),
                outputs=[_whole(piece) for piece in output.pieces],
                usage=usage_message(opened, output, output.pieces),
            )


def _whole(piece: OutputPiece) -> inference_pb2.Output:
    assert piece.ending is not None, "a final output has ended"
    return inference_pb2.Output(
        output_index=piece.index,
        text=piece.text,
        token_ids=piece.token_ids,
        logprobs=logprobs_message(piece.logprobs),
        reason=reason_value(piece.ending),
        stop_match=stop_match_message(piece.ending),
        cumulative_logprob=piece.cumulative_logprob,
    )
