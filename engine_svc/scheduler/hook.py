"""How optional features listen to the scheduler. Knows none of them."""

from __future__ import annotations

from typing import Protocol

from engine_svc.core.request import Request
from engine_svc.core.step import StepPlan, StepResult


class SchedulerHook(Protocol):
    """Told, never asked. Called in the order of registration, in the thread of the loop."""

    def on_add(self, request: Request) -> None:
        """A request came. May put a name in `request.blockers`; who did must have it unblocked later."""

    def on_plan(self, plan: StepPlan) -> None:
        """A plan with rows is complete. May attach its part: `plan.extras[Type] = value`."""

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        """The tokens of a step have been appended."""

    def on_withdraw(self) -> None:
        """Every step in flight was taken back: there is no `on_update` of any of them."""

    def on_finish(self, request: Request) -> None:
        """A request ended; reason and times are set. Its blocks become free after this, unless held now."""
