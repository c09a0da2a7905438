"""The pool of blocks: who is held, who is free and in what order, and which content can be found again.

Knows block ids and keys, no requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine_svc.cache.block import Block, FreeList
from engine_svc.cache.observer import CacheObserver

PLACEHOLDER_BLOCK_ID = 0
_HASH_BYTES = 32


def content_key(block_hash: bytes, group: int) -> bytes:
    """By what a block is found: the hash of its content, and the group of layers that it holds KV of."""
    return block_hash + bytes((group,)) if group else block_hash


class BlockPool:
    """A fixed number of blocks. Block 0 is a placeholder that is never handed out.

    A block is on the free list exactly when its `ref_count` is 0. A free block keeps its content, and can be
    found by its key, until it is handed out again.
    """

    def __init__(self, num_blocks: int, observers: Sequence[CacheObserver] = ()) -> None:
        if num_blocks < 2:
            raise ValueError(f"the pool has {num_blocks} blocks, needs the placeholder and at least one more")
        self.observers = tuple(observers)
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeList(self._blocks[PLACEHOLDER_BLOCK_ID + 1 :])
        self._cached: dict[bytes, Block] = {}
        # Further blocks with the content of one in `_cached`, oldest first.
        self._twins: dict[bytes, OrderedDict[int, Block]] = {}

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can be handed out at all."""
        return len(self._blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, whether or not their content can still be found."""
        return len(self._free)

    @property
    def free_block_ids(self) -> list[int]:
        """The free blocks from the next to be handed out to the last. For tests and people: O(n)."""
        return [block.block_id for block in self._free]

    @property
    def num_cached_keys(self) -> int:
        """How many different contents can be found."""
        return len(self._cached)

    def ref_count(self, block_id: int) -> int:
        """How many hold this block."""
        return self._blocks[block_id].ref_count

    def key_of(self, block_id: int) -> bytes | None:
        """By which key this block can be found, if it can."""
        return self._blocks[block_id].key

    def allocate(self, num_blocks: int) -> list[int]:
        """Hand out the free blocks that are next in order; what they held is forgotten."""
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
        """The block that has held this content for the longest, if any does."""
        block = self._cached.get(key)
        return None if block is None else block.block_id

    def hold(self, block_ids: Sequence[int]) -> None:
        """Add one holder to each block, taking it off the free list where it has none yet."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1
        for observer in self.observers:
            observer.on_hold(block_ids)

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks nobody holds."""
        blocks = self._blocks
        return sum(blocks[block_id].ref_count == 0 for block_id in block_ids)

    def release(self, block_ids: Iterable[int]) -> None:
        """Take one holder off each block, in this order; those left without one become free.

        Blocks without findable content are reused first, the others only after all that are free already.
        """
        worthless: list[Block] = []
        findable: list[Block] = []
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is released but nobody holds it"
            block.ref_count -= 1
            if block.ref_count == 0:
                (worthless if block.key is None else findable).append(block)
        self._free.prepend(worthless)
        self._free.append(findable)

    def register(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        """Make the content of full blocks findable. Equal content may stand in several blocks."""
        for block_id, key in zip(block_ids, keys, strict=True):
            block = self._blocks[block_id]
            assert block.key is None, f"block {block_id} is registered twice"
            block.key = key
            if self._cached.setdefault(key, block) is not block:
                self._twins.setdefault(key, OrderedDict())[block_id] = block

    def forget(self, block_ids: Iterable[int]) -> None:
        """Let the content of free blocks not be found any more; those that someone holds are left."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.key is not None and block.ref_count == 0:
                self._forget(block, block.key)

    def invalidate(self, block_ids: Iterable[int]) -> None:
        """Let the content of blocks not be found any more, whoever holds them.

        Free ones keep their place in the order: they are reused as late as if they still had it.
        """
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.key is not None:
                self._forget(block, block.key)

    def reset(self) -> bool:
        """Forget all content. Refused, with no change, while anyone holds a block."""
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
