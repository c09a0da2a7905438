"""Blocks that stay allocated after the requests that computed them, by key. Knows no time and no reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from engine_svc.cache.block_pool import BlockPool, JoinedPools


class RetainedBlocks:
    """Lots of blocks, each under a key. A block may be in several lots, and requests may hold it as well.

    version: grows with every change.  on_change: gets the key, and its blocks or None if they were released.
    """

    def __init__(self, pool: BlockPool | JoinedPools) -> None:
        self._pool = pool
        self._lots: dict[str, list[int]] = {}
        self._num_lots: Counter[int] = Counter()  # by block
        self.version = 0
        self.on_change: Callable[[str, Sequence[int] | None], None] = lambda key, block_ids: None

    def __contains__(self, key: str) -> bool:
        return key in self._lots

    def __iter__(self) -> Iterator[str]:
        """The keys, the oldest first."""
        return iter(self._lots)

    def __len__(self) -> int:
        return len(self._lots)

    @property
    def num_blocks(self) -> int:
        """Blocks in any lot."""
        return len(self._num_lots)

    @property
    def hold_all_used(self) -> bool:
        """Whether nothing else holds a block."""
        num_used = self._pool.num_usable_blocks - self._pool.num_free_blocks
        return num_used == len(self._num_lots) and all(
            self._pool.ref_count(block_id) == num_lots for block_id, num_lots in self._num_lots.items()
        )

    def add(self, key: str, block_ids: Sequence[int]) -> None:
        """Retain blocks, which are released in this order. The key must be new."""
        if key in self._lots:
            raise ValueError(f"blocks are retained under {key!r} already")
        self._pool.hold(block_ids)
        self._lots[key] = list(block_ids)
        self._num_lots.update(block_ids)
        self.version += 1
        self.on_change(key, block_ids)

    def release(self, key: str) -> int:
        """Release a lot; returns how many of its blocks are in no other."""
        block_ids = self._lots.pop(key)
        self._pool.release(block_ids)
        self._num_lots.subtract(block_ids)
        gone = [block_id for block_id in block_ids if not self._num_lots[block_id]]
        for block_id in gone:
            del self._num_lots[block_id]
        self.version += 1
        self.on_change(key, None)
        return len(gone)
