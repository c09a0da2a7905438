"""What the loop asks of who decides: of the scheduler, and of the lockstep. Declared for the loop alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from engine_svc.core.request import FinishReason, Request, RequestOutput
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.scheduler.stats import SchedulerStats


class EngineScheduler(Protocol):
    """Decides what each step computes, and takes in what it yielded."""

    @property
    def has_work(self) -> bool:
        """Whether a step planned now could compute something."""
        ...

    def add(self, request: Request) -> None:
        """Enter a new request into the queue."""
        ...

    def abort(
        self,
        request_ids: Iterable[str],
        now: float,
        cause: str = "",
        reason: FinishReason = FinishReason.ABORT,
    ) -> list[RequestOutput]:
        """End requests from outside; what has ended already is ignored."""
        ...

    def withdraw(self, now: float) -> None:
        """Take back every plan that has not come back: its requests wait again."""
        ...

    def restrict(self, only: Collection[str] | None, now: float, max_num_tokens: int | None = None) -> None:
        """Let only these run, on so many tokens a step; None: everybody, and as many as ever."""
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


class Lockstep(Protocol):
    """Keeps data-parallel ranks in step. `has_work`: whether a step could compute something for this rank."""

    @property
    def needs_idle_step(self) -> bool:
        """Whether another rank works, so that this one has to take part without requests of its own."""
        ...

    def wants_step(self, has_work: bool) -> bool:
        """What `may_step` would say; changes nothing."""
        ...

    def may_step(self, has_work: bool) -> bool:
        """Whether a step may be launched now; the other ranks are told to launch theirs."""
        ...

    def on_step_launched(self, *, is_idle: bool, has_work: bool) -> None:
        """A step was launched, `is_idle`: for no request here. May wait for the others; raises PeersLost."""
        ...

    def on_step_done(self) -> None:
        """The oldest step in flight has ended."""
        ...

    def leave_group(self, error: Exception) -> None:
        """A step has failed: none of those in flight is waited for, here and by the other ranks."""
        ...


class NoLockstep:
    """Steps whenever there is something to compute, and stands still whenever it is told to."""

    needs_idle_step = False

    def wants_step(self, has_work: bool) -> bool:
        """Where there is something to compute."""
        return has_work

    def may_step(self, has_work: bool) -> bool:
        """Always."""
        return True

    def on_step_launched(self, *, is_idle: bool, has_work: bool) -> None:
        """Nobody else does."""

    def on_step_done(self) -> None:
        """Nobody has waited for it."""

    def leave_group(self, error: Exception) -> None:
        """It is nobody else's."""

    def check_quiet(self, *, or_apart: bool = False) -> None:
        """Nobody else would want a step."""

    def pause(self) -> None:
        """Nobody has to know."""

    def resume(self) -> None:
        """Nobody has waited."""
