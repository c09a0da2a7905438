"""How features observe the contents of the cache. Knows none of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A run of blocks that entered the prefix cache."""

    block_hashes: list[bytes]
    parent_hash: bytes  # the hash before the run, or the root if it begins with the first block
    token_ids: list[int]
    block_size: int
    group: int  # index of the group of layers
    variant: str = ""  # of the model, that has computed them


class CacheObserver(Protocol):
    """Observes and never decides. Called in the engine thread, in the order of the changes."""

    def on_allocate(self, block_ids: Sequence[int]) -> None:
        """Free blocks were allocated; their content was evicted before."""

    def on_hold(self, block_ids: Sequence[int]) -> None:
        """A further request took over blocks with their content."""

    def on_store(self, stored: StoredBlocks) -> None: ...

    def on_evict(self, block_id: int, block_hash: bytes, group: int) -> None:
        """A block left the prefix cache; another block may have the same content."""

    def on_clear(self) -> None:
        """The prefix cache was cleared."""
