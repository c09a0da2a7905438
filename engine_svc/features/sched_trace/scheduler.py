"""Writes down what the loop asks of the scheduler, what the scheduler has, and what it decides, step by step.

The calls of the loop are the whole input of a scheduler: another one that gets them decides the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from engine_svc.cache.kv_cache import KVCache
from engine_svc.config import EngineConfig
from engine_svc.core.extras import Extra
from engine_svc.core.request import FinishReason, InputSegment, Request, RequestOutput
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.features.sched_trace.file import TraceFile, file_of
from engine_svc.features.sched_trace.records import (
    FORMAT,
    Record,
    Setup,
    State,
    decision,
    output_records,
    prefix_cache_events,
    request_record,
    segment_record,
    snapshot,
    verdict_record,
)
from engine_svc.features.sched_trace.retention import Change, FeatureCalls
from engine_svc.loop.protocols import EngineScheduler
from engine_svc.scheduler.config import PauseState
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature
from engine_svc.scheduler.stats import SchedulerStats
from triptych_kit.clock import Clock
from triptych_kit.version import installed_version

# Of events that no step follows, e.g. while the engine is paused, and of ids and tokens in them.
MAX_EVENTS = 10_000
MAX_ITEMS = 1 << 18


def make(config: EngineConfig, context: SchedulerContext) -> SchedulerFeature | None:
    if config.sched_trace_path is None:
        return None
    setup = Setup(
        context.scheduler_config,
        context.cache_config,
        config.scheduling_policy,
        config.scheduler_class,
        context.replayed,
    )
    return SchedTrace(setup, context.clock, TraceFile(file_of(config.sched_trace_path, config.index)))


class RecordSink(Protocol):
    """Takes the records of a trace, as a function that makes them, while it is open."""

    @property
    def is_open(self) -> bool: ...

    def put(self, make_records: Callable[[], Sequence[Record]], num_items: int) -> None: ...

    def close(self) -> None: ...


class SchedTrace(FeatureCalls):
    """Puts a `TracedScheduler` between the loop and the scheduler."""

    def __init__(self, setup: Setup, clock: Clock, sink: RecordSink) -> None:
        self._setup = setup
        self._sink = sink
        self._header = {
            "format": FORMAT,
            "version": installed_version(),
            # Times are in seconds of the engine's clock; with this added, since 1970.
            "unix_offset_s": time.time() - clock.now(),
            "config": setup.to_record(),
        }
        self._traced: TracedScheduler | None = None

    def wrap(self, scheduler: EngineScheduler, kv_cache: KVCache) -> EngineScheduler:
        self._traced = TracedScheduler(scheduler, kv_cache, self._setup, self._header, self._sink)
        return self._traced

    def enter(self, call: str) -> bool:
        if self._traced is not None:
            self._traced.call = call
        return False

    def close(self) -> None:
        if self._traced is not None:
            self._traced.close()
        self._sink.close()


class TracedScheduler:
    """A scheduler for the loop that passes every call on, and records it with what came of it.

    A step in which nothing came in, nothing is computed and nothing is preempted has no records.
    """

    def __init__(
        self, scheduler: EngineScheduler, kv_cache: KVCache, setup: Setup, header: Record, sink: RecordSink
    ) -> None:
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._setup = setup
        self._sink = sink
        self._header: Record | None = header  # until it is in the first record
        self._events: list[Record] = []  # since the last decision
        self._num_items = 0  # ids and tokens in them
        self._admitted: set[str] = set()  # requests that have been admitted before
        self._judged: dict[str, Request] = {}  # those that a feature may end
        self._resumable: dict[str, Request] = {}
        self._jobs: dict[str, str] = {}  # of requests that have one
        self._changes: list[Change] = []  # of what is retained, not recorded yet
        self.call = ""  # of a feature, in which they happen
        kv_cache.retained.on_change = self._note_change
        self._step = 0  # of the last decision
        self._now = 0.0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def running_ids(self) -> list[str]:
        return self._scheduler.running_ids

    @property
    def waiting_ids(self) -> list[str]:
        return self._scheduler.waiting_ids

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def add(self, request: Request) -> None:
        self._scheduler.add(request)
        # Recorded afterwards: features may have added blockers.
        if self._sink.is_open:
            self._note({"op": "add", "request": request_record(request)}, request.num_tokens)
            if request.is_resumable:
                self._resumable[request.request_id] = request
            self._begin_turn(request)

    def segment_refusal(self, request_id: str, segment: InputSegment) -> str | None:
        return self._scheduler.segment_refusal(request_id, segment)

    def extend(self, request_id: str, segment: InputSegment | None, now: float) -> list[RequestOutput]:
        outputs = self._scheduler.extend(request_id, segment, now)
        if self._sink.is_open:
            event: Record = {"op": "extend" if segment else "close", "at": now, "id": request_id}
            request = self._resumable.get(request_id)
            if segment is not None and request is not None:
                waits = segment in request.segments
                blockers = segment.blockers if waits else request.blockers
                event |= segment_record(segment, blockers)
                self._begin_turn(request)
            self._note_outputs(event, outputs, 1 + len(segment.token_ids if segment else ()))
        return outputs

    def cancel_turn(self, request_id: str) -> None:
        self._scheduler.cancel_turn(request_id)
        self._note({"op": "cancel_turn", "id": request_id}, 1)

    def unblock(self, request_id: str, name: str) -> None:
        self._scheduler.unblock(request_id, name)
        self._note({"op": "unblock", "id": request_id, "name": name}, 1)

    def abort(
        self,
        request_ids: Iterable[str],
        now: float,
        cause: str = "",
        reason: FinishReason = FinishReason.ABORT,
    ) -> list[RequestOutput]:
        request_ids = list(request_ids)
        outputs = self._scheduler.abort(request_ids, now, cause, reason)
        event = {"op": "abort", "at": now, "ids": request_ids, "cause": cause, "reason": reason.value}
        self._note_outputs(event, outputs, len(request_ids))
        return outputs

    def note(self, request_id: str, note: Extra, now: float) -> None:
        self._scheduler.note(request_id, note, now)
        if self._changes:
            self._note({"op": "note", "at": now, "id": request_id}, 1)

    def set_pause(self, state: PauseState) -> None:
        self._scheduler.set_pause(state)
        self._note({"op": "pause", "state": state.value}, 1)

    def reset_prefix_cache(self, now: float, *, reset_running: bool = False) -> bool:
        result = self._scheduler.reset_prefix_cache(now, reset_running=reset_running)
        self._note({"op": "reset_prefix_cache", "at": now, "running": reset_running, "result": result}, 1)
        return result

    def withdraw(self, now: float) -> None:
        self._scheduler.withdraw(now)
        self._note({"op": "withdraw", "at": now}, 1)

    def restrict(self, only: Collection[str] | None, now: float, max_num_tokens: int | None = None) -> None:
        self._scheduler.restrict(only, now, max_num_tokens)
        ids = None if only is None else sorted(only)
        event = {"op": "restrict", "at": now, "only": ids, "max_num_tokens": max_num_tokens}
        self._note(event, len(ids or ()))

    def on_idle(self, now: float) -> float | None:
        due_at = self._scheduler.on_idle(now)
        if self._changes:
            self._note({"op": "idle", "at": now}, 1)
        return due_at

    def schedule(self, now: float) -> StepPlan:
        if not self._sink.is_open:
            return self._scheduler.schedule(now)
        state = self._state()
        plan = self._scheduler.schedule(now)
        self._step, self._now = plan.step_number, now
        if self._events or self._changes or plan.request_ids or plan.preempted:
            self._put_step(plan, state)
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestOutput]:
        if not self._sink.is_open or not plan.request_ids:
            return self._scheduler.update(plan, result, now)
        rows = zip(plan.request_ids, result.sampled, strict=True)
        event: Record = {
            "op": "update",
            "at": now,
            "for_step": plan.step_number,
            "sampled": {request_id: tokens.copy() for request_id, tokens in rows if tokens},
        }
        if result.drafts:
            event["drafts"] = {request_id: list(tokens) for request_id, tokens in result.drafts.items()}
        if result.num_drafts:
            event["num_drafts"] = list(result.num_drafts)
        if faults := result.faults():
            event["faults"] = {plan.request_ids[row]: message for row, message in faults}
        outputs = self._scheduler.update(plan, result, now)
        if self._judged and (verdicts := self._verdicts(event["sampled"])):
            event["verdicts"] = verdicts
        self._note_outputs(event, outputs, 2 * len(plan.request_ids))
        return outputs

    def close(self) -> None:
        """Record the last calls, and the state after them."""
        if self._sink.is_open:
            self._put_snapshot()

    def _begin_turn(self, request: Request) -> None:
        if request.needs_verdict:
            self._judged[request.request_id] = request
        if request.job:
            self._jobs[request.request_id] = request.job

    def _verdicts(self, request_ids: Iterable[str]) -> dict[str, Record]:
        """How features ended those of these requests that they did end."""
        judged = (self._judged[request_id] for request_id in request_ids if request_id in self._judged)
        return {one.request_id: verdict_record(one.verdict) for one in judged if one.verdict is not None}

    def _state(self) -> State:
        return State(
            self._scheduler.running_ids,
            self._scheduler.waiting_ids,
            self._kv_cache.num_free_blocks,
            self._kv_cache.pool.num_cached_keys,
            list(self._kv_cache.retained),
            self._kv_cache.retained.num_blocks,
        )

    def _note_outputs(self, event: Record, outputs: Sequence[RequestOutput], num_items: int) -> None:
        event["outputs"] = output_records(outputs)
        for output in outputs:
            if output.finish_reason is not None:
                self._admitted.discard(output.request_id)
                self._judged.pop(output.request_id, None)
                self._jobs.pop(output.request_id, None)
                if not output.continues:
                    self._resumable.pop(output.request_id, None)
        self._note(event, num_items)

    def _note(self, event: Record, num_items: int) -> None:
        changes = self._take_changes()
        if not self._sink.is_open:
            self._events = []
            return
        self._events.append(event | changes)
        self._num_items += num_items
        if len(self._events) >= MAX_EVENTS or self._num_items >= MAX_ITEMS:
            self._put_snapshot()

    def _note_change(self, key: str, block_ids: Sequence[int] | None) -> None:
        if not self._sink.is_open:
            return
        self._changes.append([self.call, key, None if block_ids is None else list(block_ids)])
        self._num_items += 1 + len(block_ids or ())

    def _take_changes(self) -> Record:
        changes, self._changes = self._changes, []
        return {"retention": changes} if changes else {}

    def _put_snapshot(self) -> None:
        """Put a snapshot that is followed by no decision."""
        state = self._state()
        make_snapshot = self._take_snapshot(self._step + 1, state)
        self._put(lambda: [make_snapshot()], state.num_items)

    def _put_step(self, plan: StepPlan, state: State) -> None:
        make_snapshot = self._take_snapshot(plan.step_number, state)
        admitted = [entry.request_id for entry in plan.admitted]
        resumed = self._admitted.intersection(admitted)
        self._admitted.update(admitted)
        free_blocks, changes = self._kv_cache.num_free_blocks, self._take_changes()
        jobs = {name: self._jobs[name] for name in admitted if name in self._jobs}

        def make_records() -> list[Record]:
            # A plan does not change any more.
            decided = decision(plan, resumed, free_blocks) | changes
            return [make_snapshot(), *prefix_cache_events(plan, jobs), decided]

        num_tokens = sum(len(entry.token_ids) for entry in plan.admitted)
        self._put(make_records, state.num_items + num_tokens + 4 * len(plan.request_ids))

    def _take_snapshot(self, step: int, state: State) -> Callable[[], Record]:
        setup, now, events, header = self._setup, self._now, self._events, self._header
        self._events, self._header = [], None
        return lambda: (
            snapshot(step, now, state, setup, events) | ({} if header is None else {"trace": header})
        )

    def _put(self, make_records: Callable[[], Sequence[Record]], num_items: int) -> None:
        self._sink.put(make_records, num_items + self._num_items)
        self._num_items = 0
