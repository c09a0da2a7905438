"""The loop: schedule, launch, update, publish, while there is work. Knows no gRPC, no torch, no feature."""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from engine_svc.mailbox import Abort, Add, Board, Call, Fail, Figures, Inbox, Outbox, Stop
from engine_svc.request import Request, RequestOutput
from engine_svc.scheduler.stats import SchedulerStats
from engine_svc.step import StepPlan, StepResult
from engine_svc.step_output import FinishedRow, StepOutput
from engine_svc.told import Teller, Told

logger = logging.getLogger(__name__)

# Where requests wait and none can run, a step is tried a thousand times a second at most.
_BLOCKED_WAIT_S = 0.001


class EngineScheduler(Protocol):
    """Decides what each step computes, and takes in what it yielded."""

    @property
    def has_work(self) -> bool:
        """Whether a step planned now could compute something."""
        ...

    def add(self, request: Request) -> None:
        """Enter a new request into the queue."""
        ...

    def abort(self, request_ids: Iterable[str], now: float, cause: str = "") -> list[RequestOutput]:
        """End requests from outside; what has ended already is ignored."""
        ...

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step."""
        ...

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestOutput]:
        """Take in what a plan yielded, in the order of the plans."""
        ...

    def stats(self) -> SchedulerStats:
        """State now, and counters since the start."""
        ...


class PendingStep(Protocol):
    """A step on the device."""

    def result(self) -> StepResult:
        """What it yielded; waits until it is done."""
        ...


class Executor(Protocol):
    """Runs plans, in order."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begin the step of `plan`, which nobody changes any more."""
        ...

    def shutdown(self) -> None:
        """Free the device."""
        ...


class Lockstep(Protocol):
    """Keeps data-parallel ranks in step."""

    def needs_idle_step(self) -> bool:
        """Whether another rank works, so that this one has to take part without requests of its own."""
        ...


class NoLockstep:
    """The lockstep of an engine that steps alone."""

    def needs_idle_step(self) -> bool:
        """Never."""
        return False


class Clock(Protocol):
    """Where the time comes from."""

    def now(self) -> float:
        """Seconds that never run backwards."""
        ...


class Engine:
    """Runs steps while there is work, else parks. Its state belongs to the thread that calls `run`."""

    def __init__(
        self,
        *,
        scheduler: EngineScheduler,
        executor: Executor,
        inbox: Inbox,
        board: Board,
        clock: Clock,
        lockstep: Lockstep,
        max_in_flight: int = 1,
        at_end: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._inbox = inbox
        self._board = board
        self._clock = clock
        self._lockstep = lockstep
        self._max_in_flight = max_in_flight
        self._at_end = at_end  # called when the loop has ended, however it ended
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self._newest_plan: StepPlan | None = None
        self._routes: dict[str, tuple[Outbox, int]] = {}  # request id to where its outputs go, and as what
        # A heap. With the route, as an id may be used again after its end.
        self._deadlines: list[tuple[float, str, tuple[Outbox, int]]] = []
        self._teller = Teller()
        self._aborted: list[RequestOutput] = []  # ended from outside, not yet published
        self._step_number = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_finished = 0
        self._is_stopping = False
        self._calls: deque[Callable[[], None]] = deque()
        self._idle_calls: deque[Callable[[], None]] = deque()

    def when_idle(self, call: Callable[[], None]) -> None:
        """Call it once, as soon as no step is in flight and none can be planned. For the engine thread."""
        self._idle_calls.append(call)

    def settle(self) -> None:
        """Wait for every step in flight, and publish what it yielded. For the engine thread."""
        while self._in_flight:
            self._finish_oldest()

    def run(self) -> None:
        """Serve the inbox until `Stop`. An error in a step is a bug: logged with its plans, and raised."""
        try:
            while not self._is_stopping:
                if not self.turn() and not self._is_stopping:
                    self._park(_BLOCKED_WAIT_S if self._has_work() else None)
        except Exception:
            self._log_plans()
            raise
        finally:
            self.close()

    def turn(self) -> bool:
        """Take in what waits, then step where there is work. False where nothing could be computed.

        Without `run`, whoever calls it owns the engine, and calls `close` at the end.
        """
        self._read_inbox()
        self._expire_deadlines()
        while self._calls:
            self._calls.popleft()()
        if self._aborted:
            self._publish([])
        while self._idle_calls and not self._has_work():
            self._idle_calls.popleft()()
        return not self._is_stopping and self._has_work() and self.step()

    def close(self) -> None:
        """End what goes with the engine, and free the device; `run` does so itself."""
        try:
            for call in self._at_end:
                call()
        finally:
            self._executor.shutdown()

    def step(self) -> bool:
        """Plan and launch one step; then finish the oldest in flight. False where neither was possible."""
        now = self._clock.now()
        plan = self._scheduler.schedule(now)
        if plan.request_ids or self._lockstep.needs_idle_step():
            self._step_number, self._newest_plan = plan.step_number, plan
            self._post(step_started_at=now)
            self._in_flight.append((plan, self._executor.launch(plan)))
        if not self._in_flight:
            return False
        if len(self._in_flight) == self._max_in_flight or not plan.request_ids:
            self._finish_oldest()
        return True

    def _finish_oldest(self) -> None:
        plan, pending = self._in_flight.popleft()
        result = pending.result()
        # An abort that came during the step is applied before the step's tokens: nothing comes after it.
        self._read_inbox()
        outputs = self._scheduler.update(plan, result, self._clock.now())
        self._publish(outputs, self._teller.tell(plan, result, self._routes))

    def _has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._in_flight) or self._lockstep.needs_idle_step()

    def _park(self, timeout_s: float | None) -> None:
        self._post()
        self._inbox.wait(timeout_s)

    def _read_inbox(self) -> None:
        for command in self._inbox.take():
            match command:
                case Add():
                    self._add(command)
                case Abort(request_id, cause):
                    self._abort(request_id, cause)
                case Call(work):
                    # A step may be in flight here; between two turns of the loop is the place for it.
                    self._calls.append(work)
                case Stop():
                    self._is_stopping = True
                case Fail(error):
                    raise error

    def _add(self, command: Add) -> None:
        request = command.request
        self._routes[request.request_id] = (command.outbox, command.handle)
        if command.deadline_at is not None:
            self._note_deadline(command.deadline_at, request.request_id)
        self._num_prompt_tokens += request.num_prompt_tokens
        self._scheduler.add(request)

    def _abort(self, request_id: str, cause: str) -> None:
        self._aborted += self._scheduler.abort([request_id], self._clock.now(), cause)

    def _note_deadline(self, deadline_at: float, request_id: str) -> None:
        if len(self._deadlines) > 2 * len(self._routes):
            # Most are of requests that have ended.
            self._deadlines = [entry for entry in self._deadlines if self._routes.get(entry[1]) is entry[2]]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline_at, request_id, self._routes[request_id]))

    def _expire_deadlines(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._clock.now():
            _, request_id, route = heapq.heappop(self._deadlines)
            if self._routes.get(request_id) is route:
                self._abort(request_id, "deadline")

    def _publish(
        self, outputs: list[RequestOutput], told: Mapping[Outbox, Told] = MappingProxyType({})
    ) -> None:
        """Give each session its rows of `outputs` as one step, after those of requests ended from outside."""
        if self._aborted:
            outputs = self._aborted + outputs
            self._aborted = []
        steps: dict[Outbox, StepOutput] = {}
        routes, latest = self._routes, None
        for output in outputs:
            outbox, handle = routes[output.request_id]
            # Neighbours mostly have the same outbox, so its columns are looked up once for all of them.
            if outbox is not latest:
                step = steps.setdefault(outbox, StepOutput(self._step_number))
                handles, num_tokens, token_ids = step.handles, step.num_tokens, step.token_ids
                latest = outbox
            handles.append(handle)
            num_tokens.append(len(output.new_token_ids))
            token_ids += output.new_token_ids
            if output.num_cached_tokens is not None:
                step.first.append((len(handles) - 1, output.num_cached_tokens))
            if output.finish_reason is not None and not output.continues:
                step.finished.append(
                    FinishedRow(len(handles) - 1, output.finish_reason, output.stop_token_id)
                )
                del routes[output.request_id]
                self._teller.forget(output.request_id)
        for outbox, part in told.items():
            steps.setdefault(outbox, StepOutput(self._step_number)).tell(part)
        for step in steps.values():
            self._num_generated_tokens += len(step.token_ids)
            self._num_finished += len(step.finished)
        # Figures first: who hears of the end of a request finds its blocks free.
        self._post()
        for outbox, step in steps.items():
            outbox.publish(step)

    def _post(self, step_started_at: float | None = None) -> None:
        self._board.post(
            Figures(
                step_number=self._step_number,
                step_started_at=step_started_at,
                has_work=self._has_work(),
                num_prompt_tokens=self._num_prompt_tokens,
                num_generated_tokens=self._num_generated_tokens,
                num_finished=self._num_finished,
                scheduler=self._scheduler.stats(),
            )
        )

    def _log_plans(self) -> None:
        plans = [plan for plan, _ in self._in_flight]
        if self._newest_plan is not None and self._newest_plan not in plans:
            plans.append(self._newest_plan)
        for plan in plans:
            rows = dict(zip(plan.request_ids, plan.num_tokens, strict=True))
            logger.error(
                "step at the time of the error", extra={"step_number": plan.step_number, "num_tokens": rows}
            )
