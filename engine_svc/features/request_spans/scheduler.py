"""Notes the end of traced requests in the engine thread, and has the event loop make their spans."""

from __future__ import annotations

import functools
from collections.abc import Callable
from copy import copy
from time import time_ns

from engine_svc.config import EngineConfig
from engine_svc.core.request import Request
from engine_svc.features.request_spans.extras import TracedRequest
from engine_svc.features.request_spans.span import span_of
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature
from triptych_kit.clock import Clock


def make(config: EngineConfig, context: SchedulerContext) -> SchedulerFeature:
    return RequestSpans(context.clock, context.defer)


class RequestSpans(SchedulerFeature):
    """Follows the requests that have a parent. Others, all without a collector, cost two look-ups each."""

    def __init__(self, clock: Clock, defer: Callable[[Callable[[], None]], object]) -> None:
        self._clock = clock
        self._defer = defer
        # With the tokens of an earlier engine's output.
        self._traced: dict[Request, tuple[TracedRequest, int]] = {}

    def on_add(self, request: Request) -> None:
        # Taken off the request: no stage of a rank reads it.
        traced = request.extras.pop(TracedRequest, None)
        if traced is not None:
            self._traced[request] = traced, request.num_output_tokens

    def on_turn_end(self, request: Request) -> None:
        if request in self._traced:
            ended = copy(request)
            ended.token_ids = request.token_ids.copy()
            self._end(request, ended)

    def on_finish(self, request: Request) -> None:
        if request in self._traced:
            self._end(request, request)

    def _end(self, request: Request, ended: Request) -> None:
        """ended: the request as it was at its end."""
        traced, num_before = self._traced.pop(request)
        self._defer(functools.partial(self._record, ended, traced, num_before))

    def _record(self, request: Request, traced: TracedRequest, num_before: int) -> None:
        """Make the span, on the event loop. A request that has ended does not change any more."""
        unix_ns_at_0 = time_ns() - int(self._clock.now() * 1e9)
        traced.record(span_of(request, traced, num_before, unix_ns_at_0))
