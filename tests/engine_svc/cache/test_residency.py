"""How long content stays and how it is used can be measured from the events, by who has a clock (67)."""

from __future__ import annotations

import pytest

from engine_svc.cache.block_pool import BlockPool
from service_kit.clock import FakeClock
from tests.engine_svc.cache.doubles import Residence, Residency
from tests.engine_svc.cache.fakes import SmallCache, request, tokens


def _use(pool: BlockPool, block_id: int) -> None:
    pool.hold([block_id])
    pool.release([block_id])


def _pool_with_content(residency: Residency, num_blocks: int = 2) -> BlockPool:
    """Every block has content that can be found, and is free."""
    pool = BlockPool(num_blocks, observers=(residency,))
    block_ids = pool.allocate(num_blocks - 1)
    pool.register(block_ids, [b"content %d" % block_id for block_id in block_ids])
    pool.release(block_ids)
    return pool


def test_67_the_last_four_uses_are_remembered_until_eviction():
    clock = FakeClock()
    residency = Residency(clock.now)
    pool = _pool_with_content(residency)
    for seconds in (3, 3, 4, 5, 6):
        clock.advance(seconds)
        _use(pool, 1)
    clock.advance(9)
    pool.allocate(1)
    # Used after 3, 6, 10, 15 and 21 seconds, evicted after 30.
    assert residency.ended == [Residence(lifetime_s=30, idle_s=9, reuse_gaps_s=(4, 5, 6))]


@pytest.mark.parametrize(
    ("num_uses", "idle_s", "gaps"), [(0, 10, ()), (1, 8, ()), (2, 6, (2,)), (4, 2, (2, 2, 2))]
)
def test_67_without_uses_content_is_idle_from_the_beginning(
    num_uses: int, idle_s: float, gaps: tuple[float, ...]
):
    clock = FakeClock()
    residency = Residency(clock.now)
    pool = _pool_with_content(residency)
    for _ in range(num_uses):
        clock.advance(2)
        _use(pool, 1)
    clock.advance(10 - 2 * num_uses)
    pool.allocate(1)
    assert residency.ended == [Residence(10, idle_s, gaps)]


def test_67_half_of_the_blocks_are_drawn():
    clock = FakeClock()
    residency = Residency(clock.now, share=0.5, seed=7)
    pool = _pool_with_content(residency, 1001)
    assert 400 <= residency.num_sampled <= 600
    drawn = residency.num_sampled
    pool.allocate(1000)
    assert len(residency.ended) == drawn


@pytest.mark.parametrize(("share", "num_sampled"), [(0.0, 0), (1.0, 1000)])
def test_67_none_or_all_can_be_drawn(share: float, num_sampled: int):
    residency = Residency(FakeClock().now, share=share)
    BlockPool(1001, observers=(residency,)).allocate(1000)
    assert residency.num_sampled == num_sampled


def test_67_a_block_without_content_is_not_evicted_and_begins_anew():
    clock = FakeClock()
    residency = Residency(clock.now)
    pool = BlockPool(2, observers=(residency,))
    pool.release(pool.allocate(1))
    clock.advance(5)
    pool.register(pool.allocate(1), [b"content"])
    pool.release([1])
    assert residency.ended == []
    clock.advance(2)
    pool.allocate(1)
    assert residency.ended == [Residence(2, 2, ())]


def test_67_what_is_forgotten_at_once_is_not_measured():
    residency = Residency(FakeClock().now)
    pool = _pool_with_content(residency, 4)
    assert pool.reset()
    assert residency.num_sampled == 0
    pool.allocate(3)
    assert residency.ended == []


def test_67_hits_are_uses():
    clock = FakeClock()
    residency = Residency(clock.now)
    small = SmallCache(4, observers=(residency,))
    for index, seconds in enumerate((0, 5, 2)):
        clock.advance(seconds)
        again = request(f"r{index}", tokens(33))
        assert small.admit(again)
        small.cache.release(again)
    clock.advance(4)
    assert small.admit(request("other", tokens(48, 500)))
    # The two full blocks were hit twice; the third never had content.
    assert residency.ended == [Residence(11, 4, (2,))] * 2
