"""The loop: schedule, launch, update, publish, while there is work. Knows no gRPC, no torch, no feature."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from engine_svc.core.step import StepPlan
from engine_svc.loop.mailbox import (
    Abort,
    Add,
    Adopt,
    Call,
    CancelTurn,
    Extend,
    Fail,
    GiveUp,
    Inbox,
    Note,
    Prepared,
    StatsSnapshot,
    Stop,
)
from engine_svc.loop.preparation import Preparations
from engine_svc.loop.protocols import EngineScheduler, Lockstep
from engine_svc.loop.recovery import StepRecovery, log_failure
from engine_svc.loop.requests import NO_LIMITS, EngineRequests, IdleLimits
from engine_svc.loop.statistics import StatsRecorder
from engine_svc.loop.steps import Executor, StepsInFlight
from triptych_kit.clock import Clock

# While requests wait and none can run, at most a thousand steps are tried per second.
_BLOCKED_WAIT_S = 0.001
# Up to this, no budget of a step is announced.
DEFAULT_STEP_LIMIT_S = 5.0


class Engine:
    """Runs steps while there is work, else waits. Its state belongs to the thread that calls `run`.

    preparations: of the scheduler's features, if requests may have anything to prepare.
    at_end: called when the loop has ended, also after an error.
    """

    def __init__(
        self,
        *,
        scheduler: EngineScheduler,
        executor: Executor,
        inbox: Inbox,
        stats_snapshot: StatsSnapshot,
        clock: Clock,
        lockstep: Lockstep,
        preparations: Preparations | None = None,
        max_in_flight: int = 1,
        at_end: Sequence[Callable[[], None]] = (),
        step_limit_s: float = DEFAULT_STEP_LIMIT_S,
        idle_limits: IdleLimits = NO_LIMITS,
    ) -> None:
        self._scheduler = scheduler
        self._inbox = inbox
        self._clock = clock
        self._lockstep = lockstep
        self._max_in_flight = max_in_flight
        self._at_end = at_end
        self._is_stopping = False
        self._steps = StepsInFlight(executor)
        self._stats = StatsRecorder(
            stats_snapshot,
            clock=clock,
            step_limit_s=step_limit_s,
            has_work=self._has_work,
            scheduler_stats=scheduler.stats,
        )
        self._calls = CallQueue(self._stats)
        self._requests = EngineRequests(scheduler, self._stats, clock, preparations, idle_limits)
        self._recovery = StepRecovery(
            scheduler=scheduler,
            steps=self._steps,
            requests=self._requests,
            lockstep=lockstep,
            stats=self._stats,
            clock=clock,
        )

    def run(self) -> None:
        """Serve the inbox until `Stop`. An error that no request causes is logged with plans and raised."""
        try:
            while not self._is_stopping:
                if not self.turn() and not self._is_stopping:
                    # Without work, paused requests end at their deadlines as well.
                    wait_s = _BLOCKED_WAIT_S if self._has_work() else self._requests.until_due()
                    self._stats.post()
                    self._inbox.wait(wait_s)
        except Exception:
            log_failure(self._steps.plans, self._scheduler.stats)
            raise
        finally:
            self.close()

    def turn(self) -> bool:
        """Apply the commands that wait, then run a step if there is work. False if nothing could be computed.

        A thread that calls this instead of `run` owns the engine and calls `close` at the end.
        """
        self._read_inbox()
        self._requests.settle_prepared()
        self._requests.expire()
        self._calls.run()
        self._recovery.review()
        self._requests.publish_ended()
        self._calls.run_idle(self._is_busy)
        return not self._is_stopping and self._has_work() and self.step()

    def step(self) -> bool:
        """Plan and launch one step; then finish the oldest in flight. False if neither was possible."""
        plan = None
        if self._lockstep.may_step(self._scheduler.has_work):
            now = self._clock.now()
            plan = self._scheduler.schedule(now)
            if (plan.request_ids or self._lockstep.needs_idle_step) and not self._launch(plan, now):
                return True
        if not self._steps:
            return False
        max_in_flight = 1 if self._recovery.is_open else self._max_in_flight
        if len(self._steps) >= max_in_flight or plan is None or not plan.request_ids:
            self._finish_oldest()
        return True

    def run_idle_step(self) -> bool:
        """Run a step, with no other in flight, though there may be nothing to compute. False if it failed.

        For the engine thread, if the lockstep permits a step.
        """
        with self._stats.in_steps():
            now = self._clock.now()
            return self._launch(self._scheduler.schedule(now), now) and self._finish_oldest()

    def settle(self) -> None:
        """Wait for every step in flight and publish its outputs. For the engine thread."""
        with self._stats.in_steps():
            while self._steps:
                self._finish_oldest()

    def abort(self, request_ids: Iterable[str], cause: str) -> None:
        """End requests; their final outputs go out with what is published next. For the engine thread."""
        self._requests.abort(request_ids, cause)

    def when_idle(self, call: Callable[[], None]) -> None:
        """Call it once, as soon as nothing is or can be computed for requests of this engine.

        For the engine thread. Steps that this engine runs only for other ranks may be in flight.
        """
        self._calls.put_idle(call)

    def close(self) -> None:
        """Call `at_end` and free the device; `run` does so itself."""
        try:
            for call in self._at_end:
                call()
        finally:
            self._steps.shutdown()

    def _launch(self, plan: StepPlan, now: float) -> bool:
        """Begin a step. False if that failed, and everything in flight with it."""
        self._stats.begin_step(plan, now)
        try:
            self._steps.launch(plan)
            self._lockstep.on_step_launched(is_idle=not plan.request_ids, has_work=self._scheduler.has_work)
        except Exception as error:  # noqa: BLE001  Every error is the step's.
            self._recovery.recover(error)
            return False
        return True

    def _finish_oldest(self) -> bool:
        """Wait for the oldest step and publish its outputs. False if it failed, and all others with it."""
        try:
            plan, result = self._steps.wait_for_oldest()
        except Exception as error:  # noqa: BLE001  Every error is the step's.
            self._recovery.recover(error)
            return False
        self._lockstep.on_step_done()
        decision = self._recovery.check(plan, result)
        # An abort that came during the step is applied before its tokens, so that it is the final output.
        self._read_inbox()
        now = self._clock.now()
        outputs = self._scheduler.update(plan, result, now)
        self._steps.pop_oldest()
        self._stats.end_step(now)
        self._requests.publish(plan, result, outputs, now)
        self._recovery.apply(decision)
        return True

    def _read_inbox(self) -> None:
        for command in self._inbox.take():
            match command:
                case Add():
                    self._requests.add(command)
                case Abort(request_id, cause):
                    self._requests.abort([request_id], cause)
                case Extend():
                    self._requests.extend(command)
                case CancelTurn(request_id):
                    self._scheduler.cancel_turn(request_id)
                case Adopt():
                    self._requests.adopt(command)
                case Note(request_id, note):
                    self._scheduler.note(request_id, note, self._clock.now())
                case GiveUp(request_id):
                    self._requests.give_up(request_id)
                case Prepared():
                    self._requests.note_prepared(command)
                case Call(work):
                    self._calls.put(work)
                case Stop():
                    self._is_stopping = True
                case Fail(error):
                    raise error

    def _has_work(self) -> bool:
        """Whether a step can be launched or finished."""
        return bool(self._steps) or self._lockstep.wants_step(self._scheduler.has_work)

    def _is_busy(self) -> bool:
        """Whether anything is or can be computed for requests of this engine."""
        return self._scheduler.has_work or any(plan.request_ids for plan in self._steps.plans)


class CallQueue:
    """Calls that run between two turns of the loop, when a step may be in flight, or once it is idle."""

    def __init__(self, stats: StatsRecorder) -> None:
        self._stats = stats
        self._calls: deque[Callable[[], None]] = deque()
        self._idle_calls: deque[Callable[[], None]] = deque()

    def put(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def put_idle(self, call: Callable[[], None]) -> None:
        self._idle_calls.append(call)

    def run(self) -> None:
        while self._calls:
            self._run(self._calls.popleft())

    def run_idle(self, is_busy: Callable[[], bool]) -> None:
        while self._idle_calls and not is_busy():
            self._run(self._idle_calls.popleft())

    def _run(self, call: Callable[[], None]) -> None:
        with self._stats.in_call():
            call()
