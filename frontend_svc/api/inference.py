"""InferenceService: Generate as a stream, as one response, for many prompts, and resumed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Sequence
from typing import TypeAlias

import grpc.aio

from frontend_svc.api.batch import stream_batch
from frontend_svc.api.calls import caller_of
from frontend_svc.api.generate_stream import stream_generate
from frontend_svc.api.messages import (
    logprobs_message,
    reason_value,
    started_message,
    stats_message,
    stop_match_message,
    usage_message,
)
from frontend_svc.api.resumable import ResumableStreams
from frontend_svc.generation.caller import Caller
from frontend_svc.generation.generation import Generation, OpenRequest
from frontend_svc.output.collector import OutputKind, OutputPiece
from frontend_svc.text.prompt import RequestPrompt
from triptych.api.v1 import generate_pb2, inference_pb2, inference_pb2_grpc
from triptych_kit.errors import InvalidArgument, from_status

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
ResumeContext: TypeAlias = (
    "grpc.aio.ServicerContext[inference_pb2.ResumeRequest, inference_pb2.ResumeResponse]"
)


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, generation: Generation, resumable: ResumableStreams) -> None:
        self._generation = generation
        self._resumable = resumable
        self._stream_of = functools.partial(stream_generate, generation)

    def Generate(
        self, request: generate_pb2.GenerateRequest, context: StreamContext | None = None
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        return self.stream(request, caller_of(context))

    async def GenerateBatch(
        self, request: inference_pb2.GenerateBatchRequest, context: BatchContext
    ) -> AsyncGenerator[inference_pb2.GenerateBatchResponse, None]:
        messages = stream_batch(self._stream_of, request.requests, caller_of(context))
        with self._generation.awaited():
            async with contextlib.aclosing(messages):
                async for message in messages:
                    yield message

    async def Resume(
        self, request: inference_pb2.ResumeRequest, context: ResumeContext
    ) -> AsyncGenerator[inference_pb2.ResumeResponse, None]:
        responses = self.resume(request, caller_of(context))
        async with contextlib.aclosing(responses):
            async for response in responses:
                yield inference_pb2.ResumeResponse(response=response)

    async def GenerateUnary(
        self, request: inference_pb2.GenerateUnaryRequest, context: UnaryContext
    ) -> inference_pb2.GenerateUnaryResponse:
        return await self.whole(request.request, caller_of(context))

    async def GenerateOnce(
        self, request: generate_pb2.GenerateRequest, context: OnceContext | None = None
    ) -> inference_pb2.GenerateUnaryResponse:
        return await self.whole(request, caller_of(context))

    def stream(
        self, request: generate_pb2.GenerateRequest, caller: Caller
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """The answer to a request of any protocol, as it is generated. Closing it aborts the request."""
        start = self._resumable.start if request.orphan_grace_ms > 0 else self._stream_of
        return start(request, caller)

    def resume(
        self, request: inference_pb2.ResumeRequest, caller: Caller
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """The rest of a stream of any protocol."""
        return self._resumable.resume(request, caller)

    async def stream_all(
        self, requests: Sequence[generate_pb2.GenerateRequest], caller: Caller
    ) -> AsyncGenerator[tuple[int, generate_pb2.GenerateResponse], None]:
        """The answers to several requests as they are generated, each with its index.

        Raises the first error of any; the others are aborted.
        """
        async with contextlib.aclosing(stream_batch(self._stream_of, requests, caller)) as messages:
            async for message in messages:
                if message.HasField("error"):
                    error = message.error
                    raise from_status(error.code, error.message, error.details)
                yield message.item_index, message.response

    async def whole(
        self, request: generate_pb2.GenerateRequest, caller: Caller
    ) -> inference_pb2.GenerateUnaryResponse:
        """The whole answer to a request of any protocol."""
        if request.orphan_grace_ms:
            raise InvalidArgument(
                f"orphan_grace_ms is {request.orphan_grace_ms}, must be 0 here: one answer cannot be resumed",
                field="orphan_grace_ms",
            )
        prompt = RequestPrompt(request)
        async with self._generation.open(request, prompt, caller, OutputKind.FINAL_ONLY) as opened:
            output = await opened.next()
            return inference_pb2.GenerateUnaryResponse(
                started=started_message(opened, output, returns_ids=request.return_prompt_token_ids),
                outputs=[_output(opened, piece) for piece in output.pieces],
                usage=usage_message(opened, output, output.pieces),
            )


def _output(opened: OpenRequest, piece: OutputPiece) -> generate_pb2.Output:
    assert piece.ending is not None, "a final output has ended"
    whole = generate_pb2.Output(
        output_index=piece.index,
        text=piece.text,
        token_ids=piece.token_ids,
        logprobs=logprobs_message(piece.logprobs),
        reason=reason_value(piece.ending),
        stop_match=stop_match_message(piece.ending),
        cumulative_logprob=piece.cumulative_logprob,
        error_message=piece.ending.message,
        stats=stats_message(opened, piece.index),
    )
    opened.fill(whole, piece.index)
    return whole
