"""One Generate call of the command line, and its answer as plain data. Knows no terminal."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc.aio

from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import output_pb2
from triptych_client.events import stop_match_of
from triptych_client.logprobs import read_logprobs
from triptych_kit.errors import rpc_errors_translated

# Of the prompt, which all outputs share.
_PROMPT_COUNTS = frozenset({"num_prompt_tokens", "num_cached_tokens"})


@dataclass(slots=True)
class Output:
    """One output. `cumulative_logprob` is None and `logprobs` are empty if none were requested."""

    output_index: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    stop_match: int | str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    cumulative_logprob: float | None = None
    error_message: str = ""
    stats: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Answer:
    """The answer to a request. `usage` counts the tokens of all outputs and, once, the prompt."""

    request_id: str = ""
    trace_id: str = ""
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    by_index: dict[int, Output] = field(default_factory=dict)

    @property
    def outputs(self) -> list[Output]:
        """The outputs in order of their index."""
        return [output for _, output in sorted(self.by_index.items())]

    @property
    def first(self) -> Output:
        return self.output(0)

    def output(self, index: int) -> Output:
        return self.by_index.setdefault(index, Output(index))

    def record(self) -> dict[str, Any]:
        """The answer as an object for JSON; it has the members of the first output, too."""
        first = asdict(self.first)
        del first["output_index"]
        return {
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "prompt_token_ids": self.prompt_token_ids,
            "prompt_logprobs": self.prompt_logprobs,
            **first,
            "outputs": [asdict(output) for output in self.outputs],
            "usage": self.usage,
        }


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
            case "delta":
                output = self.answer.output(response.delta.output_index)
                output.text += response.delta.text
                output.token_ids += response.delta.token_ids
                output.logprobs += logprobs_of(response.delta.logprobs)
            case "finished":
                finished = response.finished
                output = self.answer.output(finished.output_index)
                output.finish_reason = reason_name(finished.reason)
                output.stop_match = stop_match_of(finished.stop_match)
                output.cumulative_logprob = cumulative_of(finished)
                output.error_message = finished.error_message
                output.stats = stats_of(finished.stats)
                self._count(usage_of(finished.usage))

    def _count(self, usage: dict[str, int]) -> None:
        before = self.answer.usage
        summed = {name: before.get(name, 0) + usage[name] for name in usage.keys() - _PROMPT_COUNTS}
        self.answer.usage = before | usage | summed


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
                "stats": stats_of(finished.stats),
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
    """Token counts by their field names; those of drafts only where they are known."""
    counts = {
        "num_prompt_tokens": usage.num_prompt_tokens,
        "num_cached_tokens": usage.num_cached_tokens,
        "num_completion_tokens": usage.num_completion_tokens,
    }
    if usage.HasField("num_draft_tokens"):
        counts["num_draft_tokens"] = usage.num_draft_tokens
        counts["num_accepted_draft_tokens"] = usage.num_accepted_draft_tokens
    return counts


def stats_of(stats: output_pb2.OutputStats) -> dict[str, float]:
    """Times and counts of one output by their field names."""
    return {
        "queue_ms": round(stats.queue_ms, 3),
        "prefill_ms": round(stats.prefill_ms, 3),
        "decode_ms": round(stats.decode_ms, 3),
        "num_preemptions": stats.num_preemptions,
        "num_migrations": stats.num_migrations,
    }
