"""The times of blocks in a real pool, by a clock that the test moves."""

from __future__ import annotations

from engine_svc.cache.attention import FullAttention
from engine_svc.cache.block_pool import BlockPool
from engine_svc.cache.config import CacheConfig
from engine_svc.features.kv_residency.scheduler import SAMPLED, KVResidency
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.feature import SchedulerContext
from triptych_kit.clock import FakeClock
from triptych_kit.telemetry.metrics import Metrics


def context(clock: FakeClock, metrics: Metrics) -> SchedulerContext:
    configs = SchedulerConfig(64), CacheConfig(10, (FullAttention(4),))
    return SchedulerContext(clock, lambda work: work(), *configs, metrics)


def sums(metrics: Metrics) -> dict[str, tuple[float, float]]:
    """Count and sum of each time of blocks."""
    values = {sample.name: sample.value for metric in metrics.collect() for sample in metric.samples}
    prefix = "triptych_engine_kv_block"
    return {
        name: (values[f"{prefix}_{name}_seconds_count"], values[f"{prefix}_{name}_seconds_sum"])
        for name in ("lifetime", "idle", "reuse_gap")
    }


def test_a_sampled_block_is_timed_from_its_allocation_over_its_uses_to_its_eviction():
    clock, metrics = FakeClock(), Metrics("engine")
    pool = BlockPool(SAMPLED + 1, [KVResidency(context(clock, metrics))])
    block_ids = pool.allocate(SAMPLED)
    assert block_ids[-1] == SAMPLED
    pool.register(block_ids, [bytes([number]) * 32 for number in block_ids])
    clock.advance(3)
    pool.hold(block_ids)
    clock.advance(4)
    pool.release([*block_ids, *block_ids])
    assert sums(metrics) == {"lifetime": (0, 0), "idle": (0, 0), "reuse_gap": (1, 3)}
    pool.allocate(SAMPLED)
    assert sums(metrics) == {"lifetime": (1, 7), "idle": (1, 4), "reuse_gap": (1, 3)}


def test_content_that_is_cleared_is_not_timed():
    clock, metrics = FakeClock(), Metrics("engine")
    pool = BlockPool(SAMPLED + 1, [KVResidency(context(clock, metrics))])
    block_ids = pool.allocate(SAMPLED)
    pool.release(block_ids)
    assert pool.reset()
    pool.hold(block_ids)
    assert sums(metrics) == {"lifetime": (0, 0), "idle": (0, 0), "reuse_gap": (0, 0)}
