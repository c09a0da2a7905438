"""The pool of blocks: who is held, who is free and in what order, and which content can be found again.

Knows block ids and hashes, no requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine_svc.cache.block import Block, FreeList

PLACEHOLDER_BLOCK_ID = 0


class BlockPool:
    """A fixed number of blocks. Block 0 is a placeholder that is never handed out.

    A block is on the free list exactly when its `ref_count` is 0. A free block keeps its content, and can be
    found by its hash, until it is handed out again.
    """

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(f"the pool has {num_blocks} blocks, needs the placeholder and at least one more")
        self.enable_prefix_caching = enable_prefix_caching
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeList(self._blocks[PLACEHOLDER_BLOCK_ID + 1 :])
        self._cached: dict[bytes, Block] = {}
        # Further blocks with the content of one in `_cached`, oldest first.
        self._twins: dict[bytes, list[Block]] = {}

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
    def num_cached_hashes(self) -> int:
        """How many different contents can be found."""
        return len(self._cached)

    def ref_count(self, block_id: int) -> int:
        """How many requests hold this block."""
        return self._blocks[block_id].ref_count

    def block_hash(self, block_id: int) -> bytes | None:
        """By which hash this block can be found, if it can."""
        return self._blocks[block_id].block_hash

    def allocate(self, num_blocks: int) -> list[int]:
        """Hand out the free blocks that are next in order; what they held is forgotten."""
        if num_blocks > len(self._free):
            raise ValueError(f"{num_blocks} blocks wanted, {len(self._free)} are free")
        block_ids = []
        for _ in range(num_blocks):
            block = self._free.pop_first()
            if block.block_hash is not None:
                self._forget(block)
            block.ref_count = 1
            block_ids.append(block.block_id)
        return block_ids

    def find(self, block_hash: bytes) -> int | None:
        """The block that has held this content for the longest, if any does."""
        block = self._cached.get(block_hash)
        return None if block is None else block.block_id

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add one holder to each block, taking it off the free list where it has none yet."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

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
                (worthless if block.block_hash is None else findable).append(block)
        self._free.prepend(worthless)
        self._free.append(findable)

    def register(self, block_ids: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Make the content of full blocks findable. Equal content may stand in several blocks."""
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            block = self._blocks[block_id]
            assert block.block_hash is None, f"block {block_id} is registered twice"
            block.block_hash = block_hash
            if self._cached.setdefault(block_hash, block) is not block:
                self._twins.setdefault(block_hash, []).append(block)

    def reset(self) -> bool:
        """Forget all content. Refused, with no change, while anyone holds a block."""
        if len(self._free) != self.num_usable_blocks:
            return False
        for block in self._blocks:
            block.block_hash = None
        self._cached.clear()
        self._twins.clear()
        return True

    def _forget(self, block: Block) -> None:
        block_hash = block.block_hash
        assert block_hash is not None, "only a block that can be found can be forgotten"
        block.block_hash = None
        twins = self._twins.get(block_hash)
        if twins is None:
            del self._cached[block_hash]
            return
        if self._cached[block_hash] is block:
            self._cached[block_hash] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self._twins[block_hash]
