"""The engine's facts, state and load as protobuf messages. Pure functions; knows no request and no stream."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.served_engine import ServedEngine
from engine_svc.core.artifacts import Artifact, ArtifactKind
from engine_svc.core.facts import SCHEMA_REVISION, EngineFacts, LoadProgress, ModelFingerprint
from engine_svc.loop.mailbox import LoopStats
from engine_svc.loop.pause import RunState
from triptych.engine.v1 import engine_pb2, session_pb2
from triptych_kit.server import INTERNAL

# The oldest schema revision of a frontend that this engine works with.
MIN_PEER_REVISION = 1
# Optional behaviours, active in a session only if both sides name them.
RESUME = "resume"
ADOPT = "adopt"
INPUT_SEGMENTS = "input_segments"
FEATURES = frozenset({RESUME, ADOPT, INPUT_SEGMENTS})
# Limit of a session's replay buffer: messages that its frontend has not acknowledged.
MAX_REPLAY_BYTES = 8 * 1024 * 1024

_ACK_INTERVAL_MESSAGES = 16
_ACK_INTERVAL_MS = 50

STATES = {
    EngineState.LOADING: session_pb2.ENGINE_STATE_LOADING,
    EngineState.READY: session_pb2.ENGINE_STATE_READY,
    EngineState.DRAINING: session_pb2.ENGINE_STATE_DRAINING,
    # For a frontend, an engine that has finished its requests is draining until its stream ends.
    EngineState.STOPPED: session_pb2.ENGINE_STATE_DRAINING,
    EngineState.FAILED: session_pb2.ENGINE_STATE_FAILED,
}

_RUN_STATES = {
    RunState.RUNNING: session_pb2.ENGINE_STATE_READY,
    RunState.PAUSING: session_pb2.ENGINE_STATE_PAUSED,
    RunState.PAUSED: session_pb2.ENGINE_STATE_PAUSED,
    RunState.ASLEEP: session_pb2.ENGINE_STATE_ASLEEP,
}

_ARTIFACT_KINDS = {
    ArtifactKind.TOKENIZER: session_pb2.ARTIFACT_KIND_TOKENIZER,
    ArtifactKind.TOKENIZER_CONFIG: session_pb2.ARTIFACT_KIND_TOKENIZER_CONFIG,
    ArtifactKind.TOKENIZER_MODEL: session_pb2.ARTIFACT_KIND_TOKENIZER_MODEL,
    ArtifactKind.CHAT_TEMPLATE: session_pb2.ARTIFACT_KIND_CHAT_TEMPLATE,
    ArtifactKind.GENERATION_CONFIG: session_pb2.ARTIFACT_KIND_GENERATION_CONFIG,
    ArtifactKind.CONFIG: session_pb2.ARTIFACT_KIND_CONFIG,
    ArtifactKind.PREPROCESSOR_CONFIG: session_pb2.ARTIFACT_KIND_PREPROCESSOR_CONFIG,
    ArtifactKind.PROCESSOR_CONFIG: session_pb2.ARTIFACT_KIND_PROCESSOR_CONFIG,
}


def state(engine: ServedEngine) -> session_pb2.EngineState:
    """Lifecycle state on the wire; PAUSED or ASLEEP override READY."""
    if engine.lifecycle.state is EngineState.READY:
        return _RUN_STATES[engine.run_state]
    return STATES[engine.lifecycle.state]


def common_features(hello: session_pb2.Hello) -> frozenset[str]:
    """The optional behaviours that both sides have; `hello` names them or sets the typed fields."""
    return frozenset(name for name in FEATURES if name in hello.features or getattr(hello.feature_set, name))


def hello_ack(
    engine: ServedEngine,
    max_inflight_adds: int,
    *,
    features: Collection[str],
    is_resumed: bool,
    refusal: session_pb2.ResumeRefusal = session_pb2.RESUME_REFUSAL_UNSPECIFIED,
    host_probe: str = "",
) -> session_pb2.HelloAck:
    """The first message of a stream. `host_probe` names what only a frontend on this host can read."""
    identity = engine.identity
    is_resumable = RESUME in features
    return session_pb2.HelloAck(
        engine_id=identity.engine_id,
        engine_epoch=identity.engine_epoch,
        dp_rank=identity.dp_rank,
        dp_size=identity.dp_size,
        features=sorted(features),
        feature_set=session_pb2.FeatureSet(**dict.fromkeys(features, True)),
        state=state(engine),
        resume_ok=is_resumed,
        resume_refusal=refusal,
        ack_interval_messages=_ACK_INTERVAL_MESSAGES,
        ack_interval_ms=_ACK_INTERVAL_MS,
        replay_window_ms=int(engine.replay_window_s * 1000) if is_resumable else 0,
        replay_window_bytes=MAX_REPLAY_BYTES if is_resumable else 0,
        max_frame_bytes=INTERNAL.max_receive_bytes,
        max_inflight_adds=max_inflight_adds,
        schema_revision=SCHEMA_REVISION,
        min_peer_revision=MIN_PEER_REVISION,
        host_probe=host_probe,
    )


def ready(engine: ServedEngine, facts: EngineFacts) -> session_pb2.Ready:
    """The facts of a loaded engine."""
    message = session_pb2.Ready(
        model_name=facts.model_name,
        fingerprint=fingerprint(facts.fingerprint),
        artifacts=[artifact_record(artifact) for artifact in engine.artifacts],
        max_model_len=facts.max_model_len,
        block_size=facts.block_size,
        num_kv_blocks=facts.num_kv_blocks,
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        supported_tasks=facts.supported_tasks,
        world_size=facts.tensor_parallel_size * facts.pipeline_parallel_size,
        tensor_parallel_size=facts.tensor_parallel_size,
        pipeline_parallel_size=facts.pipeline_parallel_size,
        data_parallel_size=engine.identity.dp_size,
        default_sampling=session_pb2.SamplingDefaults(
            temperature=facts.default_sampling.temperature,
            top_p=facts.default_sampling.top_p,
            top_k=facts.default_sampling.top_k,
            repetition_penalty=facts.default_sampling.repetition_penalty,
        ),
        hidden_size=facts.hidden_size,
        model_folder=facts.model_folder,
    )
    engine.features.announce(message)
    return message


def fingerprint(value: ModelFingerprint) -> session_pb2.Fingerprint:
    """The properties that two engines must share for a request to move between them."""
    return session_pb2.Fingerprint(
        digest=value.digest,
        weights_sha256=value.weights_sha256,
        dtype=value.dtype,
        tokenizer_sha256=value.tokenizer_sha256,
        vocab_size=value.vocab_size,
        rope=value.rope,
        kernel_mode=value.kernel_mode,
        max_model_len=value.max_model_len,
        schema_revision=value.schema_revision,
        results=value.results,
    )


def artifact_record(artifact: Artifact) -> session_pb2.Artifact:
    """Metadata of a file, without its content."""
    return session_pb2.Artifact(
        kind=_ARTIFACT_KINDS[artifact.kind], sha256=artifact.sha256, size_bytes=artifact.size_bytes
    )


def artifacts(
    engine: ServedEngine, request: engine_pb2.GetArtifactsRequest
) -> Iterator[engine_pb2.GetArtifactsResponse]:
    """The requested files that the caller does not have yet, in chunks."""
    for artifact in engine.artifacts:
        record = artifact_record(artifact)
        if (request.kinds and record.kind not in request.kinds) or record.sha256 in request.known_sha256:
            continue
        for offset, chunk in artifact.chunks():
            yield engine_pb2.GetArtifactsResponse(artifact=record, offset=offset, chunk=chunk)


def heartbeat(engine: ServedEngine, loop_stats: LoopStats) -> session_pb2.Heartbeat:
    """Progress of the engine loop, also while it is blocked. The session fills in `last_seq`."""
    message = session_pb2.Heartbeat(
        step_number=loop_stats.step_number, has_work=loop_stats.has_work, state=state(engine)
    )
    if loop_stats.step_started_at is not None:
        message.step_started_age_ms = int(engine.step_age_s(loop_stats) * 1000)
        message.step_budget_ms = int(loop_stats.step_budget_s * 1000)
    if engine.lifecycle.state is EngineState.LOADING:
        message.load_progress.CopyFrom(load_progress(engine.progress))
    return message


def load_progress(progress: LoadProgress) -> session_pb2.LoadProgress:
    return session_pb2.LoadProgress(phase=progress.phase, done=progress.done, total=progress.total)


def stats(loop_stats: LoopStats) -> session_pb2.Stats:
    """Load and counters of the engine; empty while nothing is loaded."""
    scheduler = loop_stats.scheduler
    if scheduler is None:
        return session_pb2.Stats()
    return session_pb2.Stats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting + scheduler.num_blocked,
        num_waiting_tokens=scheduler.num_waiting_tokens,
        num_used_blocks=scheduler.num_used_blocks,
        num_total_blocks=scheduler.num_total_blocks,
        num_pins=scheduler.num_retained_lots,
        num_pinned_blocks=scheduler.num_retained_blocks,
        num_prefix_queries=scheduler.prefix_queries,
        num_prefix_hits=scheduler.prefix_hits,
        num_drafts=scheduler.drafts.num_draft_tokens,
        num_accepted_drafts=scheduler.drafts.num_accepted_tokens,
        num_preemptions=scheduler.num_preemptions,
        num_chunked_prefills=scheduler.num_chunked_prefills,
        step_number=loop_stats.step_number,
        max_rows=scheduler.max_rows,
        num_prompt_tokens=loop_stats.num_prompt_tokens,
        num_generated_tokens=loop_stats.num_generated_tokens,
        num_finished=loop_stats.num_finished,
        num_draft_rows=scheduler.drafts.num_drafts,
        num_accepted_drafts_by_position=scheduler.drafts.accepted_per_position,
    )


def engine_info(engine: ServedEngine) -> engine_pb2.GetEngineInfoResponse:
    identity, core = engine.identity, engine.core
    return engine_pb2.GetEngineInfoResponse(
        engine_id=identity.engine_id,
        engine_epoch=identity.engine_epoch,
        dp_rank=identity.dp_rank,
        dp_size=identity.dp_size,
        state=state(engine),
        ready=None if core is None else ready(engine, core.facts),
        load_progress=None if core is not None else load_progress(engine.progress),
        version=identity.version,
    )


def num_in_flight(engine: ServedEngine) -> int:
    """The requests that the engine thread has."""
    scheduler = engine.stats_snapshot.read().scheduler
    return 0 if scheduler is None else scheduler.num_running + scheduler.num_waiting + scheduler.num_blocked


def status(engine: ServedEngine, num_sessions: int) -> dict[str, str | int | float]:
    """Key-value status for the admin service."""
    loop_stats = engine.stats_snapshot.read()
    values: dict[str, str | int | float] = {
        "engine_id": engine.identity.engine_id,
        "engine_state": engine.lifecycle.state.value,
        "run_state": engine.run_state.value,
        "standstill": engine.run_state.value,  # former name of run_state, kept for one release
        "num_sessions": num_sessions,
        "step_number": loop_stats.step_number,
        "prompt_tokens": loop_stats.num_prompt_tokens,
        "generated_tokens": loop_stats.num_generated_tokens,
        "num_finished": loop_stats.num_finished,
        "num_fenced_commands": engine.num_fenced_commands,
    }
    if engine.core is not None:
        values["model"] = engine.core.facts.model_name
    driver = None if engine.core is None else engine.core.lockstep
    if driver is not None:
        rank_status = driver.rank_status
        values |= {
            "lockstep.state": rank_status.state.value,
            "lockstep.wave": rank_status.wave,
            "lockstep.generation": rank_status.generation,
            "lockstep.num_votes": driver.num_votes,
            "lockstep.num_idle_steps": driver.num_idle_steps,
        }
    if loop_stats.scheduler is not None:
        values |= {
            "running": loop_stats.scheduler.num_running,
            "waiting": loop_stats.scheduler.num_waiting + loop_stats.scheduler.num_blocked,
            "used_blocks": loop_stats.scheduler.num_used_blocks,
            "total_blocks": loop_stats.scheduler.num_total_blocks,
            "kv_usage_percent": round(
                100 * loop_stats.scheduler.num_used_blocks / max(1, loop_stats.scheduler.num_total_blocks), 1
            ),
            "num_preemptions": loop_stats.scheduler.num_preemptions,
            "num_chunked_prefills": loop_stats.scheduler.num_chunked_prefills,
            "prefix_queries": loop_stats.scheduler.prefix_queries,
            "prefix_hits": loop_stats.scheduler.prefix_hits,
            "num_drafts": loop_stats.scheduler.drafts.num_draft_tokens,
            "num_accepted_drafts": loop_stats.scheduler.drafts.num_accepted_tokens,
            "max_rows": loop_stats.scheduler.max_rows,
        }
    return values
