"""One Generate call of the command line, and its answer as plain data. Knows no terminal."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc.aio

from service_kit.errors import rpc_errors_translated
from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import output_pb2
from triptych_client.events import stop_match_of
from triptych_client.logprobs import read_logprobs


@dataclass(slots=True)
class Answer:
    """The answer to a request: text, ids, finish reason and logprobs of the first output.

    `cumulative_logprob` is None and `logprobs` are empty if none were requested.
    """

    request_id: str = ""
    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    stop_match: int | str | None = None
    usage: dict[str, int] = field(default_factory=dict)
    prompt_logprobs: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    cumulative_logprob: float | None = None
    error_message: str = ""
    trace_id: str = ""


class Generation:
    """A running request: iterate its `events` once, then read its `answer`."""

    def __init__(self, channel: grpc.aio.Channel, request: generate_pb2.GenerateRequest) -> None:
        self.answer = Answer(trace_id=secrets.token_hex(16))
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        self._request = request

    async def events(self, timeout_s: float | None = None) -> AsyncIterator[generate_pb2.GenerateResponse]:
        """Each message as it arrives; raises the server's error as ServiceError."""
        # The command line creates the trace id, so that it can be printed before a span is recorded.
        traceparent = f"00-{self.answer.trace_id}-{secrets.token_hex(8)}-01"
        call = self._stub.Generate(self._request, timeout=timeout_s, metadata=(("traceparent", traceparent),))
        try:
            with rpc_errors_translated():
                async for response in call:
                    self._take(response)
                    yield response
        finally:
            call.cancel()

    def _take(self, response: generate_pb2.GenerateResponse) -> None:
        match response.WhichOneof("event"):
            case "started":
                self.answer.request_id = response.started.request_id
                self.answer.prompt_token_ids = list(response.started.prompt_token_ids)
                self.answer.prompt_logprobs = logprobs_of(response.started.prompt_logprobs)
            case "delta" if response.delta.output_index == 0:
                self.answer.text += response.delta.text
                self.answer.token_ids += response.delta.token_ids
                self.answer.logprobs += logprobs_of(response.delta.logprobs)
            case "finished" if response.finished.output_index == 0:
                self.answer.finish_reason = reason_name(response.finished.reason)
                self.answer.usage = usage_of(response.finished.usage)
                self.answer.stop_match = stop_match_of(response.finished.stop_match)
                self.answer.cumulative_logprob = cumulative_of(response.finished)
                self.answer.error_message = response.finished.error_message


def event_record(response: generate_pb2.GenerateResponse, trace_id: str) -> dict[str, Any]:
    """One message of the stream as an object for JSON."""
    match response.WhichOneof("event"):
        case "started":
            started = response.started
            return {
                "event": "started",
                "request_id": started.request_id,
                "trace_id": trace_id,
                "num_prompt_tokens": started.num_prompt_tokens,
                "num_cached_tokens": started.num_cached_tokens,
                "prompt_token_ids": list(started.prompt_token_ids),
                "prompt_logprobs": logprobs_of(started.prompt_logprobs),
            }
        case "delta":
            delta = response.delta
            return {
                "event": "delta",
                "output_index": delta.output_index,
                "text": delta.text,
                "token_ids": list(delta.token_ids),
                "logprobs": logprobs_of(delta.logprobs),
            }
        case "finished":
            finished = response.finished
            return {
                "event": "finished",
                "output_index": finished.output_index,
                "finish_reason": reason_name(finished.reason),
                "stop_match": stop_match_of(finished.stop_match),
                "usage": usage_of(finished.usage),
                "cumulative_logprob": cumulative_of(finished),
                "error_message": finished.error_message,
            }
    return {"event": "unknown"}


def reason_name(reason: output_pb2.FinishReason) -> str:
    """`stop` for FINISH_REASON_STOP, and so on."""
    return output_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def logprobs_of(columns: output_pb2.Logprobs) -> list[dict[str, Any]]:
    """An object for each token, with the most likely tokens at its position."""
    return [asdict(token) for token in read_logprobs(columns)]


def cumulative_of(finished: generate_pb2.Finished) -> float | None:
    """The sum over an output's tokens; None if no logprobs were requested."""
    return finished.cumulative_logprob if finished.HasField("cumulative_logprob") else None


def usage_of(usage: output_pb2.Usage) -> dict[str, int]:
    """Token counts by their field names."""
    return {
        "num_prompt_tokens": usage.num_prompt_tokens,
        "num_cached_tokens": usage.num_cached_tokens,
        "num_completion_tokens": usage.num_completion_tokens,
    }
