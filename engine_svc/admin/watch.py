"""Streams the state of the scheduler to watchers, each at its own pace. Runs on the event loop.

A state is read only when its reader has taken the one before: nothing is queued for a slow one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from engine_svc.admin import announce
from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.served_engine import LoadedCore, ServedEngine
from engine_svc.loop.answer import give
from engine_svc.loop.mailbox import Call, LoopStats
from triptych.admin.v1 import admin_pb2
from triptych_kit.errors import InvalidArgument, ResourceExhausted, Unavailable, Unimplemented
from triptych_kit.rules import MessageRules

if TYPE_CHECKING:
    from engine_svc.scheduler.watch import SchedulerWatch, WatchedRequest, WatchedState

MAX_WATCHERS = 16
DEFAULT_INTERVAL_MS = 1000
_RULES = MessageRules(admin_pb2.WatchSchedulerRequest)


class SchedulerWatchers:
    """All watchers of one engine, at both of its listeners."""

    def __init__(self, engine: ServedEngine) -> None:
        self.num_watchers = 0
        self._engine = engine
        self._ended = asyncio.Event()
        engine.lifecycle.subscribe(self._on_state)

    async def responses(
        self, request: admin_pb2.WatchSchedulerRequest
    ) -> AsyncGenerator[admin_pb2.WatchSchedulerResponse, None]:
        """The state now and after each interval, until the engine ends. Raises a ServiceError if refused."""
        for violation in _RULES.violations(request, {}):
            raise InvalidArgument(violation.message, field=violation.field)
        interval_s = (request.interval_ms or DEFAULT_INTERVAL_MS) / 1000
        if self.num_watchers >= MAX_WATCHERS:
            raise ResourceExhausted(
                f"engine has {self.num_watchers} watchers of its scheduler, the limit is {MAX_WATCHERS}",
                retry_after_ms=1000,
            )
        core, watch = self._watched()
        self.num_watchers += 1
        ended: asyncio.Future[Any] = asyncio.ensure_future(self._ended.wait())
        loop = asyncio.get_running_loop()
        after_step = self._engine.stats_snapshot.read().step_number
        try:
            while not ended.done():
                began_at = loop.time()
                answer = self._ask(watch, request, after_step)
                waiting: asyncio.Future[Any] = asyncio.wrap_future(answer)
                try:
                    await asyncio.wait({waiting, ended}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    # What has not begun never will.
                    answer.cancel()
                if not waiting.done() or waiting.cancelled():
                    break
                loop_stats, state = waiting.result()
                after_step = max([after_step, *(step.step_number for step in state.steps)])
                yield _to_response(core, loop_stats, state)
                await asyncio.wait({ended}, timeout=began_at + interval_s - loop.time())
        finally:
            ended.cancel()
            self.num_watchers -= 1
        if self._engine.failure is not None:
            raise Unavailable(f"engine failed: {self._engine.failure.reason}", reason="ENGINE_DEAD")

    def _watched(self) -> tuple[LoadedCore, SchedulerWatch]:
        core, lifecycle = self._engine.core, self._engine.lifecycle
        if core is None or lifecycle.has_ended:
            state = EngineState.LOADING if core is None else lifecycle.state
            raise Unavailable(f"engine is {state.value}", reason=f"ENGINE_{state.name}")
        if core.watch is None:
            raise Unimplemented("this engine's scheduler cannot be watched")
        return core, core.watch

    def _ask(
        self, watch: SchedulerWatch, request: admin_pb2.WatchSchedulerRequest, after_step: int
    ) -> Future[tuple[LoopStats, WatchedState]]:
        """The state between two steps of the engine thread; steps in flight are not waited for."""
        answer: Future[tuple[LoopStats, WatchedState]] = Future()
        snapshot, max_requests, max_blocks = (
            self._engine.stats_snapshot, request.max_requests, request.max_blocks,
        )  # fmt: skip

        def read() -> tuple[LoopStats, WatchedState]:
            state = watch.read(max_requests=max_requests, max_blocks=max_blocks, after_step=after_step)
            return snapshot.read(), state

        self._engine.inbox.put(Call(lambda: give(answer, read)))
        return answer

    def _on_state(self, state: EngineState) -> None:
        if self._engine.lifecycle.has_ended:
            self._ended.set()


def _to_response(
    core: LoadedCore, loop_stats: LoopStats, state: WatchedState
) -> admin_pb2.WatchSchedulerResponse:
    waits_for_wave = core.lockstep is not None and not core.lockstep.rank_status.is_in_wave
    return admin_pb2.WatchSchedulerResponse(
        stats=announce.stats(loop_stats),
        requests=[_to_request(request, state.at, waits_for_wave) for request in state.requests],
        cached_block_ids=state.cached_block_ids,
        steps=[
            admin_pb2.ScheduledStep(
                step_number=step.step_number,
                num_tokens=step.num_tokens,
                num_requests=step.num_requests,
                duration_ms=step.duration_s * 1000,
            )
            for step in state.steps
        ],
    )


def _to_request(request: WatchedRequest, at: float, waits_for_wave: bool) -> admin_pb2.ScheduledRequest:
    return admin_pb2.ScheduledRequest(
        request_id=request.request_id,
        status=request.status.name,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_blocks=request.num_blocks,
        num_preemptions=request.num_preemptions,
        priority=request.priority,
        age_ms=max(0, round((at - request.arrival_at) * 1000)),
        blockers=[*request.blockers, "wave"] if waits_for_wave else request.blockers,
        block_ids=request.block_ids,
    )
