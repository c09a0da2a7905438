"""Tells what enters and leaves the prefix cache, as one batch a step. Knows no wire and no subscriber.

What a plan changes is told when the next step has been computed; without steps that overlap, that very step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

from engine_svc.cache.observer import StoredBlocks
from engine_svc.core.request import Request
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.loop.mailbox import AllBlocksRemoved, KVEvent, RemovedBlocks, part_of

MAX_BATCH_BLOCKS = 8192


class KVEvents:
    """Follows the cache as an observer, and the steps as a hook; `publish` takes each batch.

    Equal content may stand in several blocks. It is told of once, and its removal when the last of them is
    evicted, so that the events add up to exactly what can be found.
    """

    def __init__(
        self, publish: Callable[[Sequence[KVEvent], int], None], *, max_batch_blocks: int = MAX_BATCH_BLOCKS
    ) -> None:
        self._publish = publish
        self._max_batch_blocks = max_batch_blocks
        self._num_copies: Counter[tuple[bytes, int]] = Counter()  # by hash and group
        self._events: list[KVEvent] = []  # since the last batch
        self._num_blocks = 0  # that these tell of
        self._num_in_flight = 0  # steps that are planned and not computed yet

    def on_allocate(self, block_ids: Sequence[int]) -> None:
        """Nothing: what was evicted for it has been told."""

    def on_hold(self, block_ids: Sequence[int]) -> None:
        """Nothing: what can be found stays the same."""

    def on_store(self, stored: StoredBlocks) -> None:
        """Note the blocks of a run whose content could not be found before."""
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
        """Note content that stood in no other block."""
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
        """Tell it at once: no step need follow. What was not told yet is of no interest any more."""
        self._num_copies.clear()
        self._events = [AllBlocksRemoved()]
        self._num_blocks = 0
        self._flush()

    def on_add(self, request: Request) -> None:
        """Nothing: a request that waits has no blocks."""

    def on_plan(self, plan: StepPlan) -> None:
        """Wait for the step."""
        self._num_in_flight += 1

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        """Tell of the step."""
        self._num_in_flight -= 1
        self._flush()

    def on_withdraw(self) -> None:
        """Tell of what the steps did to the cache, and what taking them back did: no step is in flight."""
        self._num_in_flight = 0
        self._flush()

    def on_finish(self, request: Request) -> None:
        """With no step in flight there may be none any more; then tell what a plan without rows evicted."""
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
