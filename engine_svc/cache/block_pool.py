"""The pool of blocks: reference counts, the order of free blocks, and cached content by key.

Knows block ids and keys, no requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from engine_svc.cache.block import Block, FreeList
from engine_svc.cache.observer import CacheObserver

PLACEHOLDER_BLOCK_ID = 0
_HASH_BYTES = 32


def held_blocks(block_ids: Iterable[int]) -> list[int]:
    """The block ids of a table, without placeholders."""
    return [block_id for block_id in block_ids if block_id != PLACEHOLDER_BLOCK_ID]


def content_key(block_hash: bytes, group: int) -> bytes:
    """The key of a cached block: the hash of its content, and the group of layers whose KV it has."""
    return block_hash + bytes((group,)) if group else block_hash


class BlockPool:
    """Blocks with consecutive ids. Block 0 is a placeholder that is never allocated.

    A block is on the free list exactly when its `ref_count` is 0. A free block keeps its content, and can be
    found by its key, until it is allocated again.
    """

    def __init__(
        self,
        num_blocks: int,
        observers: Sequence[CacheObserver] = (),
        *,
        first_block_id: int = PLACEHOLDER_BLOCK_ID + 1,
    ) -> None:
        """num_blocks: one more than the greatest id; those before `first_block_id` are of other pools."""
        if num_blocks <= first_block_id:
            raise ValueError(f"the pool has {num_blocks} blocks, needs the placeholder and at least one more")
        self.observers = tuple(observers)
        self.block_ids = range(first_block_id, num_blocks)
        # By id: a lookup of a block is no arithmetic.
        self._blocks = [Block(PLACEHOLDER_BLOCK_ID)] * first_block_id
        self._blocks += [Block(block_id) for block_id in self.block_ids]
        self._free = FreeList(self._blocks[first_block_id:])
        self._cached: dict[bytes, Block] = {}
        # Further blocks with the content of one in `_cached`, oldest first.
        self._twins: dict[bytes, OrderedDict[int, Block]] = {}

    @property
    def num_usable_blocks(self) -> int:
        """All blocks except the placeholder."""
        return len(self.block_ids)

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a holder, whether or not their content is cached."""
        return len(self._free)

    def has_free(self, num_blocks: Sequence[int]) -> bool:
        """Whether there are this number of free blocks for each group of layers."""
        return sum(num_blocks) <= len(self._free)

    def cached_block_ids(self, limit: int) -> list[int]:
        """Cached blocks without a holder among the `limit` that are reused last, from the last on."""
        newest_first = islice(reversed(self._free), limit)
        return [block.block_id for block in newest_first if block.key is not None]

    @property
    def num_cached_keys(self) -> int:
        return len(self._cached)

    def ref_count(self, block_id: int) -> int:
        return self._blocks[block_id].ref_count

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate the next free blocks; their cached content is evicted."""
        if num_blocks > len(self._free):
            raise ValueError(f"{num_blocks} blocks wanted, {len(self._free)} are free")
        block_ids = []
        for _ in range(num_blocks):
            block = self._free.pop_first()
            if block.key is not None:
                self._forget(block, block.key)
            block.ref_count = 1
            block_ids.append(block.block_id)
        for observer in self.observers:
            observer.on_allocate(block_ids)
        return block_ids

    def find(self, key: bytes) -> int | None:
        """The oldest block with this content, if there is one."""
        block = self._cached.get(key)
        return None if block is None else block.block_id

    def content_of(self, block_id: int) -> bytes | None:
        """The key of a block's cached content."""
        return self._blocks[block_id].key

    def hold(self, block_ids: Sequence[int]) -> None:
        """Add one holder to each block; a block without any leaves the free list."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1
        for observer in self.observers:
            observer.on_hold(block_ids)

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks have no holder."""
        blocks = self._blocks
        return sum(blocks[block_id].ref_count == 0 for block_id in block_ids)

    def release(self, block_ids: Iterable[int]) -> None:
        """Remove one holder from each block, in this order; blocks without a holder become free.

        Blocks without cached content are reused first, the others after all that are free already.
        """
        uncached: list[Block] = []
        cached: list[Block] = []
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is released but has no holder"
            block.ref_count -= 1
            if block.ref_count == 0:
                (uncached if block.key is None else cached).append(block)
        self._free.prepend(uncached)
        self._free.append(cached)

    def register(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        """Cache the content of full blocks under these keys. Several blocks may have equal content."""
        for block_id, key in zip(block_ids, keys, strict=True):
            block = self._blocks[block_id]
            assert block.key is None, f"block {block_id} is registered twice"
            block.key = key
            if self._cached.setdefault(key, block) is not block:
                self._twins.setdefault(key, OrderedDict())[block_id] = block

    def forget(self, block_ids: Iterable[int]) -> None:
        """Drop the cached content of those blocks that are free; blocks with a holder keep theirs."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.key is not None and block.ref_count == 0:
                self._forget(block, block.key)

    def drop(self, block_id: int, key: bytes) -> None:
        """Drop this content of a block without a holder, which is the next to be reused."""
        block = self._blocks[block_id]
        if block.key == key and block.ref_count == 0:
            self._forget(block, key)
            self._free.remove(block)
            self._free.prepend((block,))

    def invalidate(self, block_ids: Iterable[int]) -> None:
        """Drop the cached content of blocks, also of those with holders.

        Free ones keep their position on the free list, and are reused as late as if they still had it.
        """
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.key is not None:
                self._forget(block, block.key)

    def reset(self) -> bool:
        """Drop all cached content. Returns False, and changes nothing, while a block has a holder."""
        if len(self._free) != self.num_usable_blocks:
            return False
        for block in self._blocks:
            block.key = None
        self._cached.clear()
        self._twins.clear()
        for observer in self.observers:
            observer.on_clear()
        return True

    def _forget(self, block: Block, key: bytes) -> None:
        block.key = None
        for observer in self.observers:
            observer.on_evict(block.block_id, key[:_HASH_BYTES], key[-1] if len(key) > _HASH_BYTES else 0)
        twins = self._twins.get(key)
        if twins is None:
            del self._cached[key]
            return
        if self._cached[key] is block:
            _, self._cached[key] = twins.popitem(last=False)
        else:
            del twins[block.block_id]
        if not twins:
            del self._twins[key]


class JoinedPools:
    """Pools of different ids as one, for what does not depend on the pool."""

    def __init__(self, pools: Sequence[BlockPool], pool_of: Sequence[int]) -> None:
        """pool_of: by group of layers, the index of its pool."""
        self._pools = tuple(pools)
        self._pool_of = tuple(pool_of)

    @property
    def num_usable_blocks(self) -> int:
        return sum(pool.num_usable_blocks for pool in self._pools)

    @property
    def num_free_blocks(self) -> int:
        return sum(pool.num_free_blocks for pool in self._pools)

    def has_free(self, num_blocks: Sequence[int]) -> bool:
        wanted = [0] * len(self._pools)
        for index, num_group_blocks in zip(self._pool_of, num_blocks, strict=True):
            wanted[index] += num_group_blocks
        return all(num <= pool.num_free_blocks for num, pool in zip(wanted, self._pools, strict=True))

    def ref_count(self, block_id: int) -> int:
        return next(pool.ref_count(block_id) for pool in self._pools if block_id in pool.block_ids)

    def find(self, key: bytes) -> int | None:
        """The oldest block with this content; keys name a group, whose blocks are of one pool."""
        return next((found for pool in self._pools if (found := pool.find(key)) is not None), None)

    def hold(self, block_ids: Sequence[int]) -> None:
        for pool, own in self._divide(block_ids):
            pool.hold(own)

    def release(self, block_ids: Iterable[int]) -> None:
        for pool, own in self._divide(block_ids):
            pool.release(own)

    def invalidate(self, block_ids: Iterable[int]) -> None:
        for pool, own in self._divide(block_ids):
            pool.invalidate(own)

    def reset(self) -> bool:
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        return all(pool.reset() for pool in self._pools)

    def _divide(self, block_ids: Iterable[int]) -> list[tuple[BlockPool, list[int]]]:
        block_ids = list(block_ids)
        divided = (
            (pool, [block_id for block_id in block_ids if block_id in pool.block_ids]) for pool in self._pools
        )
        return [(pool, own) for pool, own in divided if own]
