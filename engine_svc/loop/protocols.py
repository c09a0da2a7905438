"""Protocols of the loop: the scheduler, the ranks, and the lockstep between data-parallel engines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from engine_svc.core.extras import Extra, Extras
from engine_svc.core.request import FinishReason, InputSegment, Request, RequestOutput
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.scheduler.config import PauseState
from engine_svc.scheduler.stats import SchedulerStats


class EngineScheduler(Protocol):
    """Decides what each step computes."""

    @property
    def has_work(self) -> bool:
        """Whether a step planned now could compute something."""
        ...

    @property
    def running_ids(self) -> list[str]: ...

    @property
    def waiting_ids(self) -> list[str]: ...

    def add(self, request: Request) -> None: ...

    def segment_refusal(self, request_id: str, segment: InputSegment) -> str | None:
        """Why this further input can never be served here, as a message for the client; None: it can be."""
        ...

    def extend(self, request_id: str, segment: InputSegment | None, now: float) -> list[RequestOutput]:
        """Begin the next turn of a resumable request; None: it ends with its turn, or now between two.

        If this raises, the request has to be ended.
        """
        ...

    def cancel_turn(self, request_id: str) -> None:
        """End the turn of a request with its next token; ignored between two turns."""
        ...

    def unblock(self, request_id: str, name: str) -> None:
        """Remove a blocker of a request; one that has ended is ignored."""
        ...

    def abort(
        self,
        request_ids: Iterable[str],
        now: float,
        cause: str = "",
        reason: FinishReason = FinishReason.ABORT,
    ) -> list[RequestOutput]:
        """End requests from outside; those that have ended already are ignored."""
        ...

    def withdraw(self, now: float) -> None:
        """Roll back every plan in flight: its requests wait again."""
        ...

    def restrict(self, only: Collection[str] | None, now: float, max_num_tokens: int | None = None) -> None:
        """Let only these requests run, with at most `max_num_tokens` tokens a step; None: no restriction."""
        ...

    def note(self, request_id: str, note: Extra, now: float) -> None:
        """Pass what a frontend says of a request, which may have ended, to the features."""
        ...

    def set_pause(self, state: PauseState) -> None:
        """Hold back everything, only admissions, or nothing, from the next plan on."""
        ...

    def reset_prefix_cache(self, now: float, *, reset_running: bool = False) -> bool:
        """Forget all cached content; False if requests hold blocks. `reset_running` preempts them first."""
        ...

    def on_idle(self, now: float) -> float | None:
        """Nothing can be computed at present. Returns when to call it again at the latest; None: never."""
        ...

    def schedule(self, now: float) -> StepPlan: ...

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestOutput]:
        """Apply the result of a plan, in the order of the plans."""
        ...

    def stats(self) -> SchedulerStats: ...


class Lockstep(Protocol):
    """Keeps data-parallel ranks in step. `has_work`: whether a step could compute something for this rank."""

    @property
    def needs_idle_step(self) -> bool:
        """Whether another rank has work, so that this one has to step without requests of its own."""
        ...

    def wants_step(self, has_work: bool) -> bool:
        """Whether `may_step` would return True; changes nothing."""
        ...

    def may_step(self, has_work: bool) -> bool:
        """Whether a step may be launched now; if so, the other ranks are made to launch theirs."""
        ...

    def on_step_launched(self, *, is_idle: bool, has_work: bool) -> None:
        """Note a step, `is_idle` if it has no request. May wait for the other ranks; raises PeersLost."""
        ...

    def on_step_done(self) -> None:
        """Note that the oldest step in flight has ended."""
        ...

    def leave_group(self, error: Exception) -> None:
        """A step has failed: no rank waits any longer for the steps in flight."""
        ...

    def check_quiet(self, *, or_apart: bool = False) -> None:
        """Raise FailedPrecondition, with the reason, while the ranks may step with this engine's model.

        or_apart: also return if this engine is in no group, as the call ends before it can be in one.
        """
        ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class PreparingRanks(Protocol):
    """All ranks. Each prepares in turns of the accounts, beside its steps.

    Each answers with a `Prepared` command, unless the request was dropped before.
    """

    @property
    def num_preparing(self) -> int:
        """How many ranks answer."""
        ...

    def prepare(self, number: int, request_id: str, extras: Extras, account: str, weight: int) -> None:
        """Prepare the extras of a request that has been added.

        number: unique, returned with the answer.  account, weight: whose turn it uses.
        """
        ...

    def drop_prepared(self, request_id: str) -> None:
        """The request has ended: forget what was prepared for it, or is being prepared."""
        ...

    def stop_preparing(self) -> None:
        """The engine ends."""
        ...


class RankCalls(Protocol):
    """Calls by name that every rank of the engine runs after the steps launched before them.

    Names and arguments are those of `runner_calls`. Answers are in the order of the ranks.
    """

    def call_all(
        self, name: str, arguments: Mapping[str, object] | None = None
    ) -> Sequence[Mapping[str, object]]:
        """A call that all ranks must do, or none: after Refused nothing has changed.

        Raises WeightsLost if some ranks have no weights any more and the others the old ones, RanksDisagree
        if only some ranks did it.
        """
        ...

    def call_each(
        self, name: str, arguments: Mapping[str, object] | None = None, *, undo: str = ""
    ) -> Sequence[Mapping[str, object]]:
        """A call whose effect ranks need not have in common: Refused if any rank refused.

        undo: a call that all ranks run if only some refused.
        """
        ...


class NoLockstep:
    """Null object: an engine without data-parallel peers steps whenever it has work."""

    needs_idle_step = False

    def wants_step(self, has_work: bool) -> bool:
        return has_work

    def may_step(self, has_work: bool) -> bool:
        return True

    def on_step_launched(self, *, is_idle: bool, has_work: bool) -> None:
        pass

    def on_step_done(self) -> None:
        pass

    def leave_group(self, error: Exception) -> None:
        pass

    def check_quiet(self, *, or_apart: bool = False) -> None:
        pass

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass
