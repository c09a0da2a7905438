"""Writes the counts into steps."""

from __future__ import annotations

from engine_svc.config import EngineConfig
from engine_svc.convert.feature import WireFeature
from engine_svc.features.nan_counts.extras import NanCount
from triptych.engine.v1 import step_pb2


def make(config: EngineConfig) -> WireFeature:
    return NanCountsOfRows()


class NanCountsOfRows(WireFeature):
    writes = NanCount

    def write(self, step: step_pb2.Step, row: int, extra: NanCount, now: float) -> None:
        step.extras.add(row=row, nan_count=extra.count)
