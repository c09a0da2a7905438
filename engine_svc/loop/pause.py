"""Whether an engine runs, pauses or sleeps, as one state machine. Belongs to the engine thread.

Every call finds no step in flight. One that fails leaves the state it found, or a deeper sleep, from which
waking can be tried again. Knows no wire, no tensors and no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from engine_svc.loop.answer import give
from engine_svc.scheduler.config import PauseState
from service_kit.errors import Aborted, FailedPrecondition, InvalidArgument, InvalidTransition, ServiceError

logger = logging.getLogger(__name__)

MAX_SLEEP_LEVEL = 2


class PauseMode(Enum):
    """What a pause does to running requests."""

    ABORT = "abort"  # they end, and so do those that wait
    WAIT = "wait"  # they finish first; those that wait stay where they are
    KEEP = "keep"  # they are held where they are


class Part(Enum):
    """What can be woken by itself; the value is its name on the wire."""

    SCHEDULING = "scheduling"
    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class RunState(Enum):
    """What an engine does with its requests, by an operator's wish."""

    RUNNING = "running"
    PAUSING = "pausing"  # admits nobody; the running go on to their ends
    PAUSED = "paused"  # plans nothing
    ASLEEP = "asleep"  # plans nothing, and has given something back


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


class HeldLoop(Protocol):
    """The loop and the scheduler that are to stand still."""

    @property
    def has_running(self) -> bool:
        """Whether any request runs, held ones included."""
        ...

    def check_quiet(self) -> None:
        """Raise FailedPrecondition while another rank may want this engine to take part in its steps."""
        ...

    def hold(self, state: PauseState) -> None:
        """Hold back everything, only admissions, or nothing, from the next plan on."""
        ...

    def abort_all(self) -> None:
        """End every request, running or waiting."""
        ...

    def forget_cache(self) -> bool:
        """Take the blocks of all requests, which compute their tokens anew, and forget what is cached.

        False where some blocks cannot be taken.
        """
        ...

    def when_idle(self, call: Callable[[], None]) -> None:
        """Call it once, as soon as nothing runs."""
        ...


class SleepingRunner(Protocol):
    """The device's side. Each of both raises FailedPrecondition where it refuses.

    A sleep changes nothing then; of a wake, the next one does what is left.
    """

    def sleep(self, level: int) -> None:
        """Give memory back; what is away stays away."""
        ...

    def wake(self, parts: Collection[Part]) -> None:
        """Take memory again for what of these is away."""
        ...


@dataclass(frozen=True, slots=True)
class _Waiter:
    """Who wants the engine to stand still, and what to do for him when it does."""

    answer: Future[None]
    then: Callable[[], None]


class PauseController:
    """Pauses and sleeps of one engine. An answer that was cancelled before it was given has no effect."""

    def __init__(self, loop: HeldLoop, runner: SleepingRunner) -> None:
        self._loop = loop
        self._runner = runner
        self._state = RunState.RUNNING
        # Where the engine goes when nobody waits for anything and all of it is awake.
        self._resting_state = RunState.RUNNING
        self._asleep: frozenset[Part] = frozenset()
        self._waiters: list[_Waiter] = []
        self._is_watching = False

    @property
    def state(self) -> RunState:
        """Where the engine stands; may be read by any thread."""
        return self._state

    @property
    def is_paused(self) -> bool:
        """Whether a pause holds, below a sleep too; may be read by any thread."""
        return RunState.PAUSED in (self._state, self._resting_state) or self._state is RunState.PAUSING

    @property
    def asleep(self) -> frozenset[Part]:
        """What has to be woken before anything runs."""
        return self._asleep

    def pause(self, mode: PauseMode, answer: Future[None], *, clear_cache: bool = False) -> None:
        """Hold all requests until `resume`; answered when nothing runs any more.

        Paused already, it acts on what is held: the mode decides whether that ends, finishes first or stays.
        """
        if self._state is RunState.ASLEEP:
            give(answer, _refuse_asleep)
            return
        self._begin_pause(mode, _Waiter(answer, lambda: self._complete_pause(clear_cache)))

    def resume(self) -> None:
        """End a pause; what was held goes on. Does nothing where there is none."""
        if self._state is RunState.ASLEEP:
            _refuse_asleep()
        self._dismiss_waiters("the pause was ended before the running requests were")
        self._resting_state = RunState.RUNNING
        self._enter(RunState.RUNNING)

    def sleep(self, level: int, mode: PauseMode, answer: Future[None]) -> None:
        """Stand still as in a pause, then give memory back; from a sleep, go on to a deeper one.

        level: 0 stops scheduling alone; 1 gives back the KV cache, and a GPU's weights, which the host keeps;
        2 gives the weights up. From 1 on, requests that are held compute their tokens anew afterwards, and
        all ranks that step together have to be paused before.
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

    def wake(self, parts: Collection[Part] = tuple(Part)) -> None:
        """Take back what the parts name. Once all is awake, it is as before the sleep: running, or paused."""
        wanted = self._asleep.intersection(parts)
        on_device = wanted - {Part.SCHEDULING}
        if on_device:
            self._runner.wake(on_device)
        self.note_awake(wanted)

    def note_awake(self, parts: Collection[Part]) -> None:
        """These parts are there again, e.g. because other weights were loaded."""
        if self._state is not RunState.ASLEEP:
            return
        self._asleep = self._asleep.difference(parts)
        if not self._asleep:
            self._enter(RunState.PAUSED)
            self._return_to_resting_state()

    def note_away(self, parts: Collection[Part]) -> None:
        """These parts are gone by an accident: nothing runs before they are woken.

        No request may hold blocks.
        """
        self._dismiss_waiters("the engine has lost what a step needs, and sleeps until it is woken")
        self._asleep = self._asleep.union(parts)
        if self._state is not RunState.ASLEEP:
            self._enter(RunState.PAUSED)
            self._enter(RunState.ASLEEP)

    def drop_cancelled(self) -> None:
        """Forget who gave up waiting; where nobody is left, the engine goes on as before."""
        self._waiters = [waiter for waiter in self._waiters if not waiter.answer.cancelled()]
        if self._state is RunState.PAUSING and not self._waiters:
            self._enter(self._resting_state)

    def _begin_pause(self, mode: PauseMode, waiter: _Waiter) -> None:
        if waiter.answer.cancelled():
            return
        if mode is PauseMode.WAIT and self._loop.has_running:
            self._enter(RunState.PAUSING)
            self._waiters.append(waiter)
            self._watch()
            return
        if mode is PauseMode.ABORT:
            self._loop.abort_all()
        elif mode is PauseMode.KEEP:
            self._dismiss_waiters("another pause holds the running requests where they are")
        waiters, self._waiters = [*self._waiters, waiter], []
        self._finish_pause(waiters)

    def _watch(self) -> None:
        # One call is enough for all who wait, however many came and went since it was asked for.
        if not self._is_watching:
            self._is_watching = True
            self._loop.when_idle(self._on_loop_idle)

    def _on_loop_idle(self) -> None:
        self._is_watching = False
        if self._state is not RunState.PAUSING:
            return
        if self._loop.has_running:
            self._watch()
            return
        waiters, self._waiters = self._waiters, []
        self._finish_pause(waiters)

    def _finish_pause(self, waiters: list[_Waiter]) -> None:
        self._enter(RunState.PAUSED)
        for waiter in waiters:
            give(waiter.answer, waiter.then)
        # All of them may have given up, or been refused.
        self._return_to_resting_state()

    def _complete_pause(self, clear_cache: bool) -> None:
        self._resting_state = RunState.PAUSED
        if clear_cache and not self._loop.forget_cache():
            raise FailedPrecondition("some requests do not give up their blocks; the engine is paused")

    def _enter_sleep(self, level: int) -> None:
        # Again, as who let requests end first has stepped with the other ranks meanwhile.
        self._check_level(level)
        before = self._asleep
        if level > 0 and not self._loop.forget_cache():
            raise FailedPrecondition("some requests do not give up their blocks")
        # What an error nobody has foreseen leaves on the device is not known: it counts as away, to be woken.
        self._asleep |= {Part.SCHEDULING} if level == 0 else frozenset(Part)
        self._enter(RunState.ASLEEP)
        if level == 0:
            return
        try:
            self._runner.sleep(level)
        except FailedPrecondition:
            self._asleep = before
            if not before:
                self._enter(RunState.PAUSED)
            raise

    def _check_level(self, level: int) -> None:
        if not 0 <= level <= MAX_SLEEP_LEVEL:
            raise InvalidArgument(
                f"level is {level}, it has to be 0 to {MAX_SLEEP_LEVEL}", field="sleep.level"
            )
        if level > 0:
            self._loop.check_quiet()

    def _dismiss_waiters(self, why: str) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.answer.set_running_or_notify_cancel():
                waiter.answer.set_exception(Aborted(why))

    def _return_to_resting_state(self) -> None:
        if self._state is RunState.PAUSED:
            self._enter(self._resting_state)

    def _enter(self, state: RunState) -> None:
        if state is self._state:
            return
        if state not in _TRANSITIONS[self._state]:
            raise InvalidTransition(f"an engine that is {self._state.value} cannot become {state.value}")
        logger.info("standstill", extra={"state": state.value, "before": self._state.value})
        self._state = state
        self._loop.hold(_HELD[state])


def _refuse_asleep() -> None:
    raise FailedPrecondition("the engine is asleep: wake it first", reason="ENGINE_ASLEEP")
