"""Converts load messages to `LoadReport`. Knows no streams."""

from __future__ import annotations

from frontend_svc.engines.routing.account import LoadReport
from triptych.coordinator.v1 import member_pb2
from triptych.engine.v1 import session_pb2


def load_report(load: session_pb2.Stats | member_pb2.EngineLoad, engine_epoch: int) -> LoadReport:
    """From the engine's own stream (`Stats`) or as a coordinator forwards it (`EngineLoad`)."""
    return LoadReport(
        engine_epoch=engine_epoch,
        step_number=load.step_number,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_waiting_tokens=load.num_waiting_tokens,
        num_used_blocks=load.num_used_blocks,
        num_total_blocks=load.num_total_blocks,
    )
