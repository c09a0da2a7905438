"""Statistics that the loop keeps of itself: counts, and the time budget of the step or call that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from engine_svc.core.step import StepPlan
from engine_svc.loop.mailbox import LoopStats, StatsSnapshot
from engine_svc.loop.step_output import StepOutput
from engine_svc.loop.step_time import StepTimeEstimator
from engine_svc.scheduler.stats import SchedulerStats
from triptych_kit.clock import Clock


class StatsRecorder:
    """Counts what the loop does and posts it to the snapshot. Belongs to the engine thread.

    has_work: whether a step can be launched or finished.
    """

    def __init__(
        self,
        snapshot: StatsSnapshot,
        *,
        clock: Clock,
        step_limit_s: float,
        has_work: Callable[[], bool],
        scheduler_stats: Callable[[], SchedulerStats],
    ) -> None:
        self._snapshot = snapshot
        self._counts = snapshot.counts
        self._clock = clock
        self._has_work = has_work
        self._scheduler_stats = scheduler_stats
        self._step_time = StepTimeEstimator(step_limit_s)
        self.step_number = 0  # of the step launched last
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_finished = 0

    def begin_step(self, plan: StepPlan, now: float) -> None:
        """A step is about to be launched."""
        self.step_number = plan.step_number
        if plan.num_tokens:
            self._counts.step_tokens.observe(sum(plan.num_tokens))
        self._step_time.begin(plan, now)
        self.post()

    def end_step(self, now: float) -> None:
        """The oldest step in flight has ended."""
        if self._step_time.running_since is not None:
            self._counts.step_times.observe(now - self._step_time.running_since)
        self._step_time.end(now)

    def drop_steps(self) -> None:
        """The steps in flight have failed."""
        self._step_time.drop()

    @contextmanager
    def in_call(self) -> Iterator[None]:
        """Around a call between two steps: its time counts for no step."""
        self._step_time.begin_call(self._clock.now())
        self.post()
        yield
        self._step_time.end_call(self._clock.now())

    @contextmanager
    def in_steps(self) -> Iterator[None]:
        """Around steps that a call waits for: their time does not count for the call."""
        is_in_call = self._step_time.is_in_call
        self._step_time.end_call(self._clock.now())
        self.post()
        yield
        if is_in_call:
            self._step_time.begin_call(self._clock.now())
            self.post()

    def count_prompt(self, num_tokens: int) -> None:
        self._num_prompt_tokens += num_tokens

    def count_abort(self, cause: str) -> None:
        self._counts.aborted.add(cause)

    def count_outputs(self, steps: Iterable[StepOutput]) -> None:
        for step in steps:
            self._num_generated_tokens += len(step.token_ids)
            for finished in step.finished:
                if not finished.turn_ended:
                    self._num_finished += 1
                    self._counts.finished.add(finished.reason.value)

    def post(self) -> None:
        step_time = self._step_time
        self._snapshot.post(
            LoopStats(
                step_number=self.step_number,
                step_started_at=step_time.running_since,
                step_budget_s=step_time.budget_s,
                is_in_call=step_time.is_in_call,
                has_work=step_time.is_in_call or self._has_work(),
                num_prompt_tokens=self._num_prompt_tokens,
                num_generated_tokens=self._num_generated_tokens,
                num_finished=self._num_finished,
                scheduler=self._scheduler_stats(),
            )
        )
