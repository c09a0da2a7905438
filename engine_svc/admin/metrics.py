"""The metrics of an engine (asyncio side). All are read when they are scraped: the loop only counts.

A feature registers its own with `ServedEngine.metrics`, which the scheduler's half has in its context.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.served_engine import ServedEngine
from engine_svc.loop.mailbox import STEP_TIME_BUCKETS, STEP_TOKEN_BUCKETS, LoopStats
from engine_svc.loop.pause import RunState
from engine_svc.scheduler.stats import SchedulerStats
from engine_svc.speculation.accounting import DraftStats
from triptych_kit.telemetry.metrics import Metrics, Reading, Row
from triptych_kit.telemetry.traces import register_span_export

if TYPE_CHECKING:
    from engine_svc.data_parallel.driver import LockstepDriver

# Until the model is loaded.
_NOTHING = SchedulerStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0, 0, 0, 0, 0, 0, DraftStats())


class Sessions(Protocol):
    """The sessions of the frontends."""

    num_resumed: int

    @property
    def num_sent_bytes(self) -> int: ...

    @property
    def num_sessions(self) -> int: ...

    @property
    def num_parked_sessions(self) -> int: ...

    @property
    def num_orphaned_requests(self) -> int: ...

    @property
    def num_kv_subscriptions(self) -> int: ...

    @property
    def num_unread_bytes(self) -> int: ...

    @property
    def num_unacknowledged_bytes(self) -> int: ...


_ENGINE: tuple[Row[ServedEngine], ...] = (
    Row("gauge", "triptych_engine_state", lambda engine: _one_of(EngineState, engine.lifecycle.state),
        "1 for the state that the engine is in.", ("state",)),
    Row("gauge", "triptych_engine_run_state", lambda engine: _one_of(RunState, engine.run_state),
        "1 for whether the engine runs its requests, or is paused or asleep at an operator's request.",
        ("state",)),
    Row("gauge", "triptych_engine_is_member", lambda engine: engine.is_member,
        "Whether the engine is registered at a coordinator, 0 or 1."),
    Row("counter", "triptych_engine_fenced_commands_total", lambda engine: engine.num_fenced_commands,
        "Commands that were refused because a newer coordinator has replaced the sender."),
    Row("gauge", "triptych_engine_cache_info", lambda engine: _cache_info(engine),
        "Size of the KV cache; always 1.",
        ("block_size", "num_gpu_blocks"), ("vllm:cache_config_info",)),
    Row("gauge", "triptych_engine_device_memory_bytes",
        lambda engine: 0 if engine.core is None else engine.core.num_device_bytes(),
        "Memory of this process's tensors on its GPU; without a GPU, the resident memory of the process."),
)  # fmt: skip

_SCHEDULER: tuple[Row[SchedulerStats], ...] = (
    Row("gauge", "triptych_engine_requests_running", lambda stats: stats.num_running,
        "Requests that hold KV blocks and take part in steps.", aliases=("vllm:num_requests_running",)),
    Row("gauge", "triptych_engine_requests_waiting", lambda stats: stats.num_waiting + stats.num_blocked,
        "Requests that wait to be admitted, blocked ones included.", aliases=("vllm:num_requests_waiting",)),
    Row("gauge", "triptych_engine_requests_blocked", lambda stats: stats.num_blocked,
        "Waiting requests that wait for something else than room."),
    Row("gauge", "triptych_engine_requests_waiting_by_reason",
        lambda stats: {("capacity",): stats.num_waiting, ("deferred",): stats.num_blocked},
        "The same by what they wait for: capacity, or deferred, something else than room.",
        ("reason",), ("vllm:num_requests_waiting_by_reason",)),
    Row("gauge", "triptych_engine_waiting_tokens", lambda stats: stats.num_waiting_tokens,
        "Tokens of waiting requests, without those that were cached when they were queued."),
    Row("gauge", "triptych_engine_kv_blocks_used", lambda stats: stats.num_used_blocks,
        "KV blocks that requests or pins hold."),
    Row("gauge", "triptych_engine_resumable_requests",
        lambda stats: {("running",): stats.num_resumable - stats.num_idle, ("idle",): stats.num_idle},
        "Requests of generate sessions: idle ones wait for input.", ("state",)),
    Row("gauge", "triptych_engine_pins", lambda stats: stats.num_retained_lots,
        "Pins of KV blocks: those of jobs, under the policy continuum, and of operators."),
    Row("gauge", "triptych_engine_pinned_blocks", lambda stats: stats.num_retained_blocks,
        "KV blocks that pins hold, whether or not requests hold them as well."),
    Row("gauge", "triptych_engine_kv_blocks", lambda stats: stats.num_total_blocks,
        "KV blocks that requests can hold."),
    Row("gauge", "triptych_engine_kv_cache_usage_ratio",
        lambda stats: stats.num_used_blocks / (stats.num_total_blocks or 1),
        "Share of the KV blocks that requests hold, 0 to 1.", aliases=("vllm:kv_cache_usage_perc",)),
    Row("counter", "triptych_engine_prefix_cache_queries_total", lambda stats: stats.prefix_queries,
        "Prompt tokens looked up in the prefix cache, at the first admission of a request.",
        aliases=("vllm:prefix_cache_queries_total",)),
    Row("counter", "triptych_engine_prefix_cache_hits_total", lambda stats: stats.prefix_hits,
        "Prompt tokens found in the prefix cache, at the first admission of a request.",
        aliases=("vllm:prefix_cache_hits_total",)),
    Row("gauge", "triptych_engine_prefix_cache_recent_hit_ratio", lambda stats: stats.prefix_hit_rate,
        "Share of prompt tokens found in the prefix cache, of the requests admitted last."),
    Row("counter", "triptych_engine_preempted_prefix_cache_queries_total",
        lambda stats: stats.preempted_queries,
        "Tokens looked up in the prefix cache, at an admission after a preemption."),
    Row("counter", "triptych_engine_preempted_prefix_cache_hits_total", lambda stats: stats.preempted_hits,
        "Tokens found in the prefix cache, at an admission after a preemption."),
    Row("counter", "triptych_engine_preemptions_total", lambda stats: stats.num_preemptions,
        "Requests that lost their KV blocks and were queued again.", aliases=("vllm:num_preemptions_total",)),
    Row("counter", "triptych_engine_chunked_prefills_total", lambda stats: stats.num_chunked_prefills,
        "Admissions whose first step did not reach the last known token."),
    Row("counter", "triptych_engine_draft_rows_total", lambda stats: stats.drafts.num_drafts,
        "Rows of steps that had draft tokens.", aliases=("vllm:spec_decode_num_drafts_total",)),
    Row("counter", "triptych_engine_draft_tokens_total", lambda stats: stats.drafts.num_draft_tokens,
        "Draft tokens that were verified.", aliases=("vllm:spec_decode_num_draft_tokens_total",)),
    Row("counter", "triptych_engine_accepted_draft_tokens_total",
        lambda stats: stats.drafts.num_accepted_tokens,
        "Draft tokens that were accepted.", aliases=("vllm:spec_decode_num_accepted_tokens_total",)),
    Row("counter", "triptych_engine_accepted_draft_tokens_by_position_total",
        lambda stats: _by_position(stats),
        "Draft tokens that were accepted, by their position in the row from 0.",
        ("position",), ("vllm:spec_decode_num_accepted_tokens_per_pos_total",)),
    Row("counter", "triptych_engine_nan_rows_total", lambda stats: stats.num_non_finite_rows,
        "Rows with NaN or infinite logits; each ended its request with an error."),
    Row("gauge", "triptych_engine_step_max_rows", lambda stats: stats.max_rows,
        "Requests in the largest step so far."),
)  # fmt: skip

_LOOP: tuple[Row[LoopStats], ...] = (
    Row("counter", "triptych_engine_steps_total", lambda stats: stats.step_number,
        "Steps that were launched."),
    Row("gauge", "triptych_engine_step_budget_seconds", lambda stats: stats.step_budget_s,
        "How long what runs may take before the engine counts as hung."),
    Row("counter", "triptych_engine_prompt_tokens_total", lambda stats: stats.num_prompt_tokens,
        "Prompt tokens of requests that were added."),
    Row("counter", "triptych_engine_generated_tokens_total", lambda stats: stats.num_generated_tokens,
        "Tokens that were sent to frontends."),
)  # fmt: skip

_STEPS: tuple[Row[ServedEngine], ...] = (
    Row("histogram", "triptych_engine_step_duration_seconds",
        lambda engine: {(): engine.stats_snapshot.counts.step_times},
        "Time from the beginning of a step, or the end of the one before it, to its result.",
        buckets=STEP_TIME_BUCKETS),
    Row("histogram", "triptych_engine_step_tokens",
        lambda engine: {(): engine.stats_snapshot.counts.step_tokens},
        "Tokens that a step computes: of prompts, one for each decode, and drafts.",
        aliases=("vllm:iteration_tokens_total",), buckets=STEP_TOKEN_BUCKETS),
    Row("gauge", "triptych_engine_step_running_seconds", lambda engine: _running_s(engine),
        "How long the oldest step in flight, or a call between steps, has run; 0 without one."),
    Row("counter", "triptych_engine_requests_finished_total",
        lambda engine: engine.stats_snapshot.counts.finished.values.copy(),
        "Requests that ended, by reason.", ("finished_reason",)),
    Row("counter", "triptych_engine_requests_aborted_total",
        lambda engine: engine.stats_snapshot.counts.aborted.values.copy(),
        "Requests that were ended from outside, by cause.", ("cause",)),
)  # fmt: skip

_SESSIONS: tuple[Row[Sessions], ...] = (
    Row("gauge", "triptych_engine_sessions", lambda sessions: sessions.num_sessions,
        "Sessions of frontends that have a stream."),
    Row("gauge", "triptych_engine_sessions_parked", lambda sessions: sessions.num_parked_sessions,
        "Sessions whose stream broke and that may be resumed."),
    Row("counter", "triptych_engine_sessions_resumed_total", lambda sessions: sessions.num_resumed,
        "Streams that continued a session."),
    Row("gauge", "triptych_engine_orphaned_requests", lambda sessions: sessions.num_orphaned_requests,
        "Requests whose outputs are kept for adoption by another frontend."),
    Row("gauge", "triptych_engine_kv_event_subscribers", lambda sessions: sessions.num_kv_subscriptions,
        "Subscribers of KV cache events."),
    Row("gauge", "triptych_engine_stream_unread_bytes", lambda sessions: sessions.num_unread_bytes,
        "Outputs that are not written to the streams of frontends yet."),
    Row("gauge", "triptych_engine_stream_unacknowledged_bytes",
        lambda sessions: sessions.num_unacknowledged_bytes,
        "Messages to frontends that are kept until they are acknowledged."),
    Row("counter", "triptych_engine_stream_sent_bytes_total", lambda sessions: sessions.num_sent_bytes,
        "Serialized messages to frontends."),
)  # fmt: skip

# Of ranks that step together; all read 0 until the model is loaded.
_LOCKSTEP: tuple[Row[LockstepDriver | None], ...] = (
    Row("gauge", "triptych_engine_lockstep_wave",
        lambda driver: 0 if driver is None else driver.rank_status.wave,
        "Number of the wave that runs or comes next."),
    Row("gauge", "triptych_engine_lockstep_in_wave",
        lambda driver: 0 if driver is None else driver.rank_status.is_in_wave,
        "Whether this rank steps with the others, 0 or 1."),
    Row("gauge", "triptych_engine_lockstep_generation",
        lambda driver: 0 if driver is None else driver.rank_status.generation,
        "Generation of the process group; 0 without one."),
    Row("counter", "triptych_engine_lockstep_votes_total",
        lambda driver: 0 if driver is None else driver.num_votes,
        "Votes of the ranks on whether to go on."),
    Row("counter", "triptych_engine_lockstep_idle_steps_total",
        lambda driver: 0 if driver is None else driver.num_idle_steps,
        "Steps without requests of this rank, for those of others."),
)  # fmt: skip


def register_engine(metrics: Metrics, engine: ServedEngine, sessions: Sessions) -> None:
    """Register what every engine has."""
    metrics.table(_ENGINE, lambda: engine)
    metrics.table(_SCHEDULER, lambda: engine.stats_snapshot.read().scheduler or _NOTHING)
    metrics.table(_LOOP, lambda: engine.stats_snapshot.read())
    metrics.table(_STEPS, lambda: engine)
    metrics.table(_SESSIONS, lambda: sessions)
    register_span_export(metrics)
    if engine.shares_experts:
        metrics.table(_LOCKSTEP, lambda: None if engine.core is None else engine.core.lockstep)


def _running_s(engine: ServedEngine) -> float:
    started_at = engine.stats_snapshot.read().step_started_at
    return 0.0 if started_at is None else max(0.0, engine.clock.now() - started_at)


def _one_of(states: type[Enum], present: Enum) -> Reading:
    return {(state.value,): state is present for state in states}


def _by_position(stats: SchedulerStats) -> Reading:
    return {(str(position),): count for position, count in enumerate(stats.drafts.accepted_per_position)}


def _cache_info(engine: ServedEngine) -> Reading:
    if engine.core is None:
        return {}
    facts = engine.core.facts
    return {(str(facts.block_size), str(facts.num_kv_blocks)): 1}
