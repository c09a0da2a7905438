"""Converts load messages to `LoadReport`. Knows no streams."""

from __future__ import annotations

from frontend_svc.engines.routing.account import LoadReport
from frontend_svc.text.tokenize.id_column import ID_BYTES
from triptych.coordinator.v1 import member_pb2
from triptych.engine.v1 import add_pb2, session_pb2


def num_tokens_of(entry: add_pb2.AddEntry) -> int:
    """Prompt and output tokens that the engine has to compute before the request's next token."""
    return (len(entry.prompt_token_ids) + len(entry.output_token_ids)) // ID_BYTES


def load_of_stats(stats: session_pb2.Stats, engine_epoch: int) -> LoadReport:
    """The report that an engine sends on its own stream."""
    return LoadReport(
        engine_epoch=engine_epoch,
        step_number=stats.step_number,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_waiting_tokens=stats.num_waiting_tokens,
        num_used_blocks=stats.num_used_blocks,
        num_total_blocks=stats.num_total_blocks,
    )


def load_of_engine(load: member_pb2.EngineLoad) -> LoadReport:
    """The report that a coordinator forwards."""
    return LoadReport(
        engine_epoch=load.engine_epoch,
        step_number=load.step_number,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_waiting_tokens=load.num_waiting_tokens,
        num_used_blocks=load.num_used_blocks,
        num_total_blocks=load.num_total_blocks,
    )
