"""Changes of what the cache retains, each with the call of a feature in which it happened.

Why blocks are retained or released is up to features, so a replay makes the same changes in the same calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from engine_svc.cache.retained import RetainedBlocks
from engine_svc.core.extras import Extra
from engine_svc.core.request import Request
from engine_svc.core.step import StepPlan
from engine_svc.scheduler.feature import SchedulerFeature

# The name of the call, the key, and the blocks in the order of their release; null where they were released.
Change = list[Any]


class FeatureCalls(SchedulerFeature):
    """Has a name for each call in which a feature may change what is retained. Comes before such features."""

    _num_asked = 0  # for blocks, since the last step began

    def enter(self, call: str) -> bool:
        """A call begins. Whether it has released blocks."""
        raise NotImplementedError

    def on_step(self, now: float) -> float | None:
        self._num_asked = 0
        self.enter("step")
        return None

    def on_plan(self, plan: StepPlan) -> None:
        self.enter("plan")

    def on_note(self, request_id: str, note: Extra, now: float) -> None:
        self.enter("note")

    def on_pressure(self, is_running: bool) -> bool:
        return self._ask("pressure")

    def on_exhausted(self) -> bool:
        return self._ask("exhausted")

    def on_finish(self, request: Request) -> None:
        self.enter(f"finish {request.request_id}")

    def _ask(self, call: str) -> bool:
        self._num_asked += 1
        return self.enter(f"{call} {self._num_asked}")


class RecordedRetention(FeatureCalls):
    """Makes the changes of a record."""

    def __init__(self) -> None:
        self.retained: RetainedBlocks | None = None  # known only after the scheduler was built
        self._changes: deque[Change] = deque()

    def take(self, changes: Iterable[Sequence[Any]]) -> None:
        """These are to be made in the next call of the scheduler."""
        self._changes = deque(list(change) for change in changes)

    def enter(self, call: str) -> bool:
        has_released = False
        while self.retained is not None and self._changes and self._changes[0][0] == call:
            _, key, block_ids = self._changes.popleft()
            if block_ids is None:
                self.retained.release(key)
                has_released = True
            else:
                self.retained.add(key, block_ids)
        return has_released
