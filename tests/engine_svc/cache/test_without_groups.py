"""The cache of a model without KV: requests have no blocks, and nothing is looked up."""

from __future__ import annotations

from engine_svc.build.engine import build_core
from engine_svc.cache.config import CacheConfig
from engine_svc.core.step import StepResult
from engine_svc.scheduler.config import SchedulerConfig
from tests.engine_svc.scheduler.fakes import granted, request


def test_requests_run_without_blocks_and_are_not_hashed():
    config = SchedulerConfig(max_model_len=64, max_num_batched_tokens=64, enable_chunked_prefill=False)
    core = build_core(config, CacheConfig(num_blocks=2, groups=()))
    requests = [request(name, 40) for name in "ab"]
    for added in requests:
        added.samples = False
        core.kv_cache.prepare(added)
        assert core.scheduler.refusal(added) is None
        core.scheduler.add(added)
    for name in "ab":
        plan = core.scheduler.schedule(1.0)
        assert granted(plan) == {name: 40}
        assert plan.admitted[0].block_ids == []
        (output,) = core.scheduler.update(plan, StepResult(plan.step_number, [[]]), 2.0)
        assert output.num_cached_tokens == 0
    assert [added.block_hashes for added in requests] == [[], []]
    assert core.kv_cache.num_used_blocks == 0
