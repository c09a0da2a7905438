"""A block of the pool, and the list of free blocks, linked through the blocks. Knows no requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Block:
    """`block_size` token slots of KV in all layers, by their index in the pool."""

    __slots__ = ("block_id", "key", "next", "previous", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: bytes | None = None  # set while the prefix cache has its content
        self.previous: Block | None = None  # both links are set exactly while it is on the free list
        self.next: Block | None = None


class FreeList:
    """Blocks without a holder, in the order in which they are reused. Every operation is O(1) per block."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        # Two sentinels, so that no operation has to check for an end.
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next = self._tail
        self._tail.previous = self._head
        self._num_blocks = 0
        self.append(blocks)

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[Block]:
        """Iterate in the order of reuse, the next block first."""
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next

    def __reversed__(self) -> Iterator[Block]:
        """Iterate against the order of reuse, the block to be reused last first."""
        block = self._tail.previous
        while block is not None and block is not self._head:
            yield block
            block = block.previous

    def pop_first(self) -> Block:
        """Remove and return the block to be reused next."""
        block = self._head.next
        if block is None or block is self._tail:
            raise IndexError("No free blocks available")
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Remove a block from any position."""
        previous, following = block.previous, block.next
        if previous is None or following is None:
            raise ValueError(f"block {block.block_id} is not on the free list")
        previous.next = following
        following.previous = previous
        block.previous = block.next = None
        self._num_blocks -= 1

    def append(self, blocks: Iterable[Block]) -> None:
        """Put blocks at the end, keeping their order: they are reused last."""
        last = self._tail.previous
        assert last is not None, "the end sentinel is always linked"
        self._insert_behind(last, blocks)

    def prepend(self, blocks: Iterable[Block]) -> None:
        """Put blocks at the front, keeping their order: they are reused first."""
        self._insert_behind(self._head, blocks)

    def _insert_behind(self, anchor: Block, blocks: Iterable[Block]) -> None:
        following = anchor.next
        assert following is not None, "every block on the list has a successor"
        for block in blocks:
            if block.next is not None:
                raise ValueError(f"block {block.block_id} is already on the free list")
            anchor.next = block
            block.previous = anchor
            # Set before the next block is checked, so that the same block twice is detected.
            block.next = following
            anchor = block
            self._num_blocks += 1
        following.previous = anchor
