"""The metrics of an engine (asyncio side). All are read when they are scraped: the loop only counts.

A feature registers its own with `ServedEngine.metrics`, which the scheduler's half has in its context.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.served_engine import ServedEngine
from engine_svc.loop.mailbox import STEP_TIME_BUCKETS, LoopStats
from engine_svc.loop.pause import RunState
from engine_svc.scheduler.stats import DraftStats, SchedulerStats
from triptych_kit.telemetry.metrics import Metrics, Reading

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


def register_engine(metrics: Metrics, engine: ServedEngine, sessions: Sessions) -> None:
    """Register what every engine has."""
    metrics.gauge(
        "triptych_engine_state",
        "1 for the state that the engine is in.",
        lambda: _one_of(EngineState, engine.lifecycle.state),
        labels=("state",),
    )
    metrics.gauge(
        "triptych_engine_run_state",
        "1 for whether the engine runs its requests, or is paused or asleep at an operator's request.",
        lambda: _one_of(RunState, engine.run_state),
        labels=("state",),
    )
    metrics.gauge(
        "triptych_engine_is_member",
        "Whether the engine is registered at a coordinator, 0 or 1.",
        lambda: engine.is_member,
    )
    metrics.counter(
        "triptych_engine_fenced_commands_total",
        "Commands that were refused because a newer coordinator has replaced the sender.",
        lambda: engine.num_fenced_commands,
    )
    metrics.gauge(
        "triptych_engine_cache_info",
        "Size of the KV cache; always 1.",
        lambda: _cache_info(engine),
        labels=("block_size", "num_gpu_blocks"),
        aliases=("vllm:cache_config_info",),
    )
    metrics.gauge(
        "triptych_engine_device_memory_bytes",
        "Memory of this process's tensors on its GPU; without a GPU, the resident memory of the process.",
        lambda: 0 if engine.core is None else engine.core.num_device_bytes(),
    )
    _register_scheduler(metrics, engine)
    _register_loop(metrics, engine)
    _register_sessions(metrics, sessions)
    if engine.shares_experts:
        _register_lockstep(metrics, engine)


def _register_scheduler(metrics: Metrics, engine: ServedEngine) -> None:
    def now(value: Callable[[SchedulerStats], float]) -> Callable[[], float]:
        return lambda: value(engine.stats_snapshot.read().scheduler or _NOTHING)

    gauge, counter = metrics.gauge, metrics.counter
    gauge(
        "triptych_engine_requests_running",
        "Requests that hold KV blocks and take part in steps.",
        now(lambda stats: stats.num_running),
        aliases=("vllm:num_requests_running",),
    )
    gauge(
        "triptych_engine_requests_waiting",
        "Requests that wait to be admitted, blocked ones included.",
        now(lambda stats: stats.num_waiting + stats.num_blocked),
        aliases=("vllm:num_requests_waiting",),
    )
    gauge(
        "triptych_engine_requests_blocked",
        "Waiting requests that wait for something else than room.",
        now(lambda stats: stats.num_blocked),
    )
    gauge(
        "triptych_engine_waiting_tokens",
        "Tokens of waiting requests, without those that were cached when they were queued.",
        now(lambda stats: stats.num_waiting_tokens),
    )
    gauge(
        "triptych_engine_kv_blocks_used",
        "KV blocks that requests hold.",
        now(lambda stats: stats.num_used_blocks),
    )
    gauge(
        "triptych_engine_kv_blocks",
        "KV blocks that requests can hold.",
        now(lambda stats: stats.num_total_blocks),
    )
    gauge(
        "triptych_engine_kv_cache_usage_ratio",
        "Share of the KV blocks that requests hold, 0 to 1.",
        now(lambda stats: stats.num_used_blocks / (stats.num_total_blocks or 1)),
        aliases=("vllm:kv_cache_usage_perc",),
    )
    counter(
        "triptych_engine_prefix_cache_queries_total",
        "Prompt tokens looked up in the prefix cache, at the first admission of a request.",
        now(lambda stats: stats.prefix_queries),
        aliases=("vllm:prefix_cache_queries_total",),
    )
    counter(
        "triptych_engine_prefix_cache_hits_total",
        "Prompt tokens found in the prefix cache, at the first admission of a request.",
        now(lambda stats: stats.prefix_hits),
        aliases=("vllm:prefix_cache_hits_total",),
    )
    gauge(
        "triptych_engine_prefix_cache_recent_hit_ratio",
        "Share of prompt tokens found in the prefix cache, of the requests admitted last.",
        now(lambda stats: stats.prefix_hit_rate),
    )
    counter(
        "triptych_engine_preempted_prefix_cache_queries_total",
        "Tokens looked up in the prefix cache, at an admission after a preemption.",
        now(lambda stats: stats.preempted_queries),
    )
    counter(
        "triptych_engine_preempted_prefix_cache_hits_total",
        "Tokens found in the prefix cache, at an admission after a preemption.",
        now(lambda stats: stats.preempted_hits),
    )
    counter(
        "triptych_engine_preemptions_total",
        "Requests that lost their KV blocks and were queued again.",
        now(lambda stats: stats.num_preemptions),
        aliases=("vllm:num_preemptions_total",),
    )
    counter(
        "triptych_engine_chunked_prefills_total",
        "Admissions whose first step did not reach the last known token.",
        now(lambda stats: stats.num_chunked_prefills),
    )
    counter(
        "triptych_engine_draft_rows_total",
        "Rows of steps that had draft tokens.",
        now(lambda stats: stats.drafts.num_drafts),
        aliases=("vllm:spec_decode_num_drafts_total",),
    )
    counter(
        "triptych_engine_draft_tokens_total",
        "Draft tokens that were verified.",
        now(lambda stats: stats.drafts.num_draft_tokens),
        aliases=("vllm:spec_decode_num_draft_tokens_total",),
    )
    counter(
        "triptych_engine_accepted_draft_tokens_total",
        "Draft tokens that were accepted.",
        now(lambda stats: stats.drafts.num_accepted_tokens),
        aliases=("vllm:spec_decode_num_accepted_tokens_total",),
    )
    counter(
        "triptych_engine_accepted_draft_tokens_by_position_total",
        "Draft tokens that were accepted, by their position in the row from 0.",
        lambda: _by_position(engine.stats_snapshot.read().scheduler or _NOTHING),
        labels=("position",),
        aliases=("vllm:spec_decode_num_accepted_tokens_per_pos_total",),
    )
    counter(
        "triptych_engine_nan_rows_total",
        "Rows with NaN or infinite logits; each ended its request with an error.",
        now(lambda stats: stats.num_non_finite_rows),
    )
    gauge(
        "triptych_engine_step_max_rows",
        "Requests in the largest step so far.",
        now(lambda stats: stats.max_rows),
    )


def _register_loop(metrics: Metrics, engine: ServedEngine) -> None:
    def now(value: Callable[[LoopStats], float]) -> Callable[[], float]:
        return lambda: value(engine.stats_snapshot.read())

    def running_s(stats: LoopStats) -> float:
        started_at = stats.step_started_at
        return 0.0 if started_at is None else max(0.0, engine.clock.now() - started_at)

    counts = engine.stats_snapshot.counts
    metrics.counter(
        "triptych_engine_steps_total",
        "Steps that were launched.",
        now(lambda stats: stats.step_number),
    )
    metrics.distribution(
        "triptych_engine_step_duration_seconds",
        "Time from the beginning of a step, or the end of the one before it, to its result.",
        STEP_TIME_BUCKETS,
        lambda: {(): counts.step_times},
    )
    metrics.gauge(
        "triptych_engine_step_running_seconds",
        "How long the oldest step in flight, or a call between steps, has run; 0 without one.",
        now(running_s),
    )
    metrics.gauge(
        "triptych_engine_step_budget_seconds",
        "How long what runs may take before the engine counts as hung.",
        now(lambda stats: stats.step_budget_s),
    )
    metrics.counter(
        "triptych_engine_prompt_tokens_total",
        "Prompt tokens of requests that were added.",
        now(lambda stats: stats.num_prompt_tokens),
    )
    metrics.counter(
        "triptych_engine_generated_tokens_total",
        "Tokens that were sent to frontends.",
        now(lambda stats: stats.num_generated_tokens),
    )
    metrics.counter(
        "triptych_engine_requests_finished_total",
        "Requests that ended, by reason.",
        counts.finished.values.copy,
        labels=("finished_reason",),
    )
    metrics.counter(
        "triptych_engine_requests_aborted_total",
        "Requests that were ended from outside, by cause.",
        counts.aborted.values.copy,
        labels=("cause",),
    )


def _register_sessions(metrics: Metrics, sessions: Sessions) -> None:
    metrics.gauge(
        "triptych_engine_sessions",
        "Sessions of frontends that have a stream.",
        lambda: sessions.num_sessions,
    )
    metrics.gauge(
        "triptych_engine_sessions_parked",
        "Sessions whose stream broke and that may be resumed.",
        lambda: sessions.num_parked_sessions,
    )
    metrics.counter(
        "triptych_engine_sessions_resumed_total",
        "Streams that continued a session.",
        lambda: sessions.num_resumed,
    )
    metrics.gauge(
        "triptych_engine_orphaned_requests",
        "Requests whose outputs are kept for adoption by another frontend.",
        lambda: sessions.num_orphaned_requests,
    )
    metrics.gauge(
        "triptych_engine_kv_event_subscribers",
        "Subscribers of KV cache events.",
        lambda: sessions.num_kv_subscriptions,
    )
    metrics.gauge(
        "triptych_engine_stream_unread_bytes",
        "Outputs that are not written to the streams of frontends yet.",
        lambda: sessions.num_unread_bytes,
    )
    metrics.gauge(
        "triptych_engine_stream_unacknowledged_bytes",
        "Messages to frontends that are kept until they are acknowledged.",
        lambda: sessions.num_unacknowledged_bytes,
    )
    metrics.counter(
        "triptych_engine_stream_sent_bytes_total",
        "Serialized messages to frontends.",
        lambda: sessions.num_sent_bytes,
    )


def _register_lockstep(metrics: Metrics, engine: ServedEngine) -> None:
    def now(value: Callable[[LockstepDriver], float]) -> Callable[[], float]:
        def read() -> float:
            driver = None if engine.core is None else engine.core.lockstep
            return 0 if driver is None else value(driver)

        return read

    metrics.gauge(
        "triptych_engine_lockstep_wave",
        "Number of the wave that runs or comes next.",
        now(lambda driver: driver.rank_status.wave),
    )
    metrics.gauge(
        "triptych_engine_lockstep_in_wave",
        "Whether this rank steps with the others, 0 or 1.",
        now(lambda driver: driver.rank_status.is_in_wave),
    )
    metrics.gauge(
        "triptych_engine_lockstep_generation",
        "Generation of the process group; 0 without one.",
        now(lambda driver: driver.rank_status.generation),
    )
    metrics.counter(
        "triptych_engine_lockstep_votes_total",
        "Votes of the ranks on whether to go on.",
        now(lambda driver: driver.num_votes),
    )
    metrics.counter(
        "triptych_engine_lockstep_idle_steps_total",
        "Steps without requests of this rank, for those of others.",
        now(lambda driver: driver.num_idle_steps),
    )


def _one_of(states: type[Enum], present: Enum) -> Reading:
    return {(state.value,): state is present for state in states}


def _by_position(stats: SchedulerStats) -> Reading:
    return {(str(position),): count for position, count in enumerate(stats.drafts.accepted_per_position)}


def _cache_info(engine: ServedEngine) -> Reading:
    if engine.core is None:
        return {}
    facts = engine.core.facts
    return {(str(facts.block_size), str(facts.num_kv_blocks)): 1}
