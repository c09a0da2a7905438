"""The scheduler's half of a feature. The scheduler knows none of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_svc.cache.config import CacheConfig
from engine_svc.cache.observer import CacheObserver
from engine_svc.core.request import Request
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.scheduler.config import SchedulerConfig
from service_kit.clock import Clock
from service_kit.metrics import Metrics

if TYPE_CHECKING:
    from engine_svc.cache.kv_cache import KVCache
    from engine_svc.loop.protocols import EngineScheduler


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """What features are made with. defer: runs work in another thread.

    metrics: where a feature registers its own, in a line each; they are read on the asyncio side.
    publish_blocks: takes changes of the prefix cache and how many blocks they concern; None: not wanted.
    """

    clock: Clock
    defer: Callable[[Callable[[], None]], object]
    scheduler_config: SchedulerConfig
    cache_config: CacheConfig
    metrics: Metrics
    publish_blocks: Callable[[Sequence[Any], int], None] | None = None


class SchedulerFeature:
    """Observes the scheduler in the engine thread, in the order of registration. Override what is needed."""

    cache_observer: CacheObserver | None = None  # follows the prefix cache for the feature

    def wrap(self, scheduler: EngineScheduler, kv_cache: KVCache) -> EngineScheduler:
        """What the loop is to call in place of the scheduler, for a feature that follows every call."""
        return scheduler

    def close(self) -> None:
        """The loop has ended, also after an error. Called in its thread."""

    def on_add(self, request: Request) -> None:
        """A request was added. A feature that puts a name into `request.blockers` must unblock it later."""

    def on_plan(self, plan: StepPlan) -> None:
        """A plan with rows is complete. May attach a part: `plan.extras[Type] = value`."""

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        """The tokens of a step have been appended. May change its own part of `result.extras`.

        What is left in them goes to the clients.
        """

    def on_withdraw(self) -> None:
        """Every step in flight was rolled back: no `on_update` follows for any of them."""

    def on_finish(self, request: Request) -> None:
        """A request ended; reason and times are set. Its blocks become free after this unless held now."""
