"""How others follow what the cache holds. Knows none of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A run of blocks whose content can be found from now on."""

    block_hashes: list[bytes]
    parent_hash: bytes  # the hash before the run; the root's where it begins with the first block
    token_ids: list[int]
    block_size: int
    group: int  # index of the group of layers


class CacheObserver(Protocol):
    """Told, never asked. Called in the thread of the loop, in the order of the changes."""

    def on_allocate(self, block_ids: Sequence[int]) -> None:
        """Free blocks were handed out; what they held has been forgotten."""

    def on_hold(self, block_ids: Sequence[int]) -> None:
        """A further request took over blocks with their content."""

    def on_store(self, stored: StoredBlocks) -> None:
        """Content was made findable."""

    def on_evict(self, block_id: int, block_hash: bytes, group: int) -> None:
        """A block with findable content is handed out anew; the content may stand in another block too."""

    def on_clear(self) -> None:
        """All content was forgotten."""
