"""InferenceService: Generate as a stream and in one answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TypeAlias

import grpc.aio

from frontend_svc.api.calls import caller_of
from frontend_svc.generation import Caller, Generation, OpenRequest
from frontend_svc.output.collector import Ending, EndReason, Output, OutputKind
from frontend_svc.tracing import RequestTrace
from triptych.api.v1 import generate_pb2, inference_pb2, inference_pb2_grpc
from triptych.common.v1 import output_pb2, sampling_pb2

_KINDS = {
    sampling_pb2.OUTPUT_KIND_CUMULATIVE: OutputKind.CUMULATIVE,
    sampling_pb2.OUTPUT_KIND_FINAL_ONLY: OutputKind.FINAL_ONLY,
}
_REASONS = {
    EndReason.STOP: output_pb2.FINISH_REASON_STOP,
    EndReason.LENGTH: output_pb2.FINISH_REASON_LENGTH,
    EndReason.ABORT: output_pb2.FINISH_REASON_ABORT,
    EndReason.ERROR: output_pb2.FINISH_REASON_ERROR,
    EndReason.REPETITION: output_pb2.FINISH_REASON_REPETITION,
}

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
        """Stream the output of one prompt: started, deltas, finished."""
        caller = caller_of(context)
        trace = _new_trace(request, caller)
        kind = _KINDS.get(request.sampling.output_kind, OutputKind.DELTA)
        async with self._generation.open(request, caller, kind, trace) as opened:
            output = await opened.next()
            started = _started(opened, output, request.return_prompt_token_ids)
            yield generate_pb2.GenerateResponse(position=1, started=started)
            position = 1
            while True:
                if output.token_ids or output.text:
                    position += 1
                    delta = generate_pb2.Delta(text=output.text, token_ids=output.token_ids)
                    yield generate_pb2.GenerateResponse(position=position, delta=delta)
                if output.ending is not None:
                    finished = _finished(opened, output, output.ending)
                    yield generate_pb2.GenerateResponse(position=position + 1, finished=finished)
                    return
                output = await opened.next()

    async def GenerateUnary(
        self, request: inference_pb2.GenerateUnaryRequest, context: UnaryContext
    ) -> inference_pb2.GenerateUnaryResponse:
        """Answer once, with the whole output of one prompt."""
        caller = caller_of(context)
        trace = _new_trace(request.request, caller)
        async with self._generation.open(request.request, caller, OutputKind.FINAL_ONLY, trace) as opened:
            output = await opened.next()
            assert output.ending is not None, "a final output is the last"
            answer = _whole(output, output.ending)
            return inference_pb2.GenerateUnaryResponse(
                started=_started(opened, output, request.request.return_prompt_token_ids),
                outputs=[answer],
                usage=_usage(opened, output),
            )


def _new_trace(request: generate_pb2.GenerateRequest, caller: Caller) -> RequestTrace:
    return RequestTrace(request.request_id or caller.request_id, caller.traceparent, caller.tracestate)


def _started(opened: OpenRequest, output: Output, returns_ids: bool) -> generate_pb2.Started:
    return generate_pb2.Started(
        request_id=opened.request_id,
        num_prompt_tokens=len(opened.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
        prompt_token_ids=opened.prompt_token_ids if returns_ids else (),
        model=opened.model,
    )


def _finished(opened: OpenRequest, output: Output, ending: Ending) -> generate_pb2.Finished:
    return generate_pb2.Finished(
        reason=_REASONS[ending.reason], stop_match=_stop_match(ending), usage=_usage(opened, output)
    )


def _whole(output: Output, ending: Ending) -> inference_pb2.Output:
    return inference_pb2.Output(
        text=output.text,
        token_ids=output.token_ids,
        reason=_REASONS[ending.reason],
        stop_match=_stop_match(ending),
    )


def _stop_match(ending: Ending) -> output_pb2.StopMatch | None:
    if ending.stop_string is not None:
        return output_pb2.StopMatch(string=ending.stop_string)
    if ending.eos_token_id is not None:
        return output_pb2.StopMatch(eos=ending.eos_token_id)
    if ending.stop_token_id is not None:
        return output_pb2.StopMatch(token_id=ending.stop_token_id)
    return None


def _usage(opened: OpenRequest, output: Output) -> output_pb2.Usage:
    return output_pb2.Usage(
        num_prompt_tokens=len(opened.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
        num_completion_tokens=output.num_output_tokens,
    )
