"""The machine of pauses and sleeps between a fake loop and a fake runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

from engine_svc.core.control import Refused, WakeTag
from engine_svc.loop.pause import PauseController, PauseMode, RunState
from engine_svc.scheduler.config import PauseState
from triptych_kit.clock import FakeClock
from triptych_kit.errors import FailedPrecondition

RUNNING, PAUSING, PAUSED, ASLEEP = RunState
ALL = frozenset(WakeTag)


class FakeLoop:
    """Loop, scheduler and lockstep: counts requests; a turn ends one that runs, or runs the idle calls."""

    def __init__(self, num_running: int = 0) -> None:
        self.num_running = num_running
        self.num_aborted = 0
        self.num_resets = 0
        self.held = PauseState.NONE
        self.gives_blocks = True
        self.is_wanted = False  # by other ranks
        self.idle_calls: list[Callable[[], None]] = []

    @property
    def running_ids(self) -> list[str]:
        return [f"r{index}" for index in range(self.num_running)]

    @property
    def waiting_ids(self) -> list[str]:
        return []

    def check_quiet(self, *, or_apart: bool = False) -> None:
        if self.is_wanted:
            raise FailedPrecondition("another rank steps")

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def set_pause(self, state: PauseState) -> None:
        self.held = state

    def abort(self, request_ids: Iterable[str], cause: str) -> None:
        self.num_aborted += len(list(request_ids))
        self.num_running = 0

    def reset_prefix_cache(self, now: float, *, reset_running: bool) -> bool:
        self.num_resets += self.gives_blocks
        return self.gives_blocks

    def when_idle(self, call: Callable[[], None]) -> None:
        self.idle_calls.append(call)

    def turn(self) -> None:
        if self.num_running and self.held is not PauseState.ALL:
            self.num_running -= 1
        if not self.num_running or self.held is PauseState.ALL:
            calls, self.idle_calls = self.idle_calls, []
            for call in calls:
                call()


class FakeRunner:
    """Knows what is away. `error` is raised by the next call: a refusal before, anything else halfway."""

    def __init__(self) -> None:
        self.away: frozenset[WakeTag] = frozenset()
        self.error: Exception | None = None
        self.levels: list[int] = []

    def call_all(self, name: str, arguments: Mapping[str, int]) -> None:
        assert name == "sleep"
        self._refuse()
        self.away |= {WakeTag.KV_CACHE}
        self._fail()
        self.away |= {WakeTag.WEIGHTS}
        self.levels.append(arguments["level"])

    def call_each(self, name: str, arguments: Mapping[str, list[str]]) -> None:
        assert name == "wake"
        tags = {WakeTag(tag) for tag in arguments["tags"]}
        self._refuse()
        self.away -= {WakeTag.WEIGHTS} & tags
        self._fail()
        self.away -= {WakeTag.KV_CACHE} & tags

    def _refuse(self) -> None:
        if isinstance(self.error, Refused):
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
        self.machine = PauseController(
            loop=self.loop, scheduler=self.loop, lockstep=self.loop, ranks=self.runner, clock=FakeClock()
        )

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
