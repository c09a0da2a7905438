"""State of the scheduler and the block pool that tests compare and no part of the product reads."""

from __future__ import annotations

from engine_svc.cache.block_pool import BlockPool, JoinedPools
from engine_svc.cache.kv_cache import KVCache
from engine_svc.scheduler.scheduler import Scheduler


def num_unfinished(scheduler: Scheduler) -> int:
    """Running, waiting and blocked requests."""
    return len(scheduler._queues.requests)


def free_block_ids(pool: BlockPool) -> list[int]:
    """The free blocks from the next to be allocated to the last."""
    return [block.block_id for block in pool._free]


def retained_lots(kv_cache: KVCache) -> list[list[int]]:
    """The blocks of each lot that is retained."""
    return list(kv_cache.retained._lots.values())


def all_blocks(kv_cache: KVCache) -> BlockPool | JoinedPools:
    """The pools of a cache as one."""
    return kv_cache._all_blocks


def content_of(kv_cache: KVCache, block_id: int) -> bytes | None:
    """The key of a block's content if it is cached."""
    return next(pool.content_of(block_id) for pool in kv_cache.pools if block_id in pool.block_ids)


def key_of(pool: BlockPool, block_id: int) -> bytes | None:
    """The key of a block's content if it is cached."""
    return pool._blocks[block_id].key
