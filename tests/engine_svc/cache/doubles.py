"""A listener to the events of the cache."""

from __future__ import annotations

from collections.abc import Sequence

from engine_svc.cache.observer import StoredBlocks


class EventLog:
    """Records the cache's events in order; that nothing was handed out or shared is no news."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def take(self) -> list[tuple[object, ...]]:
        events, self.events = self.events, []
        return events

    def on_allocate(self, block_ids: Sequence[int]) -> None:
        if block_ids:
            self.events.append(("allocate", list(block_ids)))

    def on_hold(self, block_ids: Sequence[int]) -> None:
        if block_ids:
            self.events.append(("hold", list(block_ids)))

    def on_store(self, stored: StoredBlocks) -> None:
        self.events.append(("store", stored))

    def on_evict(self, block_id: int, block_hash: bytes, group: int) -> None:
        self.events.append(("evict", block_id, block_hash, group))

    def on_clear(self) -> None:
        self.events.append(("clear",))
