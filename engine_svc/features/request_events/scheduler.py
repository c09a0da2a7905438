"""Attaches the events of each request that enters the batch to the output of its first step there.

A step that admits no request costs one comparison.
"""

from __future__ import annotations

from engine_svc.config import EngineConfig
from engine_svc.core.request import Request
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.features.request_events.extras import RequestEvents
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature

_REPORTED = frozenset({"scheduled", "preempted", "resumed"})


def make(config: EngineConfig, context: SchedulerContext) -> SchedulerFeature:
    return EventsOfAdmitted()


class EventsOfAdmitted(SchedulerFeature):
    """Reports the events of a request that is admitted, since those that it reported before."""

    def __init__(self) -> None:
        # Those that have not ended, by id, and how many events of each were reported.
        self._requests: dict[str, Request] = {}
        self._num_reported: dict[Request, int] = {}
        self._ended: list[Request] = []  # whose last result may still be given to `on_update`

    def on_add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._num_reported[request] = 0

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        if plan.admitted:
            row_of = {request_id: row for row, request_id in enumerate(plan.request_ids)}
            events_of = result.extras.setdefault(RequestEvents, {})
            for admitted in plan.admitted:
                request = self._requests.get(admitted.request_id)
                if request is not None:
                    events_of[row_of[admitted.request_id]] = self._news(request)
        while self._ended:
            self._forget(self._ended.pop())

    def on_turn_end(self, request: Request) -> None:
        """Its last result is still to be given to `on_update`; the next turn reports its own events."""

    def on_finish(self, request: Request) -> None:
        if request.timeline.scheduled_at is None:
            self._forget(request)
        else:
            self._ended.append(request)

    def _news(self, request: Request) -> RequestEvents:
        timeline, num_reported = request.timeline, self._num_reported[request]
        self._num_reported[request] = len(timeline.events)
        events = [event for event in timeline.events[num_reported:] if event[0] in _REPORTED]
        if not num_reported:
            events.insert(0, ("queued", timeline.queued_at))
        return RequestEvents(tuple(events))

    def _forget(self, request: Request) -> None:
        self._num_reported.pop(request, None)
        # Another request may have its id by now.
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]
