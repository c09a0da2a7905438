"""State machine of an engine that runs, pauses or sleeps. Belongs to the engine thread.

No step is in flight during a call. A call that fails leaves the state as it was, or a deeper sleep from which
waking can be tried again. Knows no wire and no tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

from engine_svc.core.control import Refused, WakeTag
from engine_svc.core.errors import InvalidTransition
from engine_svc.loop.answer import give
from engine_svc.loop.engine import Engine
from engine_svc.loop.protocols import EngineScheduler, Lockstep, RankCalls
from engine_svc.scheduler.config import PauseState
from triptych_kit.clock import Clock
from triptych_kit.errors import Aborted, FailedPrecondition, InvalidArgument, ServiceError

logger = logging.getLogger(__name__)

MAX_SLEEP_LEVEL = 2


class PauseMode(Enum):
    """The effect of a pause on running requests."""

    ABORT = "abort"  # they are aborted, and so are waiting requests
    WAIT = "wait"  # they finish first; waiting requests keep waiting
    KEEP = "keep"  # they stop where they are


class RunState(Enum):
    """Whether an engine admits and runs requests, as its operator requested."""

    RUNNING = "running"
    PAUSING = "pausing"  # admits no request; running ones finish
    PAUSED = "paused"  # plans nothing
    ASLEEP = "asleep"  # plans nothing and has released memory


_TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    RunState.RUNNING: frozenset({RunState.PAUSING, RunState.PAUSED}),
    RunState.PAUSING: frozenset({RunState.RUNNING, RunState.PAUSED}),
    RunState.PAUSED: frozenset({RunState.RUNNING, RunState.PAUSING, RunState.ASLEEP}),
    RunState.ASLEEP: frozenset({RunState.PAUSED}),
}
_HELD = {
    RunState.RUNNING: PauseState.NONE,
    RunState.PAUSING: PauseState.NEW,
    RunState.PAUSED: PauseState.ALL,
    RunState.ASLEEP: PauseState.ALL,
}


@dataclass(frozen=True, slots=True)
class _Waiter:
    """A pending pause: its future, and the action to run once the engine is idle."""

    answer: Future[None]
    then: Callable[[], None]


class PauseController:
    """Pauses and sleeps of one engine. A call whose future was cancelled before has no effect."""

    def __init__(
        self,
        *,
        loop: Engine,
        scheduler: EngineScheduler,
        lockstep: Lockstep,
        ranks: RankCalls,
        clock: Clock,
    ) -> None:
        self._loop = loop
        self._scheduler = scheduler
        self._lockstep = lockstep
        self._ranks = ranks
        self._clock = clock
        self._state = RunState.RUNNING
        # The state of the engine once no call is pending and all parts are awake.
        self._resting_state = RunState.RUNNING
        self._asleep: frozenset[WakeTag] = frozenset()
        self._waiters: list[_Waiter] = []
        self._is_watching = False

    @property
    def state(self) -> RunState:
        """May be read by any thread."""
        return self._state

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused, or will be after its sleep; may be read by any thread."""
        return RunState.PAUSED in (self._state, self._resting_state) or self._state is RunState.PAUSING

    @property
    def asleep(self) -> frozenset[WakeTag]:
        """The parts that have to be woken before anything runs."""
        return self._asleep

    def pause(self, mode: PauseMode, answer: Future[None], *, clear_cache: bool = False) -> None:
        """Pause all requests until `resume`; answered when nothing runs any more.

        If the engine is paused already, the mode applies to the paused requests: abort, finish first or keep.
        """
        if self._state is RunState.ASLEEP:
            give(answer, _refuse_asleep)
            return
        self._begin_pause(mode, _Waiter(answer, lambda: self._complete_pause(clear_cache)))

    def resume(self) -> None:
        """End a pause; paused requests continue. Does nothing if the engine is not paused."""
        if self._state is RunState.ASLEEP:
            _refuse_asleep()
        self._dismiss_waiters("the engine was resumed before the running requests finished")
        self._resting_state = RunState.RUNNING
        self._move_to(RunState.RUNNING)

    def sleep(self, level: int, mode: PauseMode, answer: Future[None]) -> None:
        """Pause, then release memory; an engine that is asleep can sleep more deeply.

        level: 0 only stops scheduling. 1 releases the KV cache, and a GPU's weights with a copy in the host's
        memory. 2 releases the weights without a copy. From 1 on, paused requests compute their tokens anew
        afterwards, and all ranks that step together have to be paused before.
        """
        try:
            self._check_level(level)
        except ServiceError as error:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
            return
        if self._state is RunState.ASLEEP:
            give(answer, lambda: self._enter_sleep(level))
        else:
            self._begin_pause(mode, _Waiter(answer, lambda: self._enter_sleep(level)))

    def wake(self, tags: Collection[WakeTag] = tuple(WakeTag)) -> None:
        """Wake these parts. Once all parts are awake, the engine runs or is paused as before its sleep."""
        wanted = self._asleep.intersection(tags)
        on_device = wanted - {WakeTag.SCHEDULING}
        if on_device:
            self._ranks.call_each("wake", {"tags": [tag.value for tag in WakeTag if tag in on_device]})
        self.note_awake(wanted)

    def note_awake(self, tags: Collection[WakeTag]) -> None:
        """Count these parts as awake, e.g. because other weights were loaded."""
        if self._state is not RunState.ASLEEP:
            return
        self._asleep = self._asleep.difference(tags)
        if not self._asleep:
            self._move_to(RunState.PAUSED)
            self._return_to_resting_state()

    def note_away(self, tags: Collection[WakeTag]) -> None:
        """Count these parts as lost by an error: nothing runs before they are woken.

        No request may hold blocks.
        """
        self._dismiss_waiters("the engine has lost its weights or cache and sleeps until it is woken")
        self._asleep = self._asleep.union(tags)
        if self._state is not RunState.ASLEEP:
            self._move_to(RunState.PAUSED)
            self._move_to(RunState.ASLEEP)

    def drop_cancelled(self) -> None:
        """Drop calls whose futures were cancelled; if none is left, the engine continues as before."""
        self._waiters = [waiter for waiter in self._waiters if not waiter.answer.cancelled()]
        if self._state is RunState.PAUSING and not self._waiters:
            self._move_to(self._resting_state)

    def _begin_pause(self, mode: PauseMode, waiter: _Waiter) -> None:
        if waiter.answer.cancelled():
            return
        if mode is PauseMode.WAIT and self._scheduler.running_ids:
            self._move_to(RunState.PAUSING)
            self._waiters.append(waiter)
            self._watch()
            return
        if mode is PauseMode.ABORT:
            self._loop.abort([*self._scheduler.running_ids, *self._scheduler.waiting_ids], "pause")
        elif mode is PauseMode.KEEP:
            self._dismiss_waiters("another pause keeps the running requests where they are")
        waiters, self._waiters = [*self._waiters, waiter], []
        self._finish_pause(waiters)

    def _watch(self) -> None:
        # One callback serves all pending calls, however many came and went since it was registered.
        if not self._is_watching:
            self._is_watching = True
            self._loop.when_idle(self._on_loop_idle)

    def _on_loop_idle(self) -> None:
        self._is_watching = False
        if self._state is not RunState.PAUSING:
            return
        if self._scheduler.running_ids:
            self._watch()
            return
        waiters, self._waiters = self._waiters, []
        self._finish_pause(waiters)

    def _finish_pause(self, waiters: list[_Waiter]) -> None:
        self._move_to(RunState.PAUSED)
        for waiter in waiters:
            give(waiter.answer, waiter.then)
        # All of them may have been cancelled or refused.
        self._return_to_resting_state()

    def _complete_pause(self, clear_cache: bool) -> None:
        self._resting_state = RunState.PAUSED
        if clear_cache and not self._forget_cache():
            raise FailedPrecondition("KV blocks of some requests cannot be released; the engine is paused")

    def _enter_sleep(self, level: int) -> None:
        # Checked again: while running requests finished, this rank stepped with the others.
        self._check_level(level)
        before = self._asleep
        if level > 0 and not self._forget_cache():
            raise FailedPrecondition("KV blocks of some requests cannot be released")
        # After an unexpected error the state of the device is unknown: it counts as released, to be woken.
        self._asleep |= {WakeTag.SCHEDULING} if level == 0 else frozenset(WakeTag)
        self._move_to(RunState.ASLEEP)
        if level == 0:
            return
        try:
            self._ranks.call_all("sleep", {"level": level})
        except Refused:
            self._asleep = before
            if not before:
                self._move_to(RunState.PAUSED)
            raise

    def _forget_cache(self) -> bool:
        return self._scheduler.reset_prefix_cache(self._clock.now(), reset_running=True)

    def _check_level(self, level: int) -> None:
        if not 0 <= level <= MAX_SLEEP_LEVEL:
            raise InvalidArgument(
                f"level is {level}, it has to be 0 to {MAX_SLEEP_LEVEL}", field="sleep.level"
            )
        if level > 0:
            # Another rank may need this engine in its steps.
            self._lockstep.check_quiet()

    def _dismiss_waiters(self, why: str) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.answer.set_running_or_notify_cancel():
                waiter.answer.set_exception(Aborted(why))

    def _return_to_resting_state(self) -> None:
        if self._state is RunState.PAUSED:
            self._move_to(self._resting_state)

    def _move_to(self, state: RunState) -> None:
        if state is self._state:
            return
        if state not in _TRANSITIONS[self._state]:
            raise InvalidTransition(f"an engine that is {self._state.value} cannot become {state.value}")
        logger.info("run state changed", extra={"state": state.value, "before": self._state.value})
        self._state = state
        self._scheduler.set_pause(_HELD[state])
        if _HELD[state] is PauseState.ALL:
            self._lockstep.pause()
        else:
            # Running requests still have to finish, so this rank has to step.
            self._lockstep.resume()


def _refuse_asleep() -> None:
    raise FailedPrecondition("the engine is asleep: wake it first", reason="ENGINE_ASLEEP")
