"""Measures how long blocks stay in the prefix cache, how long unused, and how soon they are used again."""

from __future__ import annotations

from collections.abc import Sequence

from engine_svc.cache.observer import StoredBlocks
from engine_svc.config import EngineConfig
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature

BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)
# One of SAMPLED blocks is observed, by its id: which ids a prompt gets does not depend on its content.
SAMPLED = 16


def make(config: EngineConfig, context: SchedulerContext) -> SchedulerFeature | None:
    return KVResidency(context) if config.kv_cache_metrics else None


class KVResidency(SchedulerFeature):
    """Observes the allocations, uses and evictions of one block in `SAMPLED`."""

    def __init__(self, context: SchedulerContext) -> None:
        self._clock = context.clock
        histogram = context.metrics.histogram
        self._lifetime = histogram(
            "triptych_engine_kv_block_lifetime_seconds",
            "Time from the allocation of a block to the eviction of its content. With --kv-cache-metrics.",
            BUCKETS,
            aliases=("vllm:kv_block_lifetime_seconds",),
        ).of()
        self._idle = histogram(
            "triptych_engine_kv_block_idle_seconds",
            "Time from the last use of a block by a new request to its eviction. With --kv-cache-metrics.",
            BUCKETS,
            aliases=("vllm:kv_block_idle_before_evict_seconds",),
        ).of()
        self._reuse_gap = histogram(
            "triptych_engine_kv_block_reuse_gap_seconds",
            "Time between two uses of a block by new requests. With --kv-cache-metrics.",
            BUCKETS,
            aliases=("vllm:kv_block_reuse_gap_seconds",),
        ).of()
        self._allocated_at: dict[int, float] = {}
        self._used_at: dict[int, float] = {}
        self.cache_observer = self

    def on_allocate(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            if block_id % SAMPLED == 0:
                self._allocated_at[block_id] = self._used_at[block_id] = self._clock.now()

    def on_hold(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            if block_id % SAMPLED == 0 and block_id in self._used_at:
                now = self._clock.now()
                self._reuse_gap.observe(now - self._used_at[block_id])
                self._used_at[block_id] = now

    def on_store(self, stored: StoredBlocks) -> None:
        pass

    def on_evict(self, block_id: int, block_hash: bytes, group: int) -> None:
        if block_id % SAMPLED == 0 and block_id in self._used_at:
            now = self._clock.now()
            self._lifetime.observe(now - self._allocated_at.pop(block_id))
            self._idle.observe(now - self._used_at.pop(block_id))

    def on_clear(self) -> None:
        self._allocated_at.clear()
        self._used_at.clear()
