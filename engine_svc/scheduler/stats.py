"""Statistics of the scheduler. Knows no metric names and no wire."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.speculation.accounting import DraftStats

# What keeps waiting requests from being admitted.
FREE_BLOCKS, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, PAUSED = (
    "free_blocks", "max_num_seqs", "max_num_batched_tokens", "paused",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """State now, and counters since the start."""

    step_number: int
    num_running: int
    num_waiting: int
    num_blocked: int
    num_waiting_tokens: int  # of waiting and blocked requests, without those cached when they were queued
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
    num_non_finite_rows: int  # each ended its request with an error
    drafts: DraftStats
    num_resumable: int = 0  # requests that take further input segments
    num_idle: int = 0  # those that wait for one
    num_retained_lots: int = 0  # of blocks that stay without a request, each under a key
    num_retained_blocks: int = 0  # in any of these
    admission_limit: str = ""  # why the newest plan admitted no further request; empty: none waited
