"""Registration and reports to the coordinator as protobuf messages. Pure functions; knows no stream."""

from __future__ import annotations

from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.served_engine import ServedEngine
from engine_svc.data_parallel.driver import RankStatus
from triptych.coordinator.v1 import command_pb2, coordinator_pb2, member_pb2
from triptych_kit.addresses import UNIX

_STATES = {
    EngineState.LOADING: member_pb2.MEMBER_STATE_LOADING,
    EngineState.READY: member_pb2.MEMBER_STATE_READY,
    EngineState.DRAINING: member_pb2.MEMBER_STATE_DRAINING,
    EngineState.STOPPED: member_pb2.MEMBER_STATE_DRAINING,
    EngineState.FAILED: member_pb2.MEMBER_STATE_FAILED,
}


def registration_of(engine: ServedEngine, endpoint: str) -> member_pb2.EngineRegistration:
    """Identity and facts of the engine, as far as they are known yet."""
    identity, core = engine.identity, engine.core
    registration = member_pb2.EngineRegistration(
        engine_id=identity.engine_id,
        engine_epoch=identity.engine_epoch,
        dp_group=identity.dp_group,
        dp_rank=identity.dp_rank,
        dp_size=identity.dp_size,
        endpoint=endpoint,
        host="localhost" if endpoint.startswith(UNIX) else "",
        lockstep=engine.shares_experts,
        labels=[member_pb2.Label(key=key, value=value) for key, value in identity.labels],
    )
    if core is None:
        return registration
    facts, driver = core.facts, core.lockstep
    registration.fingerprint = facts.fingerprint.digest
    registration.model_name = facts.model_name
    registration.capacity.num_kv_blocks = facts.num_kv_blocks
    registration.capacity.block_size = facts.block_size
    registration.capacity.max_num_seqs = facts.max_num_seqs
    registration.capacity.max_model_len = facts.max_model_len
    if driver is not None:
        registration.parallel_config_hash = driver.parallel_config_hash
        registration.host = driver.host
        registration.store_port = driver.store_port
    return registration


def report_of(engine: ServedEngine, rank_status: RankStatus | None) -> coordinator_pb2.EngineReport:
    """State and load of the engine, without a seq. rank_status: None for an engine that steps alone."""
    identity, stats = engine.identity, engine.stats_snapshot.read()
    report = coordinator_pb2.EngineReport(
        state=_STATES[engine.lifecycle.state], step_number=stats.step_number
    )
    if stats.scheduler is not None:
        report.load.engine_id = identity.engine_id
        report.load.engine_epoch = identity.engine_epoch
        report.load.step_number = stats.step_number
        report.load.num_running = stats.scheduler.num_running
        report.load.num_waiting = stats.scheduler.num_waiting + stats.scheduler.num_blocked
        report.load.num_waiting_tokens = stats.scheduler.num_waiting_tokens
        report.load.num_used_blocks = stats.scheduler.num_used_blocks
        report.load.num_total_blocks = stats.scheduler.num_total_blocks
    if rank_status is not None:
        report.wave = rank_status.wave
        report.wave_complete = not rank_status.is_in_wave
        report.start_wave_needed = rank_status.asks
        report.generation = rank_status.generation
        if engine.lifecycle.state is EngineState.LOADING:
            # The coordinator forms the group when all its ranks have loaded their weights.
            report.scaling_notice.kind = command_pb2.SCALING_NOTICE_KIND_WEIGHTS_READY
    return report
