"""Rebuilds from the events of the cache what can be found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine_svc.cache.observer import StoredBlocks
from tests.simulation.broken import BrokenInvariant


class CacheWatch:
    """Rebuilds from the events of the cache what can be found, and counts evictions."""

    def __init__(self) -> None:
        self.stored: Counter[tuple[bytes, int]] = Counter()  # by content and group, in how many blocks
        self.num_evictions = 0
        self.num_shared = 0

    def on_allocate(self, block_ids: Sequence[int]) -> None:
        """Nothing: evictions are reported on their own."""

    def on_hold(self, block_ids: Sequence[int]) -> None:
        self.num_shared += len(block_ids)

    def on_store(self, stored: StoredBlocks) -> None:
        group = stored.group
        for block_hash in stored.block_hashes:
            self.stored[block_hash, group] += 1

    def on_evict(self, block_id: int, block_hash: bytes, group: int) -> None:
        self.num_evictions += 1
        count = self.stored[block_hash, group] - 1
        if count < 0:
            raise BrokenInvariant(
                "hash-soundness", f"block {block_id} is evicted, but its content was not there"
            )
        if count:
            self.stored[block_hash, group] = count
        else:
            del self.stored[block_hash, group]

    def on_clear(self) -> None:
        self.stored.clear()
