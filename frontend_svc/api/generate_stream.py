"""The messages of one Generate stream, whoever reads it: the call itself, a batch, or one that may resume."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from frontend_svc.api.messages import fill_logprobs, finished_message, started_message
from frontend_svc.generation import Caller, Generation
from frontend_svc.output.collector import OutputKind, OutputPiece
from frontend_svc.text.prompt import RequestPrompt
from frontend_svc.tracing import RequestTrace
from triptych.api.v1 import generate_pb2
from triptych.common.v1 import sampling_pb2

_KINDS = {
    sampling_pb2.OUTPUT_KIND_CUMULATIVE: OutputKind.CUMULATIVE,
    sampling_pb2.OUTPUT_KIND_FINAL_ONLY: OutputKind.FINAL_ONLY,
}


def kind_of(sampling: sampling_pb2.SamplingParams) -> OutputKind:
    """What each message is to carry."""
    return _KINDS.get(sampling.output_kind, OutputKind.DELTA)


async def stream_generate(
    generation: Generation, request: generate_pb2.GenerateRequest, caller: Caller
) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
    """Started, deltas, and one finished for each output, numbered from 1. Closing it aborts the request."""
    trace = RequestTrace(request.request_id or caller.request_id, caller.traceparent, caller.tracestate)
    prompt, kind = RequestPrompt(request), kind_of(request.sampling)
    async with generation.open(request, prompt, caller, kind, trace) as opened:
        output = await opened.next()
        started = started_message(opened, output, returns_ids=request.return_prompt_token_ids)
        position = 1
        yield generate_pb2.GenerateResponse(position=position, started=started)
        while True:
            for piece in output.pieces:
                if piece.token_ids or piece.text:
                    position += 1
                    yield _delta_response(position, piece)
                if piece.ending is not None:
                    position += 1
                    finished = finished_message(opened, output, piece, piece.ending)
                    yield generate_pb2.GenerateResponse(position=position, finished=finished)
            if output.is_last:
                return
            output = await opened.next()


def _delta_response(position: int, piece: OutputPiece) -> generate_pb2.GenerateResponse:
    response = generate_pb2.GenerateResponse(position=position)
    # Filled in place: a message given to the constructor of another is copied.
    delta = response.delta
    delta.SetInParent()
    delta.output_index = piece.index
    delta.text = piece.text
    delta.token_ids.extend(piece.token_ids)
    if piece.logprobs is not None:
        fill_logprobs(delta.logprobs, piece.logprobs)
    return response
