"""Publishes what enters and leaves the prefix cache, as one batch per step. Knows no wire and no subscriber.

Changes of a plan are published when the next step is done; without overlapping steps, when that step is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

from engine_svc.cache.observer import StoredBlocks
from engine_svc.config import EngineConfig
from engine_svc.core.request import Request
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.loop.mailbox import AllBlocksRemoved, KVEvent, RemovedBlocks, part_of
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature

MAX_BATCH_BLOCKS = 8192


def make(config: EngineConfig, context: SchedulerContext) -> SchedulerFeature | None:
    return None if context.publish_blocks is None else KVEvents(context.publish_blocks)


class KVEvents(SchedulerFeature):
    """Observes the cache, and steps as a feature of the scheduler; calls `publish` with each batch.

    Several blocks may have equal content. Only the first is reported as stored, and only the last as removed,
    so that the events add up to exactly what is cached.
    """

    def __init__(
        self, publish: Callable[[Sequence[KVEvent], int], None], *, max_batch_blocks: int = MAX_BATCH_BLOCKS
    ) -> None:
        self._publish = publish
        self._max_batch_blocks = max_batch_blocks
        self._num_copies: Counter[tuple[bytes, int]] = Counter()  # by hash and group
        self._events: list[KVEvent] = []  # since the last batch
        self._num_blocks = 0  # in these events
        self._num_in_flight = 0  # steps that are planned and not computed yet
        self.cache_observer = self

    def on_allocate(self, block_ids: Sequence[int]) -> None:
        pass

    def on_hold(self, block_ids: Sequence[int]) -> None:
        pass

    def on_store(self, stored: StoredBlocks) -> None:
        group, copies = stored.group, self._num_copies
        is_new = []
        for block_hash in stored.block_hashes:
            copies[block_hash, group] += 1
            is_new.append(copies[block_hash, group] == 1)
        for is_first_copy, indices in groupby(range(len(is_new)), is_new.__getitem__):
            if is_first_copy:
                run = list(indices)
                self._note(part_of(stored, run[0], run[-1] + 1), len(run))

    def on_evict(self, block_id: int, block_hash: bytes, group: int) -> None:
        key = (block_hash, group)
        self._num_copies[key] -= 1
        if self._num_copies[key]:
            return
        del self._num_copies[key]
        latest = self._events[-1] if self._events else None
        if isinstance(latest, RemovedBlocks) and latest.group == group:
            latest.block_hashes.append(block_hash)
            self._count(1)
        else:
            self._note(RemovedBlocks([block_hash], group), 1)

    def on_clear(self) -> None:
        # Published at once, as no step need follow. It replaces all events that were not published yet.
        self._num_copies.clear()
        self._events = [AllBlocksRemoved()]
        self._num_blocks = 0
        self._flush()

    def on_plan(self, plan: StepPlan) -> None:
        self._num_in_flight += 1

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        self._num_in_flight -= 1
        self._flush()

    def on_withdraw(self) -> None:
        # What the steps did to the cache, and what their rollback did.
        self._num_in_flight = 0
        self._flush()

    def on_finish(self, request: Request) -> None:
        # No step may follow: what a plan without rows evicted is published now.
        if not self._num_in_flight:
            self._flush()

    def _note(self, event: KVEvent, num_blocks: int) -> None:
        self._events.append(event)
        self._count(num_blocks)

    def _count(self, num_blocks: int) -> None:
        self._num_blocks += num_blocks
        if self._num_blocks >= self._max_batch_blocks:
            self._flush()

    def _flush(self) -> None:
        if self._events:
            self._publish(self._events, self._num_blocks)
            self._events, self._num_blocks = [], 0
