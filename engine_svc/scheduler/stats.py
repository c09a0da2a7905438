"""What the scheduler counts. Knows no metric names and no wire."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.cache.kv_cache import KVCache
from engine_svc.scheduler.request_queues import RequestQueues


@dataclass(frozen=True, slots=True)
class DraftStats:
    """What became of drafts since the start."""

    num_drafts: int = 0  # rows of steps that carried any
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()  # index 0 is the first draft of a row


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """State now, and counters since the start."""

    step_number: int
    num_running: int
    num_waiting: int
    num_blocked: int
    num_waiting_tokens: int  # of waiting and blocked requests, less what the prefix cache knew when they came
    num_used_blocks: int
    num_total_blocks: int
    prefix_queries: int  # tokens, at first admissions
    prefix_hits: int
    prefix_hit_rate: float  # of the last requests admitted first
    preempted_queries: int  # tokens, at admissions after a preemption
    preempted_hits: int
    num_preemptions: int
    num_chunked_prefills: int  # admissions whose first step did not reach their last known token
    max_rows: int  # of any step
    drafts: DraftStats


def make_stats(
    queues: RequestQueues,
    kv_cache: KVCache,
    drafts: DraftStats,
    *,
    step_number: int,
    num_chunked_prefills: int,
    max_rows: int,
) -> SchedulerStats:
    """The state of roster and cache, with what the scheduler counted itself."""
    return SchedulerStats(
        step_number=step_number,
        num_running=len(queues.running),
        num_waiting=queues.waiting.num_ready,
        num_blocked=queues.waiting.num_blocked,
        num_waiting_tokens=queues.waiting.num_uncached_tokens,
        num_used_blocks=kv_cache.num_used_blocks,
        num_total_blocks=kv_cache.num_total_blocks,
        prefix_queries=kv_cache.prefix_queries,
        prefix_hits=kv_cache.prefix_hits,
        prefix_hit_rate=kv_cache.hit_rate.value,
        preempted_queries=kv_cache.preempted_queries,
        preempted_hits=kv_cache.preempted_hits,
        num_preemptions=queues.num_preemptions,
        num_chunked_prefills=num_chunked_prefills,
        max_rows=max_rows,
        drafts=drafts,
    )
