"""A block of the pool and the list of free blocks, linked through the blocks themselves.

Knows no requests and no content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Block:
    """`block_size` token places of KV in all layers, by their index in the pool."""

    __slots__ = ("block_id", "key", "next", "previous", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: bytes | None = None  # set while the prefix cache knows its content
        self.previous: Block | None = None  # both links are set exactly while it is on the free list
        self.next: Block | None = None


class FreeList:
    """Blocks that nobody holds, in the order in which they are reused. Every operation costs O(1) a block."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        # Two sentinels, so that no operation has to ask whether it is at an end.
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next = self._tail
        self._tail.previous = self._head
        self._num_blocks = 0
        self.append(blocks)

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[Block]:
        """The blocks from the next to be reused to the last."""
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next

    def pop_first(self) -> Block:
        """Take the block that is to be reused next."""
        block = self._head.next
        if block is None or block is self._tail:
            raise IndexError("No free blocks available")
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Take one block out of wherever it stands."""
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
        assert following is not None, "a place on the list always has a successor"
        for block in blocks:
            if block.next is not None:
                raise ValueError(f"block {block.block_id} is already on the free list")
            anchor.next = block
            block.previous = anchor
            # Set before the next block is looked at, so that the same block twice is noticed.
            block.next = following
            anchor = block
            self._num_blocks += 1
        following.previous = anchor
