"""What the scheduler counts. Knows no metric names and no wire."""

from __future__ import annotations

from dataclasses import dataclass


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
    num_preemptions: int
    num_chunked_prefills: int  # admissions whose first step did not reach their last known token
    max_rows: int  # of any step
