"""What is recorded of one request in the frontend: spans, and a log line at its end.

The spans are `request` with the children `tokenize` and `detokenize`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context

from frontend_svc.generation.failover import Move
from frontend_svc.output.request_state import RequestState
from service_kit.errors import ServiceError
from service_kit.telemetry import bind_log_fields, context_from, traceparent_of, tracer
from triptych.common.v1 import sampling_pb2

logger = logging.getLogger(__name__)

# A longer id is refused later, when the request is checked.
_MAX_ID_CHARS = 128
_SHOWN_PARAMETERS = ("temperature", "top_p", "top_k", "max_tokens")


class RequestTrace:
    """The open `request` span, from a request's arrival to its end, which is logged."""

    def __init__(self, request_id: str, traceparent: str, tracestate: str) -> None:
        self._request_id = request_id[:_MAX_ID_CHARS]
        self._span: Span = tracer().start_span(
            "request",
            context=context_from(traceparent, tracestate),
            attributes={"triptych.request_id": self._request_id},
        )
        self.abort_cause = "client"
        self._arrived_at = time.perf_counter()
        self._reason = "stop"
        self._fields: dict[str, str | int | float] = {}  # of the log line
        self._context: Context = set_span_in_context(self._span, Context())

    def __enter__(self) -> RequestTrace:
        bind_log_fields(request_id=self._request_id)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        cause = ""
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._reason, cause = "abort", self.abort_cause
            self._span.add_event("aborted", {"cause": cause})
        elif error is not None:
            code = error.code.name if isinstance(error, ServiceError) else "INTERNAL"
            self._reason, cause = "error", (isinstance(error, ServiceError) and error.reason) or code
            self._span.set_attribute("rpc.grpc.status", code)
            self._span.set_status(
                Status(StatusCode.ERROR, str(error) if isinstance(error, ServiceError) else code)
            )
        elif self._reason == "abort":
            cause = "request"
        self._span.end()
        duration_ms = round((time.perf_counter() - self._arrived_at) * 1000, 1)
        logger.info(
            "request ended",
            extra={
                "request_id": self._request_id,
                "reason": self._reason,
                **({"cause": cause} if cause else {}),
                "duration_ms": duration_ms,
                **self._fields,
            },
        )

    @property
    def traceparent(self) -> str:
        """W3C traceparent that makes spans of other processes children of this request."""
        return traceparent_of(self._span)

    @contextmanager
    def tokenizing(self) -> Iterator[None]:
        with tracer().start_as_current_span("tokenize", context=self._context, record_exception=False):
            yield

    def note_request(self, model: str, num_prompt_tokens: int, sampling: sampling_pb2.SamplingParams) -> None:
        """Record the parameters, when all defaults are filled in."""
        self._fields |= {"model": model, "num_prompt_tokens": num_prompt_tokens}
        self._span.set_attribute("gen_ai.request.model", model)
        self._span.set_attribute("gen_ai.usage.input_tokens", num_prompt_tokens)
        for name in _SHOWN_PARAMETERS:
            self._span.set_attribute(f"gen_ai.request.{name}", getattr(sampling, name))

    def note_migration(self, move: Move, num_output_tokens: int) -> None:
        """Record that the request moved to another engine with so many output tokens."""
        self._span.add_event(
            "moved",
            {
                "triptych.cause": move.cause.value,
                "triptych.from": move.origin,
                "triptych.to": move.target,
                "triptych.num_output_tokens": num_output_tokens,
            },
        )

    def note_output(
        self, states: Sequence[RequestState], num_output_tokens: int, finish_reason: str, engine_id: str
    ) -> None:
        """Record the result. Makes the span `detokenize`, from the first output to the last."""
        self._reason = finish_reason
        self._fields |= {
            "num_cached_tokens": states[0].collector.num_cached_tokens,
            "num_output_tokens": num_output_tokens,
            **_times_of(states),
            "engine": engine_id,
        }
        self._span.set_attribute("gen_ai.usage.output_tokens", num_output_tokens)
        self._span.set_attribute("gen_ai.response.finish_reasons", finish_reason)
        begun = [state for state in states if state.first_output_at_ns]
        if begun:
            first_at_ns = min(state.first_output_at_ns for state in begun)
            span = tracer().start_span("detokenize", context=self._context, start_time=first_at_ns)
            span.set_attribute("triptych.busy_us", sum(state.detokenize_ns for state in begun) // 1000)
            span.end(max(state.last_output_at_ns for state in begun))


def _times_of(states: Sequence[RequestState]) -> dict[str, int | float]:
    """Sums of what happened to the outputs, and the times of the one that spent the most in engines."""
    for state in states:
        state.times.end()
    all_times = [state.times for state in states]
    longest = max(all_times, key=lambda times: sum(times.spent_ns))
    queue_ms, prefill_ms, decode_ms = (round(spent_ns / 1e6, 1) for spent_ns in longest.spent_ns)
    counts = {
        "num_preemptions": sum(times.num_preemptions for times in all_times),
        "num_migrations": max(times.num_migrations for times in all_times),
    }
    num_nan_logits = sum(times.num_nan_logits for times in all_times)
    if num_nan_logits:
        counts["num_nan_logits"] = num_nan_logits
    return {"queue_ms": queue_ms, "prefill_ms": prefill_ms, "decode_ms": decode_ms, **counts}
