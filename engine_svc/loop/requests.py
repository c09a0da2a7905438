"""The requests of an engine from ADD to final output: their deadlines, early ends and outputs.

Belongs to the engine thread.
"""

from __future__ import annotations

import heapq
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from engine_svc.core.errors import DeviceLost, RequestFailed
from engine_svc.core.request import FinishReason, RequestOutput
from engine_svc.core.step import StepPlan, StepResult, TokenLogprobs
from engine_svc.loop.failure_bisection import UNREADY
from engine_svc.loop.mailbox import Add, Adopt, Extend, Outbox, Prepared
from engine_svc.loop.output_router import OutputRouter
from engine_svc.loop.preparation import Preparations
from engine_svc.loop.protocols import EngineScheduler
from engine_svc.loop.statistics import StatsRecorder
from engine_svc.loop.step_output import StepOutput
from triptych_kit.clock import Clock

logger = logging.getLogger(__name__)

# Upper limit of one wait: deadlines may be further away than a wait can last.
_MAX_WAIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class IdleLimits:
    """Of resumable requests that wait for input: how long each may, and how many; the oldest end first."""

    max_idle_s: float
    max_requests: int


NO_LIMITS = IdleLimits(math.inf, sys.maxsize)


class EngineRequests:
    """Applies commands to requests and publishes outputs, those of requests ended from outside first."""

    def __init__(
        self,
        scheduler: EngineScheduler,
        stats: StatsRecorder,
        clock: Clock,
        preparations: Preparations | None = None,
        idle_limits: IdleLimits = NO_LIMITS,
    ) -> None:
        self._scheduler = scheduler
        self._preparations = preparations or Preparations(None, clock)
        self._stats = stats
        self._clock = clock
        self._router = OutputRouter()
        self._deadlines = Deadlines(self._router.by_id)
        self._idle_limits = idle_limits
        self._idle: dict[str, None] = {}  # requests that wait for input, the one that waits longest first
        self._ended: list[RequestOutput] = []  # of requests ended from outside, not yet published
        self._step_number = 0  # of the newest step whose outputs were published

    @property
    def by_id(self) -> dict[str, tuple[Outbox, int]]:
        """The requests that have not ended, the oldest first, with outbox and handle. Not to be changed."""
        return self._router.by_id

    def add(self, command: Add) -> None:
        request = command.request
        self._router.begin(command)
        self._deadlines.note(command.deadline_at, request.request_id)
        self._stats.count_prompt(request.num_prompt_tokens)
        try:
            self._scheduler.add(request)
        except DeviceLost:
            raise
        except Exception as error:  # Every error is this request's: no other request was changed.
            logger.error("request cannot be added", exc_info=error, extra={"request_id": request.request_id})
            failed = RequestOutput(request.request_id, [], FinishReason.ERROR, message=UNREADY)
            self._ended.append(failed)

    def abort(
        self,
        request_ids: Iterable[str],
        cause: str,
        reason: FinishReason = FinishReason.ABORT,
        message: str = "",
    ) -> None:
        """End requests; their final outputs go out with what is published next."""
        for output in self._scheduler.abort(request_ids, self._clock.now(), cause, reason):
            output.message = message
            self._stats.count_abort(cause)
            self._end(output)

    def extend(self, command: Extend) -> None:
        """Continue a request with a segment, or take no more input. An error of these ends it."""
        request_id, segment, failure = command.request_id, command.segment, command.failure
        self._idle.pop(request_id, None)
        if segment is not None and (refusal := self._scheduler.segment_refusal(request_id, segment)):
            failure = RequestFailed("INVALID_ARGUMENT", refusal, "NEVER_FITS", "prompt_token_ids")
        if failure is not None:
            self._fail(request_id, failure)
            return
        try:
            self._ended += self._scheduler.extend(request_id, segment, self._clock.now())
        except DeviceLost:
            raise
        except Exception as error:  # Every error is this request's: no other request was changed.
            logger.error("request cannot be extended", exc_info=error, extra={"request_id": request_id})
            self._fail(request_id, RequestFailed("", UNREADY))
        if segment is not None:
            self._deadlines.note(command.deadline_at, request_id)
            self._stats.count_prompt(len(segment.token_ids))

    def adopt(self, command: Adopt) -> None:
        self._deliver(self._router.adopt(command, self._step_number))

    def give_up(self, request_id: str) -> None:
        """End a request that will not be adopted, and keep its outputs no longer."""
        self.abort([request_id], "session_lost")
        self._router.forget(request_id)

    def note_prepared(self, command: Prepared) -> None:
        self._preparations.note(command.number, command.failure)

    def settle_prepared(self) -> None:
        """Let requests run that all ranks have prepared, and end those that cannot be."""
        for preparation in self._preparations.take_settled():
            if preparation.failure is not None:
                self._fail(preparation.request_id, preparation.failure)
                continue
            for name in preparation.blockers:
                self._scheduler.unblock(preparation.request_id, name)

    def expire(self) -> None:
        """End the requests whose deadlines have passed."""
        for request_id in self._deadlines.expired(self._clock.now()):
            self.abort([request_id], "idle" if request_id in self._idle else "deadline")

    def until_due(self) -> float | None:
        """How long an idle loop may wait, as deadlines and features need; None: for the next command."""
        now = self._clock.now()
        due_at = self._scheduler.on_idle(now)
        due_s = None if due_at is None else min(max(0.0, due_at - now), _MAX_WAIT_S)
        left = (self._deadlines.left_s(now), self._preparations.left_s(), due_s)
        return min((left_s for left_s in left if left_s is not None), default=None)

    def publish(self, plan: StepPlan, result: StepResult, outputs: list[RequestOutput], now: float) -> None:
        """Send each session its rows of a step that has just ended."""
        self._step_number = plan.step_number
        sampled = {plan.request_ids[row]: logprobs for row, logprobs in result.logprobs.items()}
        self._publish(outputs, sampled, now)

    def publish_ended(self) -> None:
        """Send the final outputs of requests that were ended from outside."""
        if self._ended:
            self._publish([], {})

    def _fail(self, request_id: str, failure: RequestFailed) -> None:
        now = self._clock.now()
        for output in self._scheduler.abort([request_id], now, "unprepared", FinishReason.ERROR):
            output.message, output.failure = failure.message, failure
            self._end(output)

    def _end(self, output: RequestOutput) -> None:
        self._idle.pop(output.request_id, None)
        self._ended.append(output)

    def _publish(
        self,
        outputs: list[RequestOutput],
        sampled: Mapping[str, TokenLogprobs],
        ended_at: float | None = None,
    ) -> None:
        if self._ended:
            outputs = self._ended + outputs
            self._ended = []
        steps = self._router.rows(outputs, sampled, self._step_number, ended_at)
        # Statistics first: a client that receives the end of a request then finds its blocks free.
        self._stats.count_outputs(steps.values())
        self._stats.post()
        self._deliver(steps)
        if self._router.ended_turns:
            self._note_idle()

    def _note_idle(self) -> None:
        """Limit how many requests wait for input, and for how long."""
        limits = self._idle_limits
        ended_turns, self._router.ended_turns = self._router.ended_turns, []
        for request_id in ended_turns:
            self._deadlines.note(self._clock.now() + limits.max_idle_s, request_id)
            self._idle[request_id] = None
        while len(self._idle) > limits.max_requests:
            self.abort([next(iter(self._idle))], "idle")

    def _deliver(self, steps: Mapping[Outbox, StepOutput]) -> None:
        for outbox, step in steps.items():
            outbox.publish(step)


class Deadlines:
    """A heap of deadlines by request id. An id may be used again after its request has ended.

    running: has the ids of requests that have not ended. Deadlines of all others are void.
    """

    def __init__(self, running: Mapping[str, object]) -> None:
        self._running = running
        self._deadline_of: dict[str, float] = {}  # of the newest request with the id
        self._entries: list[tuple[float, str]] = []

    def note(self, deadline_at: float | None, request_id: str) -> None:
        """Set the deadline of a new request; None: it has none."""
        if deadline_at is None:
            self._deadline_of.pop(request_id, None)
            return
        if len(self._entries) > 2 * len(self._running):
            # Most entries belong to requests that have ended.
            self._entries = [entry for entry in self._entries if self._is_due(*entry)]
            self._deadline_of = {request_id: due_at for due_at, request_id in self._entries}
            heapq.heapify(self._entries)
        self._deadline_of[request_id] = deadline_at
        heapq.heappush(self._entries, (deadline_at, request_id))

    def expired(self, now: float) -> Iterator[str]:
        """The requests whose deadlines have passed, each once."""
        while self._entries and self._entries[0][0] <= now:
            deadline_at, request_id = heapq.heappop(self._entries)
            is_due = self._is_due(deadline_at, request_id)
            if self._deadline_of.get(request_id) == deadline_at:
                del self._deadline_of[request_id]
            if is_due:
                yield request_id

    def left_s(self, now: float) -> float | None:
        """The time until the next deadline, as far as one wait can last; None: there is none."""
        return min(max(0.0, self._entries[0][0] - now), _MAX_WAIT_S) if self._entries else None

    def _is_due(self, deadline_at: float, request_id: str) -> bool:
        return request_id in self._running and self._deadline_of.get(request_id) == deadline_at
