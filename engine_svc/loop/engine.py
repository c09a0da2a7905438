"""The loop: schedule, launch, update, publish, while there is work. Knows no gRPC, no torch, no feature."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from engine_svc.core.errors import DeviceFull, DeviceLost, PeersLost
from engine_svc.core.request import FinishReason, RequestOutput
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.loop.deadlines import Deadlines
from engine_svc.loop.failure_bisection import CULPRIT_MESSAGE, UNREADY, BisectionDecision, FailureBisector
from engine_svc.loop.failure_dump import log_failure
from engine_svc.loop.mailbox import (
    Abort,
    Add,
    Adopt,
    Call,
    Fail,
    Forget,
    Inbox,
    LoopStats,
    Outbox,
    StatsSnapshot,
    Stop,
)
from engine_svc.loop.output_router import OutputRouter
from engine_svc.loop.protocols import EngineScheduler, Lockstep
from engine_svc.loop.step_output import LogprobDeltas, StepOutput
from engine_svc.loop.step_time import StepTimeEstimator
from service_kit.clock import Clock

logger = logging.getLogger(__name__)

# While requests wait and none can run, at most a thousand steps are tried per second.
_BLOCKED_WAIT_S = 0.001
# Upper limit of one wait: clients may set deadlines further away than a wait can last.
_MAX_PARK_S = 3600.0
# Up to this, no budget of a step is announced.
DEFAULT_STEP_LIMIT_S = 5.0


class PendingStep(Protocol):
    """A step on the device."""

    def result(self) -> StepResult:
        """Wait for the result."""
        ...


class Executor(Protocol):
    """Runs plans in order. Raises DeviceLost if it can run no further plan, DeviceFull if memory is short."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begin the step of `plan`, which is not changed any more."""
        ...

    def drop(self) -> None:
        """Forget steps whose results were not read, and any error, so that later plans can run.

        Some rows of these steps may have been entered: the next plan releases all of them.
        """
        ...

    def shutdown(self) -> None: ...


class Engine:
    """Runs steps while there is work, else waits. Its state belongs to the thread that calls `run`."""

    def __init__(
        self,
        *,
        scheduler: EngineScheduler,
        executor: Executor,
        inbox: Inbox,
        stats_snapshot: StatsSnapshot,
        clock: Clock,
        lockstep: Lockstep,
        max_in_flight: int = 1,
        at_end: Sequence[Callable[[], None]] = (),
        step_limit_s: float = DEFAULT_STEP_LIMIT_S,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._inbox = inbox
        self._stats_snapshot = stats_snapshot
        self._clock = clock
        self._lockstep = lockstep
        self._max_in_flight = max_in_flight
        self._at_end = at_end  # called when the loop has ended, also after an error
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self._launching: StepPlan | None = None
        self._step_time = StepTimeEstimator(step_limit_s)
        self._bisector = FailureBisector()
        self._router = OutputRouter()
        self._deadlines = Deadlines(self._router.by_id)
        self._aborted: list[RequestOutput] = []  # of requests ended from outside, not yet published
        self._step_number = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_finished = 0
        self._is_stopping = False
        self._calls: deque[Callable[[], None]] = deque()
        self._idle_calls: deque[Callable[[], None]] = deque()

    def when_idle(self, call: Callable[[], None]) -> None:
        """Call it once, as soon as nothing is or can be computed for requests of this engine.

        For the engine thread. Steps that this engine runs only for other ranks may be in flight.
        """
        self._idle_calls.append(call)

    def settle(self) -> None:
        """Wait for every step in flight and publish its outputs. For the engine thread."""
        is_in_call = self._step_time.is_in_call
        self._step_time.end_call(self._clock.now())
        self._post()
        while self._in_flight:
            self._finish_oldest()
        if is_in_call:
            self._step_time.begin_call(self._clock.now())
            self._post()

    def abort(self, request_ids: Iterable[str], cause: str) -> None:
        """End requests; their final outputs go out with what is published next. For the engine thread."""
        for request_id in request_ids:
            self._abort(request_id, cause)

    def run(self) -> None:
        """Serve the inbox until `Stop`. An error that no request causes is logged with plans and raised."""
        try:
            while not self._is_stopping:
                if not self.turn() and not self._is_stopping:
                    self._post()
                    self._inbox.wait(_BLOCKED_WAIT_S if self._has_work() else self._until_deadline())
        except Exception:
            log_failure(self._plans(), self._scheduler.stats)
            raise
        finally:
            self.close()

    def turn(self) -> bool:
        """Apply the commands that wait, then run a step if there is work. False if nothing could be computed.

        A thread that calls this instead of `run` owns the engine and calls `close` at the end.
        """
        self._read_inbox()
        self._expire_deadlines()
        while self._calls:
            self._run_call(self._calls.popleft())
        if self._bisector.is_open:
            self._apply_decision(self._bisector.review(self._router.by_id))
        if self._aborted:
            self._publish([])
        while self._idle_calls and not self._is_busy():
            self._run_call(self._idle_calls.popleft())
        return not self._is_stopping and self._has_work() and self.step()

    def close(self) -> None:
        """Call `at_end` and free the device; `run` does so itself."""
        try:
            for call in self._at_end:
                call()
        finally:
            self._executor.shutdown()

    def step(self) -> bool:
        """Plan and launch one step; then finish the oldest in flight. False if neither was possible."""
        now = self._clock.now()
        plan: StepPlan | None = None
        if self._lockstep.may_step(self._scheduler.has_work):
            plan = self._scheduler.schedule(now)
            if (plan.request_ids or self._lockstep.needs_idle_step) and not self._launch(plan, now):
                return True
        if not self._in_flight:
            return False
        # Requests suspected of making steps fail run with one step in flight at a time.
        depth = 1 if self._bisector.is_open else self._max_in_flight
        if len(self._in_flight) >= depth or plan is None or not plan.request_ids:
            self._finish_oldest()
        return True

    def _launch(self, plan: StepPlan, now: float) -> bool:
        """Give a plan to the executor. False if that failed, and everything in flight with it."""
        self._step_number, self._launching = plan.step_number, plan
        self._step_time.begin(plan, now)
        self._post()
        try:
            self._in_flight.append((plan, self._executor.launch(plan)))
            self._launching = None
            self._lockstep.on_step_launched(is_idle=not plan.request_ids, has_work=self._scheduler.has_work)
        except Exception as error:  # noqa: BLE001  Every error is the step's.
            self._recover(error)
            return False
        return True

    def _finish_oldest(self) -> None:
        plan, pending = self._in_flight[0]
        try:
            result = pending.result()
        except Exception as error:  # noqa: BLE001  Every error is the step's.
            self._recover(error)
            return
        self._lockstep.on_step_done()
        decision = self._bisector.on_step_done(plan, result)
        if decision is not None and decision.is_fatal:
            raise DeviceLost("no row of the last steps has finite logits")
        # An abort that came during the step is applied before its tokens, so that it is the final output.
        self._read_inbox()
        now = self._clock.now()
        outputs = self._scheduler.update(plan, result, now)
        self._in_flight.popleft()
        self._step_time.end(now)
        self._publish(outputs, self._router.token_logprobs(plan, result))
        self._apply_decision(decision)

    def _recover(self, error: Exception) -> None:
        """Roll back the steps in flight and bisect for the request that fails; raise `error` if none does."""
        plans = self._plans()
        # First, because a step that still runs may be waiting for the other ranks.
        self._lockstep.leave_group(error)
        if isinstance(error, PeersLost):
            self._roll_back()
            return
        in_them = {request_id for plan in plans for request_id in plan.request_ids}
        decision = self._bisector.failed(
            [request_id for request_id in reversed(self._router.by_id) if request_id in in_them],
            max(plan.total_num_tokens for plan in plans),
            is_full=isinstance(error, DeviceFull),
        )
        if decision.is_fatal or isinstance(error, DeviceLost):
            raise error
        logger.error("step failed, its requests run again", exc_info=error)
        log_failure(plans, self._scheduler.stats)
        self._roll_back()
        self._apply_decision(decision)

    def _roll_back(self) -> None:
        """Drop every step in flight and queue its requests again."""
        self._in_flight.clear()
        self._launching = None
        self._step_time.drop()
        self._executor.drop()
        self._scheduler.withdraw(self._clock.now())

    def _apply_decision(self, decision: BisectionDecision | None) -> None:
        """End culprits and restrict which requests run. No step with other requests may be in flight."""
        if decision is None:
            return
        now = self._clock.now()
        if decision.culprits:
            outputs = self._scheduler.abort(decision.culprits, now, "poison", FinishReason.ERROR)
            for output in outputs:
                output.message = CULPRIT_MESSAGE
            self._aborted += outputs
            logger.error("requests that make steps fail were ended", extra={"request_ids": decision.culprits})
        self._scheduler.restrict(decision.only, now, decision.max_num_tokens)

    def _plans(self) -> list[StepPlan]:
        """The plans in flight, and the one being launched."""
        plans = [plan for plan, _ in self._in_flight]
        return plans if self._launching is None else [*plans, self._launching]

    def _run_call(self, call: Callable[[], None]) -> None:
        """Run a call between two steps; its time does not count for any step."""
        self._step_time.begin_call(self._clock.now())
        self._post()
        call()
        self._step_time.end_call(self._clock.now())

    def _has_work(self) -> bool:
        """Whether a step can be launched or finished."""
        return bool(self._in_flight) or self._lockstep.wants_step(self._scheduler.has_work)

    def _is_busy(self) -> bool:
        """Whether anything is or can be computed for requests of this engine."""
        return self._scheduler.has_work or any(plan.request_ids for plan, _ in self._in_flight)

    def _until_deadline(self) -> float | None:
        """How long a loop without work may wait: paused requests end at their deadlines as well."""
        left_s = self._deadlines.left_s(self._clock.now())
        return None if left_s is None else min(left_s, _MAX_PARK_S)

    def _read_inbox(self) -> None:
        for command in self._inbox.take():
            match command:
                case Add():
                    self._add(command)
                case Abort(request_id, cause):
                    self._abort(request_id, cause)
                case Adopt():
                    self._deliver(self._router.adopt(command, self._step_number))
                case Forget(request_id):
                    self._router.forget(request_id)
                case Call(work):
                    # A step may be in flight here; calls run between two turns of the loop.
                    self._calls.append(work)
                case Stop():
                    self._is_stopping = True
                case Fail(error):
                    raise error

    def _add(self, command: Add) -> None:
        request = command.request
        self._router.begin(command)
        self._deadlines.note(command.deadline_at, request.request_id)
        self._num_prompt_tokens += request.num_prompt_tokens
        try:
            self._scheduler.add(request)
        except Exception as error:  # Every error is this request's: no other request was changed.
            logger.error("request cannot be added", exc_info=error, extra={"request_id": request.request_id})
            failed = RequestOutput(request.request_id, [], FinishReason.ERROR, message=UNREADY)
            self._aborted.append(failed)

    def _abort(self, request_id: str, cause: str) -> None:
        self._aborted += self._scheduler.abort([request_id], self._clock.now(), cause)

    def _expire_deadlines(self) -> None:
        for request_id in self._deadlines.expired(self._clock.now()):
            self._abort(request_id, "deadline")

    def _publish(
        self,
        outputs: list[RequestOutput],
        token_logprobs: Mapping[Outbox, LogprobDeltas] = MappingProxyType({}),
    ) -> None:
        """Send each session its rows of `outputs` as one step, after those of requests ended from outside."""
        if self._aborted:
            outputs = self._aborted + outputs
            self._aborted = []
        steps = self._router.rows(outputs, token_logprobs, self._step_number)
        for step in steps.values():
            self._num_generated_tokens += len(step.token_ids)
            self._num_finished += len(step.finished)
        # Statistics first: a client that receives the end of a request then finds its blocks free.
        self._post()
        self._deliver(steps)

    def _deliver(self, steps: Mapping[Outbox, StepOutput]) -> None:
        for outbox, step in steps.items():
            outbox.publish(step)

    def _post(self) -> None:
        self._stats_snapshot.post(
            LoopStats(
                step_number=self._step_number,
                step_started_at=self._step_time.running_since,
                step_budget_s=self._step_time.budget_s,
                is_in_call=self._step_time.is_in_call,
                has_work=self._step_time.is_in_call or self._has_work(),
                num_prompt_tokens=self._num_prompt_tokens,
                num_generated_tokens=self._num_generated_tokens,
                num_finished=self._num_finished,
                scheduler=self._scheduler.stats(),
            )
        )
