"""A frontend that answers from a script, over real gRPC on a port that the kernel chose."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from triptych.api.v1 import (
    generate_pb2,
    inference_pb2,
    inference_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    request_pb2,
    request_pb2_grpc,
    tokenize_pb2,
    tokenizer_pb2_grpc,
)
from triptych.common.v1 import output_pb2

STREAM_FOREVER = "forever"
REFUSED = "refused"
ENDS_BADLY = "ends badly"


@dataclass
class FakeFrontend(
    inference_pb2_grpc.InferenceServiceServicer,
    tokenizer_pb2_grpc.TokenizerServiceServicer,
    model_pb2_grpc.ModelServiceServicer,
    request_pb2_grpc.RequestServiceServicer,
):
    """Answers with the prompt's words; keeps what it was asked, and whether a stream was cancelled."""

    requests: list[generate_pb2.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    num_failures_left: int = 0
    retry_after_ms: int | None = None  # what a failure asks for; it is then RESOURCE_EXHAUSTED
    cancelled: threading.Event = field(default_factory=threading.Event)

    def Generate(
        self, request: generate_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generate_pb2.GenerateResponse]:
        """Started, one delta a word, finished; without an end for STREAM_FOREVER, a status for REFUSED."""
        self._record(request, context)
        for position, response in enumerate(self._responses(request, context), start=1):
            response.position = position
            yield response

    def _responses(
        self, request: generate_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generate_pb2.GenerateResponse]:
        yield generate_pb2.GenerateResponse(started=_started(request))
        if request.prompt == STREAM_FOREVER:
            if not context.add_callback(self.cancelled.set):
                # It was over before it began here, and there is no callback.
                self.cancelled.set()
            yield generate_pb2.GenerateResponse(delta=generate_pb2.Delta(text="a", token_ids=[1]))
            self.cancelled.wait()
            return
        if request.prompt == ENDS_BADLY:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is gone")
        yield generate_pb2.GenerateResponse()
        for index, word in enumerate(request.prompt.split()):
            yield generate_pb2.GenerateResponse(delta=generate_pb2.Delta(text=word, token_ids=[index]))
        yield generate_pb2.GenerateResponse(delta=generate_pb2.Delta(output_index=1, text="other"))
        yield generate_pb2.GenerateResponse(finished=_finished(request))

    def GenerateOnce(
        self, request: generate_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> inference_pb2.GenerateUnaryResponse:
        """The whole prompt as the text of one output."""
        self._record(request, context)
        end = _finished(request)
        output = generate_pb2.Output(
            text=request.prompt, token_ids=[0, 1], reason=end.reason, stop_match=end.stop_match
        )
        return inference_pb2.GenerateUnaryResponse(
            started=_started(request), outputs=[output], usage=end.usage
        )

    def Tokenize(
        self, request: tokenize_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> tokenize_pb2.TokenizeResponse:
        """One id a character, after a 0 that stands for the special tokens."""
        self._fail_if_due(context)
        is_bare = request.HasField("add_special_tokens") and not request.add_special_tokens
        special = [] if is_bare else [0]
        return tokenize_pb2.TokenizeResponse(token_ids=special + [ord(letter) for letter in request.text])

    def Detokenize(
        self, request: tokenize_pb2.DetokenizeRequest, context: grpc.ServicerContext
    ) -> tokenize_pb2.DetokenizeResponse:
        return tokenize_pb2.DetokenizeResponse(text="".join(chr(id_) for id_ in request.token_ids if id_))

    def Abort(
        self, request: request_pb2.AbortRequest, context: grpc.ServicerContext
    ) -> request_pb2.AbortResponse:
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata()})
        return request_pb2.AbortResponse()

    def ListModels(
        self, request: model_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> model_pb2.ListModelsResponse:
        return model_pb2.ListModelsResponse(models=[model_pb2.Model(name="tiny", max_model_len=128)])

    def GetServerInfo(
        self, request: model_pb2.GetServerInfoRequest, context: grpc.ServicerContext
    ) -> model_pb2.GetServerInfoResponse:
        return model_pb2.GetServerInfoResponse(version="1.2.3")

    def _record(self, request: generate_pb2.GenerateRequest, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata()})
        # As a frontend does, before it knows whether it takes the request.
        context.send_initial_metadata((("x-request-id", "the-call"), ("x-trace-id", "the-trace")))
        self._fail_if_due(context)
        if request.prompt == REFUSED:
            context.abort_with_status(rpc_status.to_status(_refusal()))

    def _fail_if_due(self, context: grpc.ServicerContext) -> None:
        if not self.num_failures_left:
            return
        self.num_failures_left -= 1
        if self.retry_after_ms is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "no engine yet")
        detail = any_pb2.Any()
        seconds, ms = divmod(self.retry_after_ms, 1000)
        delay = duration_pb2.Duration(seconds=seconds, nanos=ms * 10**6)
        detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        full = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="full", details=[detail])
        context.abort_with_status(rpc_status.to_status(full))


@contextmanager
def serve(frontend: FakeFrontend, *, ready: bool = True) -> Iterator[str]:
    """Serve `frontend` and yield the address it listens on."""
    checks = health.HealthServicer()
    state = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
    checks.set("triptych.api.v1.InferenceService", state)
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(frontend, server)
    tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(frontend, server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(frontend, server)
    request_pb2_grpc.add_RequestServiceServicer_to_server(frontend, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait()


def _started(request: generate_pb2.GenerateRequest) -> generate_pb2.Started:
    return generate_pb2.Started(
        request_id=request.request_id or "made-here",
        model="tiny",
        num_prompt_tokens=7,
        num_cached_tokens=3,
        prompt_token_ids=request.token_ids.ids,
        resume_token="token" if request.orphan_grace_ms else "",
    )


def _finished(request: generate_pb2.GenerateRequest) -> generate_pb2.Finished:
    usage = output_pb2.Usage(num_prompt_tokens=7, num_cached_tokens=3, num_completion_tokens=2)
    if not request.sampling.stop:
        return generate_pb2.Finished(reason=output_pb2.FINISH_REASON_LENGTH, usage=usage)
    match = output_pb2.StopMatch(string=request.sampling.stop[0])
    return generate_pb2.Finished(reason=output_pb2.FINISH_REASON_STOP, stop_match=match, usage=usage)


def _refusal() -> status_pb2.Status:
    violation = error_details_pb2.BadRequest.FieldViolation(
        field="sampling.temperature", description="temperature is nan, the limit is 0 to 2"
    )
    details = [any_pb2.Any() for _ in range(3)]
    details[0].Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    details[1].Pack(error_details_pb2.ErrorInfo(reason="BAD_FIELD", domain="triptych"))
    details[2].Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=250_000_000)))
    return status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message="one field is wrong", details=details)
