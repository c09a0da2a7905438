"""Trace spans of a request, made from its timeline when it ends, outside of any step. Knows no wire."""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.context import Context

from engine_svc.config import EngineConfig
from engine_svc.core.request import FinishReason, Request
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature
from service_kit.clock import Clock
from service_kit.telemetry import context_from, tracer


def make(config: EngineConfig, context: SchedulerContext) -> SchedulerFeature:
    return RequestSpans(tracer(), context.clock, context.defer)


class RequestSpans(SchedulerFeature):
    """Makes the span `engine.request` of each finished request, with children `queue`, `prefill`, `decode`.

    The parent is the trace context that came with the request. `defer` runs the work in another thread.
    """

    def __init__(
        self, tracer: trace.Tracer, clock: Clock, defer: Callable[[Callable[[], None]], object]
    ) -> None:
        self._tracer = tracer
        self._defer = defer
        # Timelines are in seconds of the engine's clock, spans in nanoseconds since 1970.
        self._unix_offset_ns = time.time_ns() - int(clock.now() * 1e9)

    def on_finish(self, request: Request) -> None:
        if request.trace_context[0]:
            self._defer(lambda: self._make_spans(request))

    def _make_spans(self, request: Request) -> None:
        timeline = request.timeline
        finished_at = timeline.finished_at if timeline.finished_at is not None else timeline.queued_at
        scheduled_at = timeline.scheduled_at if timeline.scheduled_at is not None else finished_at
        first_token_at = timeline.first_token_at if timeline.first_token_at is not None else finished_at
        span = self._tracer.start_span(
            "engine.request",
            context=context_from(*request.trace_context),
            start_time=self._unix_ns(timeline.queued_at),
            attributes=_attributes(request),
        )
        for name, at in timeline.events:
            cause = {"cause": request.abort_cause} if name == "aborted" else None
            span.add_event(name, cause, timestamp=self._unix_ns(at))
        if request.finish_reason is FinishReason.ERROR:
            span.set_status(trace.StatusCode.ERROR)
        context = trace.set_span_in_context(span, Context())
        parts = [("queue", timeline.queued_at, scheduled_at)]
        if timeline.scheduled_at is not None:
            parts.append(("prefill", scheduled_at, first_token_at))
        if timeline.first_token_at is not None:
            parts.append(("decode", first_token_at, finished_at))
        for name, start_at, end_at in parts:
            self._make_child(name, context, start_at, end_at, request.request_id)
        span.end(end_time=self._unix_ns(finished_at))

    def _make_child(
        self, name: str, context: Context, start_at: float, end_at: float, request_id: str
    ) -> None:
        child = self._tracer.start_span(
            name,
            context=context,
            start_time=self._unix_ns(start_at),
            attributes={"request_id": request_id},
        )
        child.end(end_time=self._unix_ns(end_at))

    def _unix_ns(self, at: float) -> int:
        return self._unix_offset_ns + int(at * 1e9)


def _attributes(request: Request) -> dict[str, str | int]:
    reason = "" if request.finish_reason is None else request.finish_reason.value
    attributes: dict[str, str | int] = {
        "request_id": request.request_id,
        "finish_reason": reason,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_output_tokens": request.num_output_tokens,
        "num_preemptions": request.num_preemptions,
    }
    if request.abort_cause:
        attributes["abort_cause"] = request.abort_cause
    return attributes
