"""Writes the events into steps, as ages."""

from __future__ import annotations

from engine_svc.config import EngineConfig
from engine_svc.convert.feature import WireFeature, to_us
from engine_svc.features.request_events.extras import RequestEvents
from triptych.engine.v1 import step_pb2

_KINDS = {
    "queued": step_pb2.STEP_EVENT_KIND_QUEUED,
    "scheduled": step_pb2.STEP_EVENT_KIND_SCHEDULED,
    "preempted": step_pb2.STEP_EVENT_KIND_PREEMPTED,
    "resumed": step_pb2.STEP_EVENT_KIND_RESUMED,
}


def make(config: EngineConfig) -> WireFeature:
    return EventsOfRows()


class EventsOfRows(WireFeature):
    writes = RequestEvents

    def write(self, step: step_pb2.Step, row: int, extra: RequestEvents, now: float) -> None:
        for name, at in extra.events:
            step.events.add(row=row, kind=_KINDS[name], age_us=to_us(now - at))
