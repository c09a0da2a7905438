"""The machine of pauses and sleeps between a fake loop and a fake runner."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future

from engine_svc.loop.pause import Part, PauseController, PauseMode, RunState
from engine_svc.scheduler.config import PauseState
from service_kit.errors import FailedPrecondition

RUNNING, PAUSING, PAUSED, ASLEEP = RunState
ALL = frozenset(Part)


class FakeLoop:
    """Counts requests; a turn of it ends one that runs, or wakes the waits where none does."""

    def __init__(self, num_running: int = 0) -> None:
        self.num_running = num_running
        self.num_aborted = 0
        self.num_resets = 0
        self.held = PauseState.NONE
        self.gives_blocks = True
        self.is_wanted = False  # by other ranks
        self.idle_calls: list[Callable[[], None]] = []

    @property
    def has_running(self) -> bool:
        return self.num_running > 0

    def check_quiet(self) -> None:
        if self.is_wanted:
            raise FailedPrecondition("another rank steps")

    def hold(self, state: PauseState) -> None:
        self.held = state

    def abort_all(self) -> None:
        self.num_aborted += self.num_running
        self.num_running = 0

    def forget_cache(self) -> bool:
        self.num_resets += self.gives_blocks
        return self.gives_blocks

    def when_idle(self, call: Callable[[], None]) -> None:
        self.idle_calls.append(call)

    def turn(self) -> None:
        if self.has_running and self.held is not PauseState.ALL:
            self.num_running -= 1
        if not self.has_running or self.held is PauseState.ALL:
            calls, self.idle_calls = self.idle_calls, []
            for call in calls:
                call()


class FakeRunner:
    """Knows what is away. `error` is raised by the next call: a refusal before, anything else halfway."""

    def __init__(self) -> None:
        self.away: frozenset[Part] = frozenset()
        self.error: Exception | None = None
        self.levels: list[int] = []

    def sleep(self, level: int) -> None:
        self._refuse()
        self.away |= {Part.KV_CACHE}
        self._fail()
        self.away |= {Part.WEIGHTS}
        self.levels.append(level)

    def wake(self, parts: Collection[Part]) -> None:
        self._refuse()
        self.away -= {Part.WEIGHTS} & set(parts)
        self._fail()
        self.away -= {Part.KV_CACHE} & set(parts)

    def _refuse(self) -> None:
        if isinstance(self.error, FailedPrecondition):
            error, self.error = self.error, None
            raise error

    def _fail(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error


class Rig:
    """A machine between a fake loop and a fake runner; each call returns its answer."""

    def __init__(self, num_running: int = 0) -> None:
        self.loop, self.runner = FakeLoop(num_running), FakeRunner()
        self.machine = PauseController(self.loop, self.runner)

    def pause(self, mode: PauseMode = PauseMode.KEEP, *, clear_cache: bool = False) -> Future[None]:
        answer: Future[None] = Future()
        self.machine.pause(mode, answer, clear_cache=clear_cache)
        return answer

    def sleep(self, level: int = 1, mode: PauseMode = PauseMode.KEEP) -> Future[None]:
        answer: Future[None] = Future()
        self.machine.sleep(level, mode, answer)
        return answer


def in_state(state: RunState) -> Rig:
    """A rig in this state; where nothing has ended them, two requests run."""
    rig = Rig(num_running=2)
    if state is PAUSING:
        rig.pause(PauseMode.WAIT)
    elif state is PAUSED:
        rig.pause(PauseMode.KEEP)
    elif state is ASLEEP:
        rig.sleep(2)
    assert rig.machine.state is state
    return rig
