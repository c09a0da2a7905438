"""The scheduler's half of a feature. The scheduler knows none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine_svc.cache.config import CacheConfig
from engine_svc.cache.observer import CacheObserver
from engine_svc.core.errors import RequestFailed, describe_failure
from engine_svc.core.extras import Extra, Extras
from engine_svc.core.request import FinishReason, Request, RequestOutput, Verdict
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.scheduler.budget import Budget
from engine_svc.scheduler.config import SchedulerConfig
from triptych_kit.clock import Clock
from triptych_kit.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from engine_svc.cache.kv_cache import KVCache
    from engine_svc.loop.protocols import EngineScheduler


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """The surroundings of a scheduler feature. defer: runs work in another thread.

    metrics: where a feature registers its own, in a line each; they are read on the asyncio side.
    publish_blocks: takes changes of the prefix cache and how many blocks they concern; None: not wanted.
    replayed: by name of a feature whose budget decides, what a replay of the scheduler makes it from.
    """

    clock: Clock
    defer: Callable[[Callable[[], None]], object]
    scheduler_config: SchedulerConfig
    cache_config: CacheConfig
    metrics: Metrics
    publish_blocks: Callable[[Sequence[Any], int], None] | None = None
    replayed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class SchedulerFeature:
    """Observes the scheduler in the engine thread, in the order of registration. Override what is needed."""

    cache_observer: CacheObserver | None = None  # follows the prefix cache for the feature
    budget: Budget | None = None  # of a step; asked for requests that it is counted in: `num_budgets`

    def wrap(self, scheduler: EngineScheduler, kv_cache: KVCache) -> EngineScheduler:
        """The object that the loop calls in place of the scheduler, for a feature that follows every call."""
        return scheduler

    def close(self) -> None:
        """The loop has ended, also after an error. Called in its thread."""

    def on_add(self, request: Request) -> None:
        """A request was added. A feature that puts a name into `request.blockers` must unblock it later."""

    def holds_preparation(self, request: Request) -> bool:
        """Whether the preparation of its extras has to wait.

        Asked again in order when a request has ended or was prepared, up to the first that still has to.
        """
        return False

    def on_prepared(self, request_id: str, failure: RequestFailed | None) -> None:
        """All ranks have prepared the extras of a request, or it ends with this failure."""

    def on_step(self, now: float) -> float | None:
        """A step is about to be planned, or nothing can be computed at present.

        Returns when to call it again at the latest, though nothing can be computed then; None: never.
        """
        return None

    def on_plan(self, plan: StepPlan) -> None:
        """A plan with rows is complete. May attach a part: `plan.extras[Type] = value`."""

    def verdict(self, request: Request, output: RequestOutput, extras: Extras) -> Verdict | None:
        """Whether its newest tokens end the request. Only for requests with `needs_verdict`, set by `on_add`.

        output: without its extras; with a finish reason if the request ends anyway, which a verdict replaces.
        extras: of its row, from the runner's half. The first feature with a verdict decides. What it raises
        ends the request alone, as an internal error.
        """

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        """The tokens of a step have been appended. May change its own part of `result.extras`.

        What is left in them goes to the clients.
        """

    def on_note(self, request_id: str, note: Extra, now: float) -> None:
        """A frontend has said something of a request, which may have ended; any feature may have read it."""

    def on_pressure(self, is_running: bool) -> bool:
        """A request finds no blocks: a running one, for which others are preempted next, or a waiting one.

        Returns whether blocks were released that the feature retains. Called until the request has room.
        """
        return False

    def on_exhausted(self) -> bool:
        """The same after that, where no other request runs: without more blocks nothing can be computed."""
        return False

    def on_not_admitted(self, request: Request) -> None:
        """A waiting request found no blocks for what the budgets had granted it; it will be tried again."""

    def on_preempt(self, request: Request) -> None:
        """A running request lost its blocks and waits again; its tokens have to be computed anew."""

    def on_withdraw(self) -> None:
        """Every step in flight was rolled back: no `on_update` follows for any of them."""

    def on_reset(self) -> None:
        """The prefix cache was cleared, and all blocks that were retained are free."""

    def on_finish(self, request: Request) -> None:
        """A request ended; reason and times are set. Its blocks become free after this unless kept now."""

    def on_turn_end(self, request: Request) -> None:
        """A turn ended, and the request waits for an input segment. `on_finish` follows if none comes."""
        self.on_finish(request)

    def on_turn_begin(self, request: Request) -> None:
        """A further turn begins, with extras of its own. It may be blocked as a new request may."""
        self.on_add(request)


def overriding(features: Sequence[SchedulerFeature], name: str) -> tuple[Callable[..., Any], ...]:
    """The method `name` of those features that have one of their own: a step calls no other."""
    inherited = getattr(SchedulerFeature, name)
    return tuple(
        getattr(feature, name) for feature in features if getattr(type(feature), name) is not inherited
    )


def verdict_of(
    features: Sequence[SchedulerFeature], request: Request, output: RequestOutput, extras: Extras
) -> Verdict | None:
    """The first verdict of a feature."""
    num_new = len(output.new_token_ids)
    for feature in features:
        try:
            verdict = feature.verdict(request, output, extras)
            if verdict is None:
                continue
            if verdict.num_tokens is not None and not 0 <= verdict.num_tokens <= num_new:
                raise ValueError(f"a verdict keeps {verdict.num_tokens} tokens of {num_new}")
        except Exception as error:  # noqa: BLE001  Every error is this request's.
            message = describe_failure(type(feature).__name__, error)
            return Verdict(FinishReason.ERROR, code="INTERNAL", message=message)
        return verdict
    return None
