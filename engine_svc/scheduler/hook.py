"""How optional features observe the scheduler. Knows none of them."""

from __future__ import annotations

from typing import Protocol

from engine_svc.core.request import Request
from engine_svc.core.step import StepPlan, StepResult


class SchedulerHook(Protocol):
    """Observes and never decides. Called in the order of registration, in the engine thread."""

    def on_add(self, request: Request) -> None:
        """A request was added. A hook that puts a name into `request.blockers` must unblock it later."""

    def on_plan(self, plan: StepPlan) -> None:
        """A plan with rows is complete. May attach a part: `plan.extras[Type] = value`."""

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        """The tokens of a step have been appended."""

    def on_withdraw(self) -> None:
        """Every step in flight was rolled back: no `on_update` follows for any of them."""

    def on_finish(self, request: Request) -> None:
        """A request ended; reason and times are set. Its blocks become free after this unless held now."""
